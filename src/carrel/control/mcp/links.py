"""The links to MCP servers in running sandboxes: lines in and out through the supervisor, and one conversation for each
server, begun on demand and kept while the sandbox and the declaration last. Callers have been admitted.

Knows nothing of what the lines say. They are written by hostile code, so the memory they may take is bounded.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from pydantic import Field

from carrel.control.operations.checks import check, json_object
from carrel.control.sessions.live import LiveSandbox
from carrel.control.supervisor.client import SupervisorClient
from carrel.control.supervisor.connection import Json, SupervisorDownload
from carrel.errors import CarrelError, Conflict, LimitExceeded, McpServerFailed, NotFound, NotRunning
from carrel.models import Answer
from carrel.primitives.keyed_lock import KeyedLocks

if TYPE_CHECKING:
    from carrel.control.mcp.session import Conversation

MOST_LINE = 4 * 1024 * 1024
"""The longest message that is taken from a server."""
MOST_PASSED = 16 * 1024 * 1024
"""The longest message that a supervisor passes on. One between the two limits is answered with a refusal."""
LONGEST_REASON = 500
TOO_LONG = f"sent a message of more than {MOST_LINE // (1024 * 1024)} MB"
_HEADER = 5
_END, _MESSAGE, _OPENED = 0, 1, 2


class RequestRefused(Exception):
    """A server answered a request with an error of the protocol."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code
        self.message = message


class NoAnswer(Exception):
    """A server did not answer in time."""


