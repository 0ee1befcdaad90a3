from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.calls import ADMIN
from tests.support.environments_ground import PYTHON, attach, context, source_package, sources, stocked
from tests.support.indexes import wheel
from tests.support.sandboxes import until

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.control.python import environments
from carrel.control.python.environments import SharedWork
from carrel.errors import Conflict, InvalidRequest, NotFound
from carrel.models import CommandRequest, EnvironmentAttach, PolicyDocuments, State, TerminateRequest


async def said(plane: ControlPlane, name: str, command: str) -> str:
    result = await plane.operations.run_command(ADMIN, name, CommandRequest(command=command))
    assert result.exit_code == 0, result.stderr
    return result.stdout


def on_shelf(plane: ControlPlane) -> list[str]:
    return os.listdir(Path(plane.layout.data_dir, "envs", "shelf"))


async def test_built_once_and_seen_at_once_by_every_sandbox(plane: ControlPlane) -> None:
    async with stocked() as index:
        one, two = await context(plane, index, "one"), await context(plane, index, "two")
        found = await asyncio.gather(
            attach(plane, one, "shelf"), attach(plane, two, "shelf", "SHELF"), attach(plane, one, "shelf")
        )
        assert len({each.name for each in found}) == 1 == len(on_shelf(plane))
        builders = (await plane.sessions.page(states=[State.TERMINATED])).items
        assert len(builders) == 2, "one sandbox resolved, one built"
        path = found[0].path
        for name in (one, two):
            code = f"{path}/bin/python -c 'import shelf, plank; print(shelf.version, plank.__file__)'"
            assert await said(plane, name, code) == f"1.0 {path}/lib/{PYTHON}/site-packages/plank/__init__.py\n"
        asked = list(index.asked)
        third = await context(plane, index, "three")
        assert (await attach(plane, third, "shelf")).name == found[0].name
        assert index.asked == asked, "what lies ready is not downloaded again"
        assert len((await plane.sessions.page(states=[State.TERMINATED])).items) == 2


async def test_sandboxes_find_only_what_they_know(plane: ControlPlane) -> None:
    async with stocked() as index:
        name = await context(plane, index)
        info = await attach(plane, name, "nail")
        result = await plane.operations.run_command(
            ADMIN, name, CommandRequest(command=f"ls /envs; touch {info.path}/x; rm -r {info.path}/bin; ls {info.path}")
        )
        assert "Permission denied" in result.stderr and "Read-only" in result.stderr
        assert "bin" in result.stdout.split() and "shelf" not in result.stdout


async def test_progress_and_the_resolvers_own_words(plane: ControlPlane) -> None:
    async with stocked() as index:
        name = await context(plane, index)
        lines: list[str] = []
        await plane.envs.attach(ADMIN, name, EnvironmentAttach(requirements=["nail"]), say=lines.append)
        assert any("Resolved 1 package" in line for line in lines) and "+ nail==1.0" in lines
        with pytest.raises(InvalidRequest, match="nonesuch was not found"):
            await attach(plane, name, "nail", "nonesuch")
        with pytest.raises(InvalidRequest, match=r"nail>=?2"):
            await attach(plane, name, "nail>=2")
        assert len(on_shelf(plane)) == 1 and not plane.environments._resolving and not plane.environments._building


async def test_secrets_are_not_in_the_words(plane: ControlPlane) -> None:
    async with stocked() as index:
        name = await context(plane, index)
        await plane.secrets.put(name, "KEY", b"nonesuch")
        with pytest.raises(InvalidRequest) as caught:
            await attach(plane, name, "nonesuch")
        assert "nonesuch" not in str(caught.value) and "[secret:KEY]" in caught.value.detail


async def test_who_comes_late_hears_it_all() -> None:
    work: SharedWork[int] = SharedWork()
    done = asyncio.Event()

    async def run() -> int:
        await done.wait()
        return 7

    work.task = asyncio.get_running_loop().create_task(run())
    work.say("first")
    heard: list[str] = []
    waiting = asyncio.get_running_loop().create_task(work.wait(heard.append))
    gone = asyncio.get_running_loop().create_task(work.wait(lambda _line: None))
    await asyncio.sleep(0)
    work.say("second")
    gone.cancel()
    done.set()
    assert await waiting == 7 and heard == ["first", "second"]


