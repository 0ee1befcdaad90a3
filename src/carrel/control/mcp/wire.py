"""The way to one process of an MCP server: lines in, lines out, through the supervisor of its sandbox.

Knows the frames, and nothing of what the lines say. They are written by hostile code: what is
kept of them is bounded.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator

from pydantic import Field

from carrel.control.operations.checks import check, json_object
from carrel.control.supervisor.client import SupervisorClient
from carrel.control.supervisor.connection import Download, Json
from carrel.errors import Conflict, LimitExceeded, McpServerFailed, NotFound, NotRunning
from carrel.models import Answer

MOST_LINE = 4 * 1024 * 1024
"""The longest message that is taken from a server."""
MOST_PASSED = 16 * 1024 * 1024
"""The longest that a supervisor lets through. Whoever waits for one between the two is told that it is too long."""
LONGEST_REASON = 500
TOO_LONG = f"sent a message of more than {MOST_LINE // (1024 * 1024)} MB"
_HEADER = 5
_END, _MESSAGE, _OPENED = 0, 1, 2


class _End(Answer):
    exit_code: int | None = None
    signal: str | None = Field(default=None, max_length=64)
    reason: str | None = Field(default=None, max_length=4096)


class _Opened(Answer):
    incarnation: int


class Wire:
    """One connection to one process. `open` makes one, and starts the process when it does not run."""

    def __init__(self, supervisor: SupervisorClient, name: str, stream: Download):
        self._supervisor = supervisor
        self._name = name
        self._stream = stream
        self._incarnation = 0
        self._opened = asyncio.Event()
        self.ended: str | None = None
        """Why there is nothing more to read, once that is so."""

    @classmethod
    async def open(cls, supervisor: SupervisorClient, declaration: Json, name: str) -> Wire:
        """A fresh process of a server, declared as it is now. `McpServerFailed` when it cannot be started."""
        try:
            process = await supervisor.declare_mcp(name, declaration)
            if process.state == "running":  # somebody spoke to it before: nobody knows what was said
                await supervisor.stop_mcp(name)
            stream = await supervisor.connect_mcp(name)
        except (McpServerFailed, Conflict, LimitExceeded, NotFound) as error:
            raise failed(name, error.detail, error.hint) from None
        return cls(supervisor, name, stream)

    async def lines(self) -> AsyncIterator[bytes]:
        """The messages, one after the other; in the place of an answer that is too long, a `StandIn`. When they end,
        `ended` says why.
        """
        try:
            async for body in self._messages():
                yield body
        finally:
            self.ended = self.ended or "ended without a word"
            self._opened.set()

    async def _messages(self) -> AsyncIterator[bytes]:
        held = bytearray()
        long: LongLine | None = None
        async for data in self._stream:
            held += data
            start = 0
            while long is not None or len(held) - start >= _HEADER:
                if long is not None:
                    start += long.feed(held[start:])
                    if long.left:
                        break
                    stand_in, long = long.stand_in(MOST_LINE), None
                    if stand_in is None:
                        self.ended = TOO_LONG
                        return
                    yield stand_in
                    continue
                kind, size = held[start], int.from_bytes(held[start + 1 : start + _HEADER], "big")
                if kind == _MESSAGE and MOST_LINE < size <= MOST_PASSED:
                    long, start = LongLine(size), start + _HEADER
                    continue
                if size > MOST_LINE or kind not in {_END, _MESSAGE, _OPENED}:
                    self.ended = TOO_LONG
                    return
                stop = start + _HEADER + size
                if len(held) < stop:
                    break
                body = bytes(held[start + _HEADER : stop])
                start = stop
                if kind == _MESSAGE:
                    yield body
                elif kind == _OPENED:
                    self._incarnation = check(_Opened, json_object(body)).incarnation
                    self._opened.set()
                else:
                    self.ended = _reason(check(_End, json_object(body)))
                    return
            del held[:start]

    async def send(self, line: bytes) -> None:
        """A message for the server; while nobody reads `lines`, it waits."""
        await self._opened.wait()
        try:
            await self._supervisor.send_mcp(self._name, self._incarnation, line)
        except (NotRunning, LimitExceeded, Conflict, NotFound) as error:
            self.ended = self.ended or error.detail[:LONGEST_REASON]
            raise failed(self._name, error.detail) from None

    def close(self) -> None:
        """Stop reading; the process goes on until somebody stops it."""
        self._stream.close()


async def end_running(supervisor: SupervisorClient, name: str) -> None:
    """End the process of a server that is of no use. One that has ended by itself is left to wait its time."""
    process = (await supervisor.mcp_processes()).get(name)
    if process is not None and process.state == "running":
        await supervisor.stop_mcp(name)


def failed(name: str, why: str, hint: str | None = None) -> McpServerFailed:
    """What callers are told when a server is of no use."""
    told = why.removeprefix(f"MCP server '{name}' ")[:LONGEST_REASON]
    return McpServerFailed(f"the MCP server '{name}' {told}", field="server", hint=hint or "its log may say more")


def _reason(end: _End) -> str:
    if end.reason:
        return end.reason[:LONGEST_REASON]
    return f"was ended by {end.signal}" if end.signal else f"ended with {end.exit_code}"


# messages that are too long to be taken: passed over without being kept, and answered for

EDGE = 256
TOO_LARGE = -32000
_VERSION = rb'"jsonrpc"\s*:\s*"2\.0"\s*'
_NUMBER = rb'"id"\s*:\s*(\d{1,15})\s*'
_ASKS = re.compile(rb'\{\s*(?:(?:%s|%s),\s*){0,2}"method"' % (_VERSION, _NUMBER))
_FIRST = re.compile(rb"\{\s*(?:%s,\s*)?%s," % (_VERSION, _NUMBER))
# The last brace is the message's own, and a number stands in no text: what is before it is the message's own too.
_LAST = re.compile(rb",\s*%s(?:,\s*%s)?\}\Z" % (_NUMBER, _VERSION))


class StandIn(bytes):
    """A short message in the place of a long one, which had `size` bytes."""

    size: int


class LongLine:
    """One message that is passed over: `feed` it until `left` is 0."""

    def __init__(self, size: int):
        self.size = self.left = size
        self._head = self._tail = b""

    def feed(self, data: bytes | bytearray) -> int:
        """Skip a part of the message; returns how many of the bytes belonged to it."""
        mine = min(self.left, len(data))
        self.left -= mine
        if len(self._head) < EDGE:
            self._head += bytes(data[: min(mine, EDGE - len(self._head))])
        self._tail = (self._tail + bytes(data[max(0, mine - EDGE) : mine]))[-EDGE:]
        return mine

    def stand_in(self, most: int) -> StandIn | None:
        """A refusal for who waits for its answer; None when it does not say whom it answers. `most` would be taken."""
        found = None if _ASKS.match(self._head) else _FIRST.match(self._head) or _LAST.search(self._tail)
        if found is None:
            return None
        words = f"the answer has {self.size} bytes, and at most {most} are taken: ask for less at once"
        error = {"jsonrpc": "2.0", "id": int(found[1]), "error": {"code": TOO_LARGE, "message": words}}
        made = StandIn(json.dumps(error).encode())
        made.size = self.size
        return made
