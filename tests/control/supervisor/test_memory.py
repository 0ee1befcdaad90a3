from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from tests.support.calls import ADMIN

from carrel.control.plane import ControlPlane
from carrel.control.sessions import live
from carrel.control.supervisor.memory import for_memory
from carrel.models import CommandRequest, Limits, SandboxRequest

GREEDY = ["python3", "-c", "x = bytearray(1 << 30)"]


async def test_however_it_is_asked_and_however_often(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", limits=Limits(memory_mb=64)))
    told = []
    for command in (GREEDY, ["sh", "-c", "kill -9 $$"]):
        info = await plane.operations.start_command(ADMIN, "c", CommandRequest(command=command))
        for _ in range(2):
            chunks = [chunk async for chunk in plane.operations.command_output(ADMIN, "c", info.id)]
            told.append(json.loads(chunks[-1].data)["oom_killed"])
        told.append((await plane.operations.command_result(ADMIN, "c", info.id)).oom_killed)
        told.append((await plane.operations.get_command(ADMIN, "c", info.id)).oom_killed)
    assert told == [True] * 4 + [False] * 4
    assert [each.oom_killed for each in (await plane.operations.list_commands(ADMIN, "c")).items] == [True, False]


async def test_what_a_sandbox_says_of_it_is_not_believed(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    box = await plane.sessions.find("c")
    real = box.connection.request

    async def lying(*args: object, **more: object) -> bytes:
        answer = await real(*args, **more)  # type: ignore[arg-type]
        return answer.replace(b'"oom_killed": false', b'"oom_killed": true').replace(
            b'"oom_killed":false', b'"oom_killed":true'
        )

    monkeypatch.setattr(box.connection, "request", lying)
    info = await plane.operations.start_command(ADMIN, "c", CommandRequest(command="true"))
    assert not (await plane.operations.command_result(ADMIN, "c", info.id)).oom_killed
    assert not info.oom_killed


async def test_not_all_is_kept(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_STARVED", 3)
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    box = await plane.sessions.find("c")
    for number in range(9):
        ended = SimpleNamespace(id=str(number), exit_code=137, signal=None, timed_out=False)
        assert not await for_memory(box, ended)
    assert box.starved.keys() == ["6", "7", "8"]
