"""Answers of MCP servers that are longer than what is taken."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.calls import ADMIN

from carrel.control.mcp.links import LongLine
from carrel.control.plane import ControlPlane
from carrel.models import McpRequest, McpResult, McpServerRequest, SandboxRequest

SERVER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("id") is None:
        continue
    result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}
    if asked["method"] == "tools/list":
        result = {"tools": [{"name": "say", "inputSchema": {"type": "object"}}]}
    if asked["method"] == "tools/call":
        text = "x" * asked["params"]["arguments"]["size"]
        result = {"content": [{"type": "text", "text": text}]}
    ends = [("jsonrpc", "2.0"), ("id", asked["id"])]
    answer = dict([*ends, ("result", result)] if len(sys.argv) < 2 else [("result", result), *ends])
    print(json.dumps(answer), flush=True)
"""
TEXTS = st.sampled_from(['"id":7}', ',"id":7}', '{"jsonrpc":"2.0","id":7,', "\\", "\n", "é"]) | st.text(max_size=20)


@pytest.mark.parametrize("order", [[], ["last"]])
async def test_who_asked_is_told_and_nobody_else_loses_the_server(plane: ControlPlane, order: list[str]) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.operations.write_file(ADMIN, "c", "server.py", SERVER.encode())
    await plane.mcp.add(ADMIN, "c", "s", McpServerRequest(command=["python3", "server.py", *order]))

    async def said(size: int) -> McpResult:
        return await plane.mcp.request(ADMIN, "c", "s", McpRequest(tool="say", arguments={"size": size}))

    small, right, large, other = await asyncio.gather(said(1), said(3_500_000), said(8_000_000), said(2))
    before = (await plane.mcp.get(ADMIN, "c", "s")).model_dump(include={"state", "restarts"})
    assert not any(each.is_error for each in (small, right, other)) and large.is_error
    assert "at most 4194304 are taken" in large.text and len(right.text) == 3_500_000
    assert (await said(3)).text == "xxx"
    assert (await plane.mcp.get(ADMIN, "c", "s")).model_dump(include={"state", "restarts"}) == before


@given(
    st.dictionaries(TEXTS, TEXTS, max_size=4),
    st.integers(0, 10**15 - 1),
    st.permutations(["jsonrpc", "id", "result"]),
    st.sampled_from([(",", ":"), (", ", ": ")]),
    st.integers(1, 400),
)
def test_the_two_ends_tell_whom_it_answers(
    result: dict[str, str], name: int, order: list[str], separators: tuple[str, str], step: int
) -> None:
    values = {"jsonrpc": "2.0", "id": name, "result": {"z" * 600: result}}
    data = json.dumps({key: values[key] for key in order}, separators=separators).encode()
    line = LongLine(len(data))
    for at in range(0, len(data), step):
        assert line.left == len(data) - at
        more = b"the next" if at + step >= len(data) else b""
        assert line.feed(data[at : at + step] + more) == len(data[at : at + step])
    stand_in = line.stand_in(9)
    assert line.left == 0 and stand_in is not None and stand_in.size == len(data)
    assert json.loads(stand_in)["id"] == name


@pytest.mark.parametrize(
    "text",
    [
        '{"jsonrpc":"2.0","id":3,"method":"sampling/createMessage","params":{}}',
        '{"method":"x","params":{"a":1},"jsonrpc":"2.0","id":3}',
        '{"jsonrpc":"2.0","method":"notifications/message","params":{"id":3}}',
        '{"jsonrpc":"2.0","result":{"id":3}}',
        '{"jsonrpc":"2.0","id":"text","result":{}}',
    ],
)
def test_what_answers_nobody(text: str) -> None:
    line = LongLine(len(text))
    line.feed(text.encode())
    assert line.stand_in(9) is None
