from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from mcp import types

from carrel.client import AsyncClient, Client
from carrel.integrations.mcp.output import LIMIT

Said = Callable[[types.CallToolResult], str]


async def test_a_command_and_how_it_ended(connect: Any, context: str, said: Said) -> None:
    async with connect(context) as client:
        result = await client.call_tool("run_command", {"command": "echo out; echo err >&2; exit 3"})
        assert not result.is_error, "a non-zero exit is a result"
        assert said(result).startswith("out\nerr\n[exit code 3,")
        value = result.structured_content
        assert (value["output"], value["exit_code"], value["running"]) == ("out\nerr\n", 3, False)
        assert (value["left_out_bytes"], value["next_offset"], value["dropped_bytes"]) == (0, 8, 0)
        given = {"command": "pwd; cat; echo $WORD", "cwd": "sub", "env": {"WORD": "x"}, "stdin": "in\n"}
        await client.call_tool("write_file", {"path": "sub/a", "content": ""})
        result = await client.call_tool("run_command", given)
        assert result.structured_content["output"] == "/workspace/sub\nin\nx\n"
        result = await client.call_tool("run_command", {"command": "echo before; sleep 60 & wait", "timeout": 0.2})
        assert result.structured_content["timed_out"] and "timed out: killed" in said(result)
        assert result.structured_content["output"] == "before\n"
        result = await client.call_tool("run_command", {"command": "kill -9 $$"})
        assert result.structured_content["exit_code"] is None and "killed by SIGKILL" in said(result)


async def test_long_output_is_shortened_and_read_on(connect: Any, context: str, said: Said) -> None:
    whole = "".join(f"line {number} é\n" for number in range(20_000))
    async with connect(context) as client:
        await client.call_tool("write_file", {"path": "long", "content": whole})
        result = await client.call_tool("run_command", {"command": "cat long"})
        value = result.structured_content
        assert len(value["output"].encode()) <= LIMIT + 200
        assert value["output"].startswith("line 0 é\n") and value["output"].endswith("line 19999 é\n")
        assert value["left_out_bytes"] > 0
        assert f'handle "{value["handle"]}" and offset {value["next_offset"]}' in said(result)
        head = value["output"].split("\n[")[0]
        offset = value["next_offset"]
        assert offset == len(head.encode())
        while len(head.encode()) < len(whole.encode()):
            more = await client.call_tool("read_output", {"handle": value["handle"], "offset": offset})
            head += more.structured_content["output"]
            offset = more.structured_content["next_offset"]
        assert head == whole
        assert more.structured_content["left_out_bytes"] == 0 and "exit code 0" in said(more)


async def test_background_commands_are_read_and_stopped(connect: Any, context: str, said: Said) -> None:
    async with connect(context) as client:
        line = "echo ready; while [ ! -e go ]; do sleep 0.02; done; echo went; sleep 600"
        result = await client.call_tool("run_command", {"command": line, "background": True})
        handle = result.structured_content["handle"]
        assert result.structured_content["running"] and handle in said(result)
        text, offset = "", 0
        while "ready" not in text:
            seen = await client.call_tool("read_output", {"handle": handle, "offset": offset, "wait": 0.1})
            text += seen.structured_content["output"]
            offset = seen.structured_content["next_offset"]
        assert seen.structured_content["running"] and "it still runs" in said(seen)
        await client.call_tool("write_file", {"path": "go", "content": ""})
        while "went" not in text:
            seen = await client.call_tool("read_output", {"handle": handle, "offset": offset, "wait": 0.1})
            text += seen.structured_content["output"]
            offset = seen.structured_content["next_offset"]
        assert text == "ready\nwent\n"
        for _ in range(2):  # ending what has ended is no error
            ended = await client.call_tool("stop_command", {"handle": handle})
            assert not ended.is_error and ended.structured_content["running"] is False
            assert ended.structured_content["signal"] == "SIGKILL"


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_long_commands_report_progress(over_http: Any, context: str, mode: str) -> None:
    heard: list[tuple[float, str | None]] = []
    written = asyncio.Event()
    async with over_http(context, mode=mode) as client:

        async def progress(done: float, total: float | None, message: str | None) -> None:
            heard.append((done, message))
            if len(heard) == 2:
                await client.call_tool("write_file", {"path": "go", "content": ""})
                written.set()

        line = "echo step one; while [ ! -e go ]; do sleep 0.02; done; echo done"
        result = await client.call_tool("run_command", {"command": line}, progress_callback=progress)
        await written.wait()  # the command may end before the answer to the call that ended it has come
    assert result.structured_content["output"] == "step one\ndone\n"
    assert len(heard) >= 2 and heard[0][0] < heard[1][0]
    assert "9 bytes: step one" in (heard[0][1] or "")


async def _until(found: Callable[[], Any]) -> Any:
    async with asyncio.timeout(30):
        while not (value := await found()):
            await asyncio.sleep(0.02)
    return value


@pytest.mark.parametrize("mode", ["legacy", "auto"])
@pytest.mark.parametrize("transport", ["connect", "over_http"])
async def test_cancelling_kills_the_whole_tree(
    request: pytest.FixtureRequest, context: str, mode: str, transport: str, ground: Any
) -> None:
    connected = request.getfixturevalue(transport)
    async with connected(context, mode=mode) as client, AsyncClient(ground.url, ground.token) as own:
        await client.call_tool("write_file", {"path": "ready.txt", "content": ""})
        box = own.attach(await own.find(context))
        line = "(setsid sh -c 'echo $$ > child; sleep 600') & sleep 600"
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "run_command", {"command": line})

            async def written() -> bool:
                return await box.files.exists("child") and bool(await box.files.read("child"))

            await _until(written)
            group.cancel_scope.cancel()

        async def ended() -> bool:
            return not any(info.running for info in await box.commands.list())

        await _until(ended)
        left = await box.commands.run("kill -0 $(cat child)")
        assert left.exit_code != 0, "what it started has ended too"


async def test_a_handle_of_an_earlier_sandbox_is_not_taken_for_another(
    connect: Any, context: str, said: Said, admin: Client
) -> None:
    async with connect(context) as client:
        result = await client.call_tool("run_command", {"command": "echo first"})
        handle = result.structured_content["handle"]
        await asyncio.to_thread(admin.attach(admin.find(context)).stop)
        result = await client.call_tool("run_command", {"command": "echo second"})
        assert result.structured_content["handle"] != handle
        gone = await client.call_tool("read_output", {"handle": handle})
        assert gone.is_error and gone.structured_content["code"] == "not_found"
        for name in ("read_output", "stop_command"):
            wrong = await client.call_tool(name, {"handle": "nonesuch"})
            assert wrong.is_error and wrong.structured_content["field"] == "handle"


async def test_a_denial_is_an_error_of_the_tool(connect: Any, governed: str, agent: str, said: Said) -> None:
    async with connect(governed, token=agent) as client:
        result = await client.call_tool("run_command", {"command": "curl http://example.org"})
        assert result.is_error
        value = result.structured_content
        assert (value["code"], value["rule"], value["retry"]) == ("denied_by_policy", "shell(curl:*)", False)
        assert "shell(curl:*)" in said(result)
