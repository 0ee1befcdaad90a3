"""Code contexts through the one door."""

from __future__ import annotations

import base64

import pytest
from tests.support.calls import ADMIN
from tests.support.environments_ground import attach, context, stocked

from carrel.control.plane import ControlPlane
from carrel.control.python.code_contexts import clean_cell
from carrel.errors import Conflict, Denied, InvalidRequest, NotFound
from carrel.models import (
    CellError,
    CellRequest,
    CellResult,
    EnvironmentAttach,
    PolicyDocuments,
    PythonRequest,
    RichResult,
    SandboxRequest,
    TerminateRequest,
)
from carrel.redaction.redact import Redactor


@pytest.fixture
async def box(plane: ControlPlane) -> str:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    return "c"


async def test_cells(plane: ControlPlane, box: str) -> None:
    do = plane.code_contexts
    await plane.secrets.put("c", "KEY", b"very-secret-value")
    first = await do.run_cell(ADMIN, box, "a", CellRequest(code="x = 'very-secret' + '-value'\nprint(x)\nx"))
    assert (first.stdout, first.text, first.fresh) == ("[secret:KEY]\n", "'[secret:KEY]'", True)
    info = await do.start_cell(ADMIN, box, "a", CellRequest(code="print(len(x))"))
    chunks = [chunk async for chunk in do.cell_output(ADMIN, box, "a", info.id)]
    assert b"".join(chunk.data for chunk in chunks if chunk.stream == "stdout") == b"17\n"
    assert (await do.get_cell(ADMIN, box, "a", info.id)).number == 2
    assert [each.name for each in (await do.list(ADMIN, box)).items] == ["a"]
    assert (await do.get(ADMIN, box, "a")).state == "idle"
    assert (await do.interrupt(ADMIN, box, "a")).cells == 2
    assert (await do.restart(ADMIN, box, "a")).cells == 0
    await do.delete(ADMIN, box, "a")
    with pytest.raises(NotFound):
        await do.get(ADMIN, box, "a")
    with pytest.raises(InvalidRequest):
        await do.run_cell(ADMIN, box, "../x", CellRequest(code="1"))


async def test_policy(plane: ControlPlane, box: str) -> None:
    rules = {"permissions": {"allow": ["shell(echo:*)"], "deny": ["shell(python3:*)"]}}
    await plane.policy_changes.put("c", PolicyDocuments(settings=rules), "ann")
    with pytest.raises(Denied):
        await plane.code_contexts.run_cell(ADMIN, box, "a", CellRequest(code="1"))


def test_every_form_is_cleaned() -> None:
    redactor = Redactor({"KEY": "very-secret-value"})
    image = base64.b64encode(b"\x89PNG very-secret-value").decode()
    data = {
        "text/plain": "very-secret-value",
        "text/html": "<b>very-secret-value</b>",
        "image/png": image,
        "image/jpeg": "%",
    }
    shown = clean_cell(
        redactor,
        CellResult(
            id="1",
            context="a",
            number=1,
            status="error",
            stdout="very-secret-value",
            stderr="very-secret-value",
            results=[RichResult(kind="result", data=data)],
            error=CellError(name="E", value="very-secret-value", traceback="very-secret-value"),
            duration_ms=1,
        ),
    )
    assert "very-secret-value" not in shown.model_dump_json()
    assert b"very-secret-value" not in (shown.results[0].png or b"")
    assert "image/jpeg" not in shown.results[0].data


async def version(plane: ControlPlane, **more: object) -> str:
    request = CellRequest(code="import nail; nail.version", **more)  # type: ignore[arg-type]
    cell = await plane.code_contexts.run_cell(ADMIN, "c", "a", request)
    return (cell.text or "") if cell.ok else cell.error.value if cell.error else cell.status


async def test_after_a_restart_of_its_sandbox_it_has_its_environment(plane: ControlPlane) -> None:
    async with stocked() as index:
        name = await context(plane, index)
        assert await version(plane, requirements=["nail"]) == "'1.0'"
        assert await version(plane) == "'1.0'"
        await plane.operations.stop(ADMIN, name)
        await context(plane, index)
        assert await version(plane) == "'1.0'", "without being told again"
        info = await plane.code_contexts.start_cell(ADMIN, name, "a", CellRequest(code="nail.version"))
        assert (await plane.code_contexts.get_cell(ADMIN, name, "a", info.id)).text == "'1.0'"
        await plane.code_contexts.delete(ADMIN, name, "a")
        assert await version(plane) == "No module named 'nail'", "a new one of the name has none"
        with pytest.raises(Conflict):
            await version(plane, requirements=["nail"])
        await plane.code_contexts.delete(ADMIN, name, "a")
        assert await version(plane, requirements=["nail"]) == "'1.0'"
        other = await attach(plane, name, "plank")
        with pytest.raises(Conflict):
            await version(plane, env=other.name)
        assert await version(plane) == "'1.0'", "what was refused is not remembered"
        await plane.operations.terminate(ADMIN, name, TerminateRequest())
        await context(plane, index)
        assert await version(plane) == "No module named 'nail'", "another session"


async def test_on_another_server_it_has_its_environment(nodes: list[ControlPlane]) -> None:
    async with stocked() as index:
        one, two = nodes
        name = await context(one, index)
        await context(two, index, "stranger")
        built = await attach(one, name, "nail")
        await one.environments.label(one.environments.find(ADMIN, built.name), "tools")
        assert await version(one, env="tools") == "'1.0'"
        await one.operations.stop(ADMIN, name)
        await two.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id=name))
        assert two.environments.known(built.name) is None, "nobody has built it here"
        assert await version(two) == "'1.0'"
        for env in ("tools", built.name):
            found = await two.python.run(ADMIN, name, PythonRequest(code="import nail; print(1)", env=env))
            assert found.stdout == "1\n"
            with pytest.raises(NotFound):
                await two.envs.attach(ADMIN, "stranger", EnvironmentAttach(env=env))
        await two.operations.stop(ADMIN, name)
        await one.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id=name))
        assert await version(one) == "'1.0'", "and back"
