from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mcp import types

from carrel.integrations.mcp.output import LIMIT

Said = Callable[[types.CallToolResult], str]


async def test_the_rest_of_a_cell(connect: Any, context: str, said: Said) -> None:
    async with connect(context) as client:
        code = "for number in range(20000): print('line', number)"
        result = await client.call_tool("python", {"code": code, "code_context": "main"})
        text = said(result)
        assert len(text) <= LIMIT + 500 and "line 19999" in text
        handle = text.split('handle "')[1].split('"')[0]
        assert handle.startswith("cell/main/")
        whole, offset = "", 0
        while True:
            more = await client.call_tool("read_output", {"handle": handle, "offset": offset})
            assert not more.is_error
            whole += more.structured_content["output"]
            offset = more.structured_content["next_offset"]
            if not more.structured_content["left_out_bytes"]:
                break
        assert whole == "".join(f"line {number}\n" for number in range(20000))
        other = await client.call_tool("read_output", {"handle": handle[:-1] + ("0" if handle[-1] != "0" else "1")})
        assert other.is_error and other.structured_content["code"] == "not_found"


@pytest.mark.parametrize("handle", ["cell/", "cell/a", "cell/a/b", "cell///", "c1", ".", "c1.zz"])
async def test_what_is_no_handle(connect: Any, context: str, handle: str) -> None:
    async with connect(context) as client:
        result = await client.call_tool("read_output", {"handle": handle})
        assert result.is_error and result.structured_content["code"] in {"invalid_request", "not_found"}


async def test_waiting_ends_with_the_command(connect: Any, context: str, said: Said) -> None:
    async with connect(context) as client:
        started = await client.call_tool("run_command", {"command": "echo one; sleep 0.1; exit 4", "background": True})
        given = {"handle": started.structured_content["handle"], "wait": 60}
        result = await client.call_tool("read_output", given)
        assert result.structured_content["exit_code"] == 4 and said(result).startswith("one\n[exit code 4")
