"""Packages of templates, in real sandboxes, from a real index."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.support.calls import ADMIN
from tests.support.environments_ground import attach, sources, stocked
from tests.support.indexes import IndexServer, wheel
from tests.support.sandboxes import until

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.control.python import template_packages as module
from carrel.control.sessions import templates as templates_module
from carrel.errors import Conflict, InvalidRequest, NotFound, PlatformError
from carrel.models import (
    CellRequest,
    CommandRequest,
    EnvironmentAttach,
    ExecuteRequest,
    PolicyDocuments,
    PythonRequest,
    SandboxRequest,
    StatelessRequest,
    TerminateRequest,
    Trust,
)

LOADED = "import sys; print([name in sys.modules for name in ('plank', 'shelf')])"


def template(settings: Settings, index: IndexServer, name: str = "boards", recipe: str = "", **more: object) -> Path:
    folder = Path(settings.data_dir, "templates", name)
    folder.mkdir(parents=True)
    (folder / "template.toml").write_text(recipe or 'packages = ["shelf"]\nimports = ["plank"]\n')
    (folder / "sources.json").write_text(json.dumps(sources(index, **more)))
    return folder


async def made(plane: ControlPlane, name: str | None = "c", **more: object) -> str:
    request = SandboxRequest(context_id=name, template="boards", **more)  # type: ignore[arg-type]
    return (await plane.operations.deploy_or_resume(ADMIN, request))[0].id


async def python(plane: ControlPlane, box: str, code: str) -> str:
    result = await plane.python.run(ADMIN, box, PythonRequest(code=code))
    return result.stdout + result.stderr


async def command(plane: ControlPlane, box: str, text: str) -> str:
    result = await plane.operations.run_command(ADMIN, box, CommandRequest(command=text, timeout=60))
    return result.stdout + result.stderr


async def test_all_python_of_its_sandboxes_has_them(plane: ControlPlane, settings: Settings) -> None:
    async with stocked() as index:
        template(settings, index)
        box = await made(plane, network="allowlist")
        assert await python(plane, box, LOADED) == "[True, False]\n", "what the template says is imported ahead"
        assert await python(plane, box, "import shelf; print(shelf.version)") == "1.0\n"
        cell = await plane.code_contexts.run_cell(ADMIN, box, "a", CellRequest(code="import shelf; shelf.version"))
        assert cell.text == "'1.0'"
        done = await plane.tools.execute(ADMIN, box, ExecuteRequest(language="python", code="import shelf; print(1)"))
        assert done.output == "1\n"
        path = (await command(plane, box, "python3 -c 'import shelf, sys; print(sys.prefix)'")).strip()
        assert path == f"/envs/{(await plane.envs.list(ADMIN, box)).items[0].name}"
        assert await command(plane, box, "echo $CARREL_ENV; echo $PATH") == (
            f"{path}\n/etc/carrel/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:"
            f"/workspace/.venv/bin:{path}/bin\n"
        )
        bare = (await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="bare")))[0].id
        assert "No module named 'shelf'" in await python(plane, bare, "import shelf")


async def test_what_an_agent_installs_comes_on_top(plane: ControlPlane, settings: Settings) -> None:
    async with stocked() as index:
        template(settings, index)
        box = await made(plane, network="allowlist")
        for each in ("pip", "python3 -m pip", "$CARREL_ENV/bin/python -m pip"):
            assert "shelf" in await command(plane, box, f"{each} list"), each
        assert "already satisfied" in await command(plane, box, "pip install shelf")
        look = "import shelf, nail; print(shelf.__file__.split('/')[1], nail.__file__.split('/')[1])"
        code = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', 'nail'])"
        assert await python(plane, box, code) == ""
        for _ in range(2):
            assert await python(plane, box, look) == "envs workspace\n"
            assert await command(plane, box, f'python3 -c "{look}"') == "envs workspace\n"
            assert await python(plane, box, LOADED) == "[True, False]\n", "also there it is imported ahead"
            await plane.operations.stop(ADMIN, box)
            assert await made(plane) == box
        fork = await plane.snapshots.fork(ADMIN, "c", "fork")
        assert await command(plane, fork.id, f'python3 -c "{look}"') == "envs workspace\n"
        assert "nail" in await command(plane, box, "python3 -m pip list; python3 -m pip uninstall -y nail")
        assert "No module named 'nail'" in await python(plane, box, look)


async def test_a_virtual_environment_that_was_there_before_gets_them(plane: ControlPlane, settings: Settings) -> None:
    async with stocked() as index:
        folder = template(settings, index, recipe="description = 'none yet'")
        box = await made(plane, network="allowlist")
        assert await command(plane, box, "pip install -q nail") == ""
        (folder / "template.toml").write_text('packages = ["shelf"]')
        await plane.operations.stop(ADMIN, box)
        await until(lambda: _has_packages(plane))
        await made(plane)
        assert await command(plane, box, "python3 -c 'import shelf, nail; print(1)'") == "1\n"


async def _has_packages(plane: ControlPlane) -> bool:
    return bool((await plane.templates.get("boards")).recipe.packages)


async def test_built_once_however_many_ask(plane: ControlPlane, settings: Settings) -> None:
    async with stocked() as index:
        template(settings, index)
        boxes = [await made(plane, name) for name in ("a", "b", None)]
        said = await asyncio.gather(*(python(plane, box, "import shelf; print(1)") for box in [*boxes, *boxes]))
        assert said == ["1\n"] * 6
        assert sorted(path for path in index.files_asked() if path.endswith(".whl")) == [
            "/pool/plank/plank-1.0-py3-none-any.whl",
            "/pool/shelf/shelf-1.0-py3-none-any.whl",
        ]
        [listed] = (await plane.packages.environments(ADMIN)).items
        assert listed.templates == ["boards"] and listed.in_use
        plane.environments.grace_s = 0
        plane.environments._settings = settings.envs.model_copy(update={"ttl_days": 1e-9})
        assert await plane.environments.evict() == 0
        done = await plane.router.run(ADMIN, StatelessRequest(code="import shelf; print(2)", template="boards"))
        assert done.output == "2\n"


async def test_listed(plane: ControlPlane, settings: Settings) -> None:
    async with stocked() as index:
        template(settings, index, recipe='packages = ["Shelf"]')
        listed = {each.name: each for each in (await plane.packages.templates()).items}
        assert (listed["boards"].packages, listed["boards"].built, listed["boards"].shipped) == (
            ["Shelf"],
            False,
            False,
        )
        shipped = listed["code-interpreter"]
        assert shipped.shipped and {"numpy", "pandas", "matplotlib"} <= set(shipped.packages)
        box = await made(plane)
        assert await python(plane, box, LOADED) == "[False, True]\n", "without a word, what the packages are"
        assert [each.name for each in (await plane.packages.templates()).items if each.built] == ["boards"]


async def test_the_operators_own_comes_before_one_that_is_shipped(
    plane: ControlPlane, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates_module, "FRESH_S", 0.0)
    assert (await plane.templates.get("code-interpreter")).shipped
    folder = Path(settings.data_dir, "templates", "code-interpreter")
    folder.mkdir(parents=True)
    own = await plane.templates.get("code-interpreter")
    assert (own.shipped, own.recipe.packages) == (False, [])
    folder.rmdir()
    assert (await plane.templates.get("code-interpreter")).shipped


async def test_what_is_blocked_is_told_and_commands_go_on(
    plane: ControlPlane, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stocked() as index:
        template(settings, index)
        ready = await python(plane, await made(plane, "first"), "import shelf; print(1)")
        assert ready == "1\n"
        blocked = PolicyDocuments(sources=sources(index, blocked_packages=["plank"]))
        await plane.policy_changes.put("c", blocked, "tests")
        box = await made(plane)
        for _ in range(2):
            with pytest.raises(
                PlatformError, match=r"(?s)packages of the template 'boards' are not available.*plank"
            ) as caught:
                await python(plane, box, "print(1)")
            assert caught.value.field == "template" and caught.value.hint
        with pytest.raises(PlatformError, match="plank"):
            await plane.code_contexts.run_cell(ADMIN, box, "a", CellRequest(code="1"))
        assert await command(plane, box, "echo on") == "on\n"
        assert (await plane.envs.list(ADMIN, box)).items == [], "also though it lies ready"
        assert await python(plane, "first", "import shelf; print(1)") == "1\n"
        await plane.policy_changes.put("c", PolicyDocuments(sources=sources(index)), "tests")
        with pytest.raises(PlatformError):
            await python(plane, box, "print(1)")
        monkeypatch.setattr(module, "PAUSE_S", 0.0)
        (await plane.sessions.find(box)).refused = None
        assert await python(plane, box, "import shelf; print(2)") == "2\n"


async def test_who_comes_while_they_are_built_waits_or_is_told(
    plane: ControlPlane, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stocked() as index:
        template(settings, index)
        index.gate = asyncio.Event()
        box = await made(plane)
        calls = [asyncio.create_task(python(plane, box, "import shelf; print(1)")) for _ in range(2)]
        lines: list[str] = []
        asked = asyncio.create_task(plane.envs.attach(ADMIN, box, EnvironmentAttach(template=True), say=lines.append))
        await until(lambda: index.files_asked() or None, 30)
        monkeypatch.setattr(module, "WAIT_S", 0.05)
        with pytest.raises(Conflict, match="'boards' are still being built") as caught:
            await command(plane, box, "python3 -c 'import shelf'")
        assert caught.value.extra["retry"] is True
        monkeypatch.setattr(module, "WAIT_S", 30.0)
        waiting = asyncio.create_task(command(plane, box, "python3 -c 'import shelf; print(2)'"))
        await plane.operations.write_file(ADMIN, box, "free", b"files need no Python")
        index.gate.set()
        assert await asyncio.gather(*calls, waiting) == ["1\n", "1\n", "2\n"]
        info = await asked
        assert info.requirements == ["shelf"] and any("shelf" in line for line in lines), lines
        with pytest.raises(NotFound, match="no packages"):
            bare = (await plane.operations.deploy_or_resume(ADMIN, SandboxRequest()))[0].id
            await plane.envs.attach(ADMIN, bare, EnvironmentAttach(template=True))


async def test_after_a_restart_of_the_server_they_are_there(plane: ControlPlane, settings: Settings) -> None:
    async with stocked() as index:
        template(settings, index)
        box = await made(plane)
        first = await python(plane, box, "import os, shelf; print(os.getppid() > 0)")
        live = await plane.sessions.find(box)
        live.packages = None  # as a server has it that took the sandbox over
        assert await python(plane, box, "import os, shelf; print(os.getppid() > 0)") == first
        other = await made(plane, "other")
        named = await attach(plane, other, "nail")
        assert await python(plane, other, "import shelf; print(1)") == "1\n"
        result = await plane.python.run(ADMIN, other, PythonRequest(code="import nail, shelf", env=named.name))
        assert "No module named 'shelf'" in result.stderr, "an environment that is named is all there is"


async def test_one_that_was_built_stays_the_one(settings: Settings) -> None:
    """Whatever the index has that is newer, and also when it cannot be reached."""
    async with stocked() as index:
        template(settings, index)
        plane = await ControlPlane.open(settings)
        try:
            assert await python(plane, await made(plane, "a"), "import shelf; print(shelf.version)") == "1.0\n"
        finally:
            await plane.close()
        index.add(wheel("shelf", "2.0"))
        index.asked.clear()
        plane = await ControlPlane.open(settings)
        try:
            assert await python(plane, await made(plane, "b"), "import shelf; print(shelf.version)") == "1.0\n"
            assert index.asked == [] and len((await plane.environments.list(ADMIN)).items) == 1
            index.broken = 500
            assert await python(plane, await made(plane, "c"), "import shelf; print(shelf.version)") == "1.0\n"
            index.broken = None
            for name in ("a", "b", "c"):
                await plane.operations.terminate(ADMIN, name, TerminateRequest())
            [listed] = (await plane.environments.list(ADMIN)).items
            await plane.environments.remove(ADMIN, listed.name)
            assert (await python(plane, await made(plane, "d"), "import shelf; print(shelf.version)"))[1:] == ".0\n"
            assert len((await plane.environments.list(ADMIN)).items) == 1, "built anew"
        finally:
            await plane.close()


async def test_a_provider_that_has_no_environments(plane: ControlPlane, settings: Settings) -> None:
    async with stocked() as index:
        template(settings, index)
        (Path(settings.data_dir) / "templates/boards/sources.json").unlink()
        box = await made(plane, None, provider="process", trust=Trust.HIGH)
        with pytest.raises(PlatformError, match="environments"):
            await python(plane, box, "print(1)")
        assert await command(plane, box, "echo on") == "on\n"


async def test_packages_that_are_none(plane: ControlPlane, settings: Settings) -> None:
    async with stocked() as index:
        for number, recipe in enumerate(
            ('packages = ["shelf >"]', 'packages = ["x @ file:///x"]', "imports = ['a b']")
        ):
            template(settings, index, f"broken{number}", recipe)
            with pytest.raises(InvalidRequest, match=rf"broken{number}/template\.toml"):
                await plane.templates.get(f"broken{number}")
        template(settings, index, "old", 'packages = ["shelf"]\npython = "3.99"')
        info, _ = await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(template="old"))
        with pytest.raises(PlatformError, match=r"there is no Python 3\.99 here"):
            await python(plane, info.id, "print(1)")