def known_failure(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """Return the first error of a group that callers understand: one of carrel, or an answer of the server."""
    for each in group.exceptions:
        found = known_failure(each) if isinstance(each, BaseExceptionGroup) else each
        if isinstance(found, CarrelError | RequestRefused | NoAnswer):
            return found
    return None


TIMED_OUT, REFUSED = "carrel/timedOut", "carrel/error"
"""Keys of an answer that carrel made up; an answer of a server never has them."""


def timeout_answer(timeout: float) -> Json:
    """Return the answer for a server that gave none."""
    text = f"the MCP server did not answer within {timeout:g} seconds"
    return {"content": [{"type": "text", "text": text}], "isError": True, TIMED_OUT: True}


def refusal_answer(error: RequestRefused) -> Json:
    """Return the answer for a server that refused a request."""
    shown = {"code": error.code, "message": error.message}
    return {"content": [{"type": "text", "text": error.message}], "isError": True, REFUSED: shown}


class _End(Answer):
    exit_code: int | None = None
    signal: str | None = Field(default=None, max_length=64)
    reason: str | None = Field(default=None, max_length=4096)


class _Opened(Answer):
    incarnation: int


class Wire:
    """One connection to one process. `open` makes one, and starts the process when it does not run."""

    def __init__(self, supervisor: SupervisorClient, name: str, stream: SupervisorDownload):
        self._supervisor = supervisor
        self._name = name
        self._stream = stream
        self._incarnation = 0
        self._opened = asyncio.Event()
        self.ended: str | None = None
        """Why there is nothing more to read, once that is so."""

    @classmethod
    async def open(cls, supervisor: SupervisorClient, declaration: Json, name: str) -> Wire:
        """Start a fresh process of a server. `McpServerFailed` when it cannot be started."""
        try:
            process = await supervisor.declare_mcp(name, declaration)
            if process.state == "running":  # it was used before, in an unknown state
                await supervisor.stop_mcp(name)
            stream = await supervisor.connect_mcp(name)
        except McpServerFailed as error:
            raise failed(name, error.detail, error.hint) from None
        except (Conflict, LimitExceeded, NotFound) as error:
            raise failed(name, f"cannot be started: {error.detail}", error.hint) from None
        return cls(supervisor, name, stream)

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the messages; in place of an answer that is too long, a `StandIn`. When they end, `ended` says why."""
        try:
            async for body in self._messages():
                yield body
        finally:
            self.ended = self.ended or "ended without a reason"
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
        """Send a message to the server; waits until somebody reads `lines`."""
        await self._opened.wait()
        try:
            await self._supervisor.send_mcp(self._name, self._incarnation, line)
        except (NotRunning, LimitExceeded, Conflict, NotFound) as error:
            self.ended = self.ended or error.detail[:LONGEST_REASON]
            raise failed(self._name, error.detail) from None

    def close(self) -> None:
        """Stop reading; the process goes on until somebody stops it."""
        self._stream.close()


async def stop_if_running(supervisor: SupervisorClient, name: str) -> None:
    """End the process of a server. One that has ended by itself keeps its delay before the next start."""
    process = (await supervisor.mcp_processes()).get(name)
    if process is not None and process.state == "running":
        await supervisor.stop_mcp(name)


def failed(name: str, why: str, hint: str | None = None) -> McpServerFailed:
    """Return the error for a server that cannot be used."""
    shown = why.removeprefix(f"MCP server '{name}' ")[:LONGEST_REASON]
    return McpServerFailed(f"the MCP server '{name}' {shown}", field="server", hint=hint or "its log may say more")


def _reason(end: _End) -> str:
    if end.reason:
        return end.reason[:LONGEST_REASON]
    return f"was ended by {end.signal}" if end.signal else f"ended with {end.exit_code}"


# messages that are too long: skipped without being stored, and answered with a refusal

EDGE = 256
TOO_LARGE = -32000
_VERSION = rb'"jsonrpc"\s*:\s*"2\.0"\s*'
_NUMBER = rb'"id"\s*:\s*(\d{1,15})\s*'
_ASKS = re.compile(rb'\{\s*(?:(?:%s|%s),\s*){0,2}"method"' % (_VERSION, _NUMBER))
_FIRST = re.compile(rb"\{\s*(?:%s,\s*)?%s," % (_VERSION, _NUMBER))
# The last brace closes the message, and what precedes it is a number, not text: so the key before it is the message's.
_LAST = re.compile(rb",\s*%s(?:,\s*%s)?\}\Z" % (_NUMBER, _VERSION))


class StandIn(bytes):
    """A short message in place of a long one, which had `size` bytes."""

    size: int


class LongLine:
    """A message that is skipped: `feed` it until `left` is 0."""

    def __init__(self, size: int):
        self.size = self.left = size
        self._head = self._tail = b""

    def feed(self, data: bytes | bytearray) -> int:
        """Skip a part of the message; return how many of the bytes belonged to it."""
        mine = min(self.left, len(data))
        self.left -= mine
        if len(self._head) < EDGE:
            self._head += bytes(data[: min(mine, EDGE - len(self._head))])
        self._tail = (self._tail + bytes(data[max(0, mine - EDGE) : mine]))[-EDGE:]
        return mine

    def stand_in(self, most: int) -> StandIn | None:
        """Return a refusal for the request that the message answers; None when it names none. `most` is the limit."""
        found = None if _ASKS.match(self._head) else _FIRST.match(self._head) or _LAST.search(self._tail)
        if found is None:
            return None
        words = f"the answer has {self.size} bytes, and at most {most} are taken: ask for less at once"
        error = {"jsonrpc": "2.0", "id": int(found[1]), "error": {"code": TOO_LARGE, "message": words}}
        made = StandIn(json.dumps(error).encode())
        made.size = self.size
        return made


# conversations


async def import_session_module() -> None:
    """Import the MCP client in a thread: it takes long."""
    await asyncio.to_thread(import_module, "carrel.control.mcp.session")


@dataclass(slots=True)
class _OpenConversation:
    generation: str
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class _Failed:
    generation: str
    at: float
    detail: str
    hint: str | None


class McpLinks:
    """Every conversation of this server with hosted MCP servers."""

    def __init__(self, start_s: float):
        self._start_s = start_s
        self._kept: dict[tuple[str, str], _OpenConversation] = {}
        self._failed: dict[tuple[str, str], _Failed] = {}
        self._locks = KeyedLocks()
        self._closing: set[asyncio.Task[None]] = set()

    def current(self, box: LiveSandbox, server: str, generation: str) -> Conversation | None:
        """Return the open conversation, if it is with the current declaration of the server."""
        kept = self._kept.get((box.record.id, server))
        if kept is None or kept.generation != generation or not kept.conversation.alive:
            return None
        return kept.conversation

    async def open(
        self, box: LiveSandbox, server: str, declaration: Json, check: Callable[[], Awaitable[None]]
    ) -> Conversation:
        """Return the conversation with a server; start its process if there is none. `McpServerFailed`. `check` refuses
        a declaration that is no longer valid; it runs under the lock, so that nothing changes between it and the start.
        """
        key, came = (box.record.id, server), time.monotonic()
        async with self._locks.of(key):
            await check()
            generation = str(declaration["generation"])
            known = self.current(box, server, generation)
            if known is not None:
                return known
            failed = self._failed.pop(key, None)
            if failed is not None and failed.generation == generation and failed.at >= came:
                # Else everybody who waited would try again in turn, and the last would wait for all the others.
                self._failed[key] = failed
                raise McpServerFailed(failed.detail, field="server", hint=failed.hint)
            before = self._kept.pop(key, None)
            if before is not None:
                await before.conversation.close()
            try:
                conversation = await start_conversation(box, server, declaration, self._start_s)
            except McpServerFailed as error:
                self._failed[key] = _Failed(generation, time.monotonic(), error.detail, error.hint)
                raise
            self._kept[key] = _OpenConversation(generation, conversation)
            return conversation

    async def stop(self, box: LiveSandbox, server: str, *, forget: bool = False) -> None:
        """End the process of a server, and with `forget` its declaration in the sandbox too."""
        key = (box.record.id, server)
        async with self._locks.of(key):
            self._failed.pop(key, None)
            kept = self._kept.pop(key, None)
            if kept is not None:
                await kept.conversation.close()
            await (box.connection.forget_mcp if forget else box.connection.stop_mcp)(server)

    @asynccontextmanager
    async def watching(self, box: LiveSandbox, server: str, conversation: Conversation) -> AsyncIterator[None]:
        """Use a conversation in the block; if it has ended by then, end the process behind it too."""
        try:
            yield
        finally:
            key = (box.record.id, server)
            kept = self._kept.get(key)
            if not conversation.alive and kept is not None and kept.conversation is conversation:
                del self._kept[key]
                lock = self._locks.of(key)
                if not lock.locked():  # else it is being started again or ended, which removes the old process
                    async with lock:
                        with suppress(CarrelError):
                            await stop_if_running(box.connection, server)

    def ended(self, box: LiveSandbox) -> None:
        """Close the conversations with a sandbox that is about to end."""
        for key in [key for key in self._kept if key[0] == box.record.id]:
            kept = self._kept.pop(key)
            task = asyncio.get_running_loop().create_task(kept.conversation.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for key in [key for key in self._failed if key[0] == box.record.id]:
            del self._failed[key]

    async def close(self) -> None:
        """End every conversation."""
        conversations = [kept.conversation for kept in self._kept.values()]
        self._kept.clear()
        await asyncio.gather(*(each.close() for each in conversations), *self._closing, return_exceptions=True)


async def start_conversation(box: LiveSandbox, server: str, declaration: Json, start_s: float) -> Conversation:
    """Start a fresh process and a conversation with it. The caller closes the conversation."""
    await import_session_module()
    from carrel.control.mcp.session import Conversation

    wire = await Wire.open(box.connection, declaration, server)
    try:
        return await Conversation.open(server, wire, start_s)
    except BaseException:
        with suppress(CarrelError):
            await asyncio.shield(stop_if_running(box.connection, server))
        raise