async def test_labels(plane: ControlPlane) -> None:
    async with stocked() as index:
        name = await context(plane, index)
        one, two = await attach(plane, name, "nail"), await attach(plane, name, "plank")
        records = plane.environments
        await records.label(records.find(ADMIN, one.name), "tools")
        assert records.find(ADMIN, "tools").name == one.name
        await records.label(records.find(ADMIN, two.name), "tools")
        assert records.find(ADMIN, "tools").name == two.name and records.find(ADMIN, one.name).labels == []
        with pytest.raises(Conflict):
            await records.label(records.find(ADMIN, one.name), two.name)
        listed = (await records.list(ADMIN)).items
        assert {each.name: each.labels for each in listed} == {one.name: [], two.name: ["tools"]}
        assert all(each.in_use and each.built_by == name for each in listed)
        other = await context(plane, index, "other")
        found = await plane.envs.attach(ADMIN, other, EnvironmentAttach(env="tools"))
        assert found.name == two.name
        with pytest.raises(NotFound):
            await plane.envs.attach(ADMIN, other, EnvironmentAttach(env="absent"))


async def test_never_removed_while_a_session_has_it(plane: ControlPlane, settings: Settings) -> None:
    async with stocked() as index:
        name = await context(plane, index)
        info = await attach(plane, name, "nail")
        environments = plane.environments
        environments.grace_s = 0
        environments._settings = settings.envs.model_copy(update={"ttl_days": 1e-9, "keep_free_percent": 50.0})
        assert await environments.evict() == 0
        with pytest.raises(Conflict, match="in use by c"):
            await environments.remove(ADMIN, info.name)
        await plane.operations.stop(ADMIN, name)
        assert await environments.evict() == 0, "it may be resumed"
        await plane.operations.terminate(ADMIN, name, TerminateRequest())
        environments.grace_s = 60
        assert await environments.evict() == 0, "somebody may be about to use it"
        environments.grace_s = 0
        assert await environments.evict() == 1
        assert on_shelf(plane) == [] and (await environments.list(ADMIN)).items == []
        assert not list(Path(plane.layout.data_dir, "envs", "drafts").iterdir())
        other = await context(plane, index, "other")
        again = await attach(plane, other, "nail")
        assert again.name == info.name, "the same content has the same name"
        await plane.operations.terminate(ADMIN, other, TerminateRequest())
        await environments.remove(ADMIN, again.name)
        with pytest.raises(NotFound):
            await environments.remove(ADMIN, again.name)


async def test_the_least_used_go_first_when_there_are_too_many(plane: ControlPlane, settings: Settings) -> None:
    async with stocked() as index:
        for name in ("old", "new"):
            index.add(wheel(name, payload=os.urandom(1 << 20)))
        name = await context(plane, index)
        old, new = await attach(plane, name, "old"), await attach(plane, name, "new")
        await plane.operations.terminate(ADMIN, name, TerminateRequest())
        environments = plane.environments
        environments.grace_s = 0
        environments._settings = settings.envs.model_copy(update={"max_mb": 2, "keep_free_percent": 0})
        environments._known[old.name] = replace(environments.find(ADMIN, old.name), last_used_at=1.0)
        assert await environments.evict() == 1
        assert on_shelf(plane) == [new.name]


async def test_a_full_disk_while_calls_run(plane: ControlPlane, settings: Settings) -> None:
    """The janitor removes all it may, again and again, while sandboxes attach and use environments."""
    async with stocked() as index:
        environments = plane.environments
        contexts = [await context(plane, index, name) for name in ("one", "two")]
        over = False

        async def evict() -> int:
            removed = 0
            while not over:
                removed += await environments.evict()
                await asyncio.sleep(0)
            return removed

        async def use(name: str, package: str) -> None:
            for _ in range(4):
                info = await attach(plane, name, package)
                assert await said(plane, name, f"{info.path}/bin/python -c 'import {package}; print(1)'") == "1\n"

        idle = await attach(plane, await context(plane, index, "idle"), "shelf")
        await plane.operations.terminate(ADMIN, "idle", TerminateRequest())
        for name, package in ((contexts[0], "nail"), (contexts[1], "nail"), (contexts[1], "plank")):
            await attach(plane, name, package)
        environments.grace_s = 0
        environments._settings = settings.envs.model_copy(update={"keep_free_percent": 50.0, "ttl_days": 1e-9})
        evicting = asyncio.get_running_loop().create_task(evict())
        try:
            await asyncio.gather(use(contexts[0], "nail"), use(contexts[1], "nail"), use(contexts[1], "plank"))
        finally:
            over = True
            removed = await evicting
        assert removed == 1 and len(on_shelf(plane)) == 2 and idle.name not in on_shelf(plane)


