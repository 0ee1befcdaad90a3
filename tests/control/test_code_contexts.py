"""Code contexts through the one door."""

from __future__ import annotations

import base64

import pytest

from carrel.control.code_contexts import clean_cell
from carrel.control.plane import ControlPlane
from carrel.errors import Denied, InvalidRequest, NotFound
from carrel.events.redact import Redactor
from carrel.models import CellError, CellRequest, CellResult, PolicyDocuments, RichResult, SandboxRequest


@pytest.fixture
async def box(plane: ControlPlane) -> str:
    await plane.sessions.deploy_or_resume(SandboxRequest(context_id="c"))
    return "c"


async def test_cells(plane: ControlPlane, box: str) -> None:
    do = plane.operations.code_contexts
    await plane.secrets.put("c", "KEY", b"very-secret-value")
    first = await do.run_cell(box, "a", CellRequest(code="x = 'very-secret' + '-value'\nprint(x)\nx"))
    assert (first.stdout, first.text, first.fresh) == ("[secret:KEY]\n", "'[secret:KEY]'", True)
    info = await do.start_cell(box, "a", CellRequest(code="print(len(x))"))
    chunks = [chunk async for chunk in do.cell_output(box, "a", info.id)]
    assert b"".join(chunk.data for chunk in chunks if chunk.stream == "stdout") == b"17\n"
    assert (await do.get_cell(box, "a", info.id)).number == 2
    assert [each.name for each in (await do.list(box)).items] == ["a"]
    assert (await do.get(box, "a")).state == "idle"
    assert (await do.interrupt(box, "a")).cells == 2
    assert (await do.restart(box, "a")).cells == 0
    await do.delete(box, "a")
    with pytest.raises(NotFound):
        await do.get(box, "a")
    with pytest.raises(InvalidRequest):
        await do.run_cell(box, "../x", CellRequest(code="1"))


async def test_policy(plane: ControlPlane, box: str) -> None:
    rules = {"permissions": {"allow": ["shell(echo:*)"], "deny": ["shell(python3:*)"]}}
    await plane.put_policy("c", PolicyDocuments(settings=rules), "ann")
    with pytest.raises(Denied):
        await plane.operations.code_contexts.run_cell(box, "a", CellRequest(code="1"))


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
