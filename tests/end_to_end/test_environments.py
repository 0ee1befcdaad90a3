"""Environments as an operator and an agent have them: the command line, a killed server, an ordinary user."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.egress_ground import Carrel, Outside, until
from tests.support.environments_ground import sources
from tests.support.indexes import IndexServer, wheel

from carrel.client import Sandbox
from carrel.egress.index.front import IndexAnswer
from carrel.errors import CarrelError
from carrel.models import State

SLOW = "slow-1.0-py3-none-any.whl"


class Index(IndexServer):
    """An index that keeps no connection open, and holds one file back when it is told so."""

    held: asyncio.Event | None = None

    async def answer(self, method: str, target: str, headers: Mapping[str, str]) -> IndexAnswer:
        if self.held is not None and target.endswith(SLOW):
            self.asked.append(target)
            await self.held.wait()
        answer = await super().answer(method, target, headers)
        answer.headers.append(("connection", "close"))
        return answer


@contextmanager
def place(*, user: bool = False) -> Iterator[tuple[Outside, Carrel, Index]]:
    outside = Outside()
    try:
        index = Index()
        outside.run(index.web.open())
        for name, requires in (("shelf", ("plank",)), ("plank", ()), ("nail", ())):
            index.add(wheel(name, requires=requires))
        carrel = Carrel(outside, user=user)
        file = carrel.directory / "sources.json"
        file.write_text(json.dumps(sources(index)))
        carrel.environment["CARREL_POLICY_SOURCES_FILE"] = str(file)
        try:
            carrel.start()
            yield outside, carrel, index
        finally:
            carrel.close()
            outside.run(index.web.close())
    finally:
        outside.close()


def version(box: Sandbox, path: str, package: str = "shelf") -> str:
    result = box.commands.run(f"{path}/bin/python -c 'import {package}; print({package}.version)'")
    return result.stdout or result.stderr


def on_shelf(carrel: Carrel) -> list[str]:
    return os.listdir(carrel.data / "envs" / "shelf") + os.listdir(carrel.data / "envs" / "drafts")


@pytest.mark.parametrize("user", [False, True], ids=["root", "ordinary user"])
def test_built_by_the_operator_and_used_by_agents(user: bool) -> None:
    with place(user=user) as (_outside, carrel, index):
        said = carrel.cli("envs", "build", "shelf", "--name", "data-analysis").strip()
        listed = json.loads(carrel.cli("envs", "--json"))
        assert [each["labels"] for each in listed] == [["data-analysis"]] and listed[0]["path"] == said
        asked = list(index.asked)
        boxes = [carrel.client.sandbox(name) for name in ("one", "two")]
        before = _used(carrel.data)
        for box in boxes:
            info = box.envs.attach("data-analysis")
            assert (info.path, version(box, info.path)) == (said, "1.0\n")
            assert box.envs.attach(["shelf"]).name == info.name
            assert "Permission denied" in box.commands.run("ls /envs").stderr
            assert "Read-only" in box.commands.run(f"touch {said}/x; chmod 777 /envs").stderr
        assert index.asked == asked and _used(carrel.data) - before < 1 << 20
        installed = boxes[0].envs.attach("data-analysis", venv=True)
        result = boxes[0].commands.run("python3 -c 'import shelf; print(shelf.__file__)'")
        assert result.stdout.startswith(installed.path), result.stderr


def _used(top: Path) -> int:
    """Disk space of environments."""
    return sum(each.lstat().st_blocks * 512 for each in (top / "envs").rglob("*"))


def test_a_server_killed_in_the_middle_leaves_nothing_and_builds_again() -> None:
    with place() as (outside, carrel, index):
        box = carrel.client.sandbox("c")
        ready = box.envs.attach(["plank"])
        index.add(wheel("slow", payload=os.urandom(1 << 20)))
        index.held = outside.run(_event())

        def waiting() -> bool:
            return any(path.endswith(SLOW) for path in index.files_asked())

        def ask() -> None:
            try:
                box.envs.attach(["slow"])
            except CarrelError:
                pass

        outside_task = asyncio.run_coroutine_threadsafe(asyncio.to_thread(ask), outside._loop)
        until(waiting, "the download")
        carrel.kill()
        outside_task.result(30)
        outside.call(index.held.set)
        carrel.start()
        assert on_shelf(carrel) == [ready.name]
        found = {each.context_id: each.state for each in carrel.client.sandboxes()}
        assert found == {"c": State.RUNNING}, "what built it is gone"
        box = carrel.client.sandbox("c")
        assert version(box, ready.path, "plank") == "1.0\n", "what was held stays"
        index.held = None
        assert version(box, box.envs.attach(["slow"]).path, "slow") == "1.0\n"
        assert len(on_shelf(carrel)) == 2


async def _event() -> asyncio.Event:
    return asyncio.Event()
