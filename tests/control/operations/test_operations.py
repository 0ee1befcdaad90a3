from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator

import pytest
from tests.support.calls import ADMIN

from carrel.control.plane import ControlPlane
from carrel.control.supervisor.frames import StreamChunk
from carrel.errors import InvalidPath, InvalidRequest, NotFound, SandboxLost
from carrel.models import CommandRequest, EditRequest, ExecuteRequest, SandboxRequest, SignalRequest, ToolRequest
from carrel.models.files import DeleteRequest, ListRequest, StatRequest
from carrel.models.operations import DELETE_FILE, EDIT_FILE, LIST_FILES, STAT_FILE


@pytest.fixture
async def box(plane: ControlPlane) -> str:
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="box"))
    return info.id


async def collect(chunks: AsyncIterator[StreamChunk]) -> list[StreamChunk]:
    return [chunk async for chunk in chunks]


async def test_commands(plane: ControlPlane, box: str) -> None:
    do = plane.operations
    result = await do.run_command(ADMIN, box, CommandRequest(command="echo out; echo err >&2; exit 3"))
    assert (result.stdout, result.stderr, result.exit_code, result.oom_killed) == ("out\n", "err\n", 3, False)
    info = await do.start_command(ADMIN, box, CommandRequest(command="cat", interactive=True))
    await do.send_input(ADMIN, box, info.id, b"hello", close=True)
    chunks = await collect(do.command_output(ADMIN, box, info.id))
    assert chunks[0].stream == "open"
    assert b"".join(chunk.data for chunk in chunks if chunk.stream == "stdout") == b"hello"
    assert chunks[-1].stream == "end"
    assert (await do.command_result(ADMIN, box, info.id)).stdout == "hello"
    assert info.id in [each.id for each in (await do.list_commands(ADMIN, box)).items]
    sleeper = await do.start_command(ADMIN, box, CommandRequest(command="sleep 1000"))
    await do.signal_command(ADMIN, box, sleeper.id, SignalRequest(signal="TERM", tree=True))
    assert (await do.command_result(ADMIN, box, sleeper.id)).signal == "SIGTERM"
    await do.delete_command(ADMIN, box, sleeper.id)
    with pytest.raises(NotFound):
        await do.get_command(ADMIN, box, sleeper.id)


async def test_the_default_deadline_is_applied(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(
        ADMIN, SandboxRequest.model_validate({"context_id": "s", "limits": {"timeout_s": 2}})
    )
    result = await plane.operations.run_command(ADMIN, "s", CommandRequest(command="echo partial; sleep 1000"))
    assert result.timed_out and result.stdout == "partial\n"


async def test_files(plane: ControlPlane, box: str) -> None:
    do = plane.operations

    async def content() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"0123456789" * 10_000

    written = await do.write_file(ADMIN, box, "data/big", content(), mode="600")
    assert (written.size, written.mode) == (2_000_000, "600")
    parts = [part async for part in do.read_file(ADMIN, box, "data/big", offset=5, length=10)]
    assert parts[0] == 10
    assert b"".join(part for part in parts[1:] if isinstance(part, bytes)) == b"5678901234"
    await do.write_file(ADMIN, box, "a.txt", b"one two")
    edited = await do.forward(ADMIN, EDIT_FILE, box, EditRequest(path="a.txt", old="one", new="1"))
    assert edited.replaced == 1
    assert {"a.txt", "data"} <= {each.path for each in (await do.forward(ADMIN, LIST_FILES, box, ListRequest())).items}
    await do.forward(ADMIN, DELETE_FILE, box, DeleteRequest(path="a.txt"))
    with pytest.raises(NotFound):
        await do.forward(ADMIN, STAT_FILE, box, StatRequest(path="a.txt"))
    for path in ("", "a\0b", "../x", "x" * 5000, "half\ud800"):
        with pytest.raises((InvalidPath, NotFound)):
            await do.forward(ADMIN, STAT_FILE, box, StatRequest.model_construct(path=path))


async def test_names_that_are_not_utf8(plane: ControlPlane, box: str) -> None:
    await plane.operations.write_file(ADMIN, box, "data/\udcff", b"x")
    assert [
        each.path for each in (await plane.operations.forward(ADMIN, LIST_FILES, box, ListRequest(path="data"))).items
    ] == ["data/\udcff"]


async def test_tools_and_execute(plane: ControlPlane, box: str) -> None:
    do = plane.operations
    encoded = base64.b64encode(b"\0\1").decode()
    made = await plane.tools.call(
        ADMIN, box, ToolRequest(tool_name="create_file", params={"path": "b", "content_base64": encoded})
    )
    assert made.result["size"] == 2
    ran = await do.execute(ADMIN, box, ExecuteRequest(code="cat in > output/out; echo ok", files={"in": encoded}))
    assert ran.output == "ok\n" and "output/out" in ran.files_produced
    with pytest.raises(InvalidRequest):
        await do.execute(ADMIN, box, ExecuteRequest(code="1", env_name="of-python"))
    for name, params, field in (
        ("fly", {}, "tool_name"),
        ("create_file", {}, "params.path"),
        ("create_file", {"path": "x"}, "params.content"),
        ("create_file", {"path": "x", "content": "a", "content_base64": ""}, "params.content"),
        ("create_file", {"path": "x", "content_base64": "!"}, "params.content_base64"),
        ("create_file", {"path": "x", "content": 5}, "params.content"),
        ("create_file", {"path": "x", "content": "a", "mod": "1"}, "params.mod"),
        ("create_file", {"path": "x", "content": "a", "mode": "999"}, "mode"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await plane.tools.call(ADMIN, box, ToolRequest(tool_name=name, params=params))
        assert caught.value.field == field


async def test_a_forged_answer_is_a_lost_sandbox(
    plane: ControlPlane, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = await plane.sessions.find(box)
    for forged in (b"{}", b"[]", b'{"id":"x","stdout":5}', b"nonsense"):

        async def answer(*_: object, forged: bytes = forged, **__: object) -> bytes:
            return forged

        monkeypatch.setattr(live.connection, "request", answer)
        with pytest.raises(SandboxLost):
            await plane.operations.run_command(ADMIN, box, CommandRequest(command="true"))


async def test_a_killed_command_asks_why(plane: ControlPlane, box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    live = await plane.sessions.find(box)
    kills = 0

    async def count(_: object) -> int:
        return kills

    monkeypatch.setattr(live.provider, "out_of_memory_kills", count)
    killed = CommandRequest(command="kill -9 $$")
    assert not (await plane.operations.run_command(ADMIN, box, killed)).oom_killed
    kills = 1
    result = await plane.operations.run_command(ADMIN, box, killed)
    assert result.oom_killed and result.signal == "SIGKILL"
    assert not (await plane.operations.run_command(ADMIN, box, killed)).oom_killed


async def test_closing_a_stream_lets_go(plane: ControlPlane, box: str) -> None:
    info = await plane.operations.start_command(ADMIN, box, CommandRequest(command="echo a; sleep 1000"))
    chunks = plane.operations.command_output(ADMIN, box, info.id)
    async for chunk in chunks:
        if chunk.stream == "stdout":
            break
    live = await plane.sessions.find(box)
    assert live.in_flight == 1
    await chunks.aclose()  # type: ignore[attr-defined]
    assert live.in_flight == 0
    assert (await plane.operations.get_command(ADMIN, box, info.id)).running
    await asyncio.wait_for(plane.operations.delete_command(ADMIN, box, info.id), 10)