async def test_a_restart_knows_what_is_held(settings: Settings) -> None:
    async with stocked() as index:
        plane = await ControlPlane.open(settings)
        try:
            name = await context(plane, index)
            info = await attach(plane, name, "nail")
            await plane.operations.stop(ADMIN, name)
        finally:
            await plane.close()
        shelf = Path(settings.data_dir, "envs")
        (shelf / "drafts" / "half").mkdir()
        (shelf / "shelf" / "unknown").mkdir()
        plane = await ControlPlane.open(settings)
        try:
            assert on_shelf(plane) == [info.name] and not list((shelf / "drafts").iterdir())
            environments = plane.environments
            environments.grace_s = 0
            environments._settings = settings.envs.model_copy(update={"ttl_days": 1e-9})
            assert await environments.evict() == 0
            [listed] = (await environments.list(ADMIN)).items
            assert listed.in_use and listed.packages[0].name == "nail"
            await context(plane, index)
            assert await said(plane, name, f"{info.path}/bin/python -c 'import nail; print(nail.version)'") == "1.0\n"
        finally:
            await plane.close()


async def test_a_server_that_ends_leaves_no_build(settings: Settings) -> None:
    async with stocked() as index:
        index.gate = asyncio.Event()
        plane = await ControlPlane.open(settings)
        try:
            name = await context(plane, index)
            waiting = asyncio.get_running_loop().create_task(attach(plane, name, "nail"))
            await until(lambda: any("nail-1.0-py3-none-any.whl" in each for each in index.files_asked()), 30)
            await until(lambda: plane.environments._building or plane.environments._resolving)
        finally:
            await plane.close()
        assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], BaseException)
        index.gate.set()
        assert os.listdir(Path(settings.data_dir, "envs", "shelf")) == []
        assert os.listdir(Path(settings.data_dir, "envs", "drafts")) == []


async def test_contexts_with_other_registries_share_nothing_built_from_source(plane: ControlPlane) -> None:
    async with stocked() as index, stocked() as other:
        package = source_package("same", "pass")
        for each in (index, other):
            each.add(package, "same")
        one, two = await context(plane, index, "one"), await context(plane, other, "two")
        assert (await attach(plane, one, "same")).hash != (await attach(plane, two, "same")).hash


async def test_one_index_of_several(plane: ControlPlane) -> None:
    async with stocked() as index, stocked() as other:
        other.add(wheel("special"))
        both = sources(index)["package_managers"]["pip"]["registries"] + [  # type: ignore[index]
            {"name": "second", "url": f"{other.web.url}/simple/"}
        ]
        name = await context(plane, index)
        await plane.policy_changes.put(name, PolicyDocuments(sources=sources(index, registries=both)), "tests")
        with pytest.raises(InvalidRequest, match="special was not found"):
            await plane.envs.attach(ADMIN, name, EnvironmentAttach(requirements=["special"], index="main"))
        found = await plane.envs.attach(ADMIN, name, EnvironmentAttach(requirements=["special"], index="second"))
        assert found.packages[0].name == "special"


def test_settings_of_how_long() -> None:
    assert environments.GRACE_S >= 1 and environments.RESOLVED_S > environments.GRACE_S


async def test_a_label_is_given_only_to_what_is_there(plane: ControlPlane, settings: Settings) -> None:
    async with stocked() as index:
        name = await context(plane, index)
        info = await attach(plane, name, "nail")
        await plane.operations.terminate(ADMIN, name, TerminateRequest())
        environments = plane.environments
        environments.grace_s = 30
        environments._settings = settings.envs.model_copy(update={"ttl_days": 1e-9})
        old = environments._known[info.name] = replace(environments.find(ADMIN, info.name), last_used_at=1.0)
        assert (await environments.label(old, "tools")).labels == ["tools"]
        assert await environments.evict() == 0, "whoever has just given it a label wants to use it"
        await environments.remove(ADMIN, "tools")
        with pytest.raises(Conflict, match="was removed meanwhile"):
            await environments.label(old, "tools")
        with pytest.raises(NotFound):
            environments.find(ADMIN, "tools")
