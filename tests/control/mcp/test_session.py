"""Conversations over real pipes with servers that run on this host: what they do wrong is ours to bear."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import pytest
from tests.support.mcp_hosted import GOOD, HOSTILE

from carrel.control.mcp import session as mcp_session
from carrel.control.mcp.links import NoAnswer, RequestRefused
from carrel.control.mcp.session import Conversation
from carrel.errors import LimitExceeded, McpServerFailed

Begin = Callable[..., Awaitable[Conversation]]


class Pipes:
    """A process of this host as a wire."""

    def __init__(self, process: Process):
        self.process = process
        self.ended: str | None = None
        self.sent: list[dict[str, object]] = []
        self.closed = asyncio.Event()

    async def lines(self) -> AsyncIterator[bytes]:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            yield line
        self.ended = f"ended with {await self.process.wait()}"

    async def send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.sent.append(json.loads(line))
        self.process.stdin.write(line + b"\n")
        await self.process.stdin.drain()

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
async def begin() -> AsyncIterator[Begin]:
    made: list[tuple[Process, Conversation | None]] = []

    async def start(code: str, *words: str, deadline_s: float = 20.0) -> Conversation:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-c", code, *words, stdin=PIPE, stdout=PIPE, limit=1 << 27
        )
        made.append((process, None))
        wire = Pipes(process)
        conversation = await Conversation.open("s", wire, deadline_s)
        made[-1] = (process, conversation)
        return conversation

    yield start
    for process, conversation in made:
        if conversation is not None:
            await conversation.close()
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_conversation(begin: Begin) -> None:
    talk = await begin(GOOD)
    assert talk.alive
    assert (await talk.call_tool("echo", {"text": "hi"}, 20))["content"] == [{"type": "text", "text": "hi"}]
    assert (await talk.read_resource("memo://one", 20))["contents"][0]["text"] == "what it holds"
    assert (await talk.get_prompt("greet", {"who": "x"}, 20))["messages"][0]["content"]["text"] == "greet x"
    with pytest.raises(RequestRefused) as refused:
        await talk.call_tool("absent", {}, 20)
    assert refused.value.code == -32602
    found, left = await talk.offers(20)
    assert len(found["tools"]) == 9 and left is None
    many = await asyncio.gather(*(talk.call_tool("echo", {"text": str(n)}, 20) for n in range(40)))
    assert [each["content"][0]["text"] for each in many] == [str(n) for n in range(40)]
    await talk.close()
    assert not talk.alive
    with pytest.raises(McpServerFailed):
        await talk.call_tool("echo", {}, 20)


async def test_time_is_up(begin: Begin) -> None:
    talk = await begin(GOOD)
    with pytest.raises(NoAnswer):
        await talk.call_tool("hang", {}, 0.1)
    assert talk.alive


async def test_so_many_at_once_and_no_more(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_session, "MOST_CALLS", 2)
    talk = await begin(GOOD)
    found = await asyncio.gather(*(talk.call_tool("echo", {}, 20) for _ in range(4)), return_exceptions=True)
    assert sorted(type(each).__name__ for each in found) == ["LimitExceeded", "LimitExceeded", "dict", "dict"]
    assert isinstance(found[-1], LimitExceeded)


async def test_whoever_waits_is_told_when_it_dies(begin: Begin) -> None:
    talk = await begin(GOOD)
    with pytest.raises(McpServerFailed, match="ended with 3"):
        await talk.call_tool("die", {}, 20)
    assert not talk.alive


async def test_what_it_asks_of_us_is_refused(begin: Begin) -> None:
    talk = await begin(HOSTILE, "asks")
    wire = talk._wire
    assert isinstance(wire, Pipes)
    found, _ = await talk.offers(20)
    assert [each["name"] for each in found["tools"]] == ["echo"]
    refusals = [each for each in wire.sent if "error" in each]
    assert 0 < len(refusals) <= 300 and all("method" not in each for each in refusals)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("floods", "more than it was asked for"),
        ("deep", "nested too deeply"),
        ("types", "not what the protocol asks for"),
        ("half", "ended with 0"),
    ],
)
async def test_what_it_does_wrong_is_told(begin: Begin, mode: str, said: str) -> None:
    talk = await begin(HOSTILE, mode)
    with pytest.raises(McpServerFailed, match=said):
        await talk.offers(20)


@pytest.mark.parametrize(
    ("mode", "said"),
    [("silent", "did not introduce itself"), ("version", "does not speak a version"), ("exits", "ended with 7")],
)
async def test_what_never_begins(begin: Begin, mode: str, said: str) -> None:
    with pytest.raises(McpServerFailed, match=said):
        await begin(HOSTILE, mode, deadline_s=1.0 if mode == "silent" else 20.0)


async def test_one_whose_caller_is_broken_off_again_and_again_ends() -> None:
    """What serves MCP clients breaks a call off until it has ended, whatever it still does."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", HOSTILE, "silent", stdin=PIPE, stdout=PIPE
    )
    wire = Pipes(process)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(Conversation.open, "s", wire, 20.0)
            while not wire.sent:
                await asyncio.sleep(0.005)
            group.cancel_scope.cancel()
        async with asyncio.timeout(10):
            await wire.closed.wait()
    finally:
        process.kill()
        await process.communicate()


async def test_it_is_not_read_while_nobody_waits(begin: Begin) -> None:
    """A server that talks all the time is stopped by its full pipe."""
    code = HOSTILE.replace('if method == "tools/call":', 'if method == "never":')
    talk = await begin(code, "floods")
    with pytest.raises((NoAnswer, McpServerFailed)):
        await talk.call_tool("x", {}, 0.05)
    before = talk._unasked
    await asyncio.sleep(0.1)
    assert talk._unasked - before <= 20_000
