"""The conversations with MCP servers in running sandboxes: begun on demand, kept while the sandbox and the declaration
last, one for each server. Callers have been admitted.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from carrel.control.mcp.request_checks import Json
from carrel.control.mcp.wire import Wire, end_running
from carrel.control.sessions.live import LiveSandbox
from carrel.errors import CarrelError, McpServerFailed

if TYPE_CHECKING:
    from carrel.control.mcp.session import Conversation


async def sessions_module() -> None:
    """Import what speaks the protocol, beside the event loop: it takes long."""
    await asyncio.to_thread(import_module, "carrel.control.mcp.session")


@dataclass(slots=True)
class _Kept:
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
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._failed: dict[tuple[str, str], _Failed] = {}
        self._locks: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._closing: set[asyncio.Task[None]] = set()

    def current(self, box: LiveSandbox, server: str, generation: str) -> Conversation | None:
        """The conversation there is, if it is with the server as it is declared now."""
        kept = self._kept.get((box.record.id, server))
        if kept is None or kept.generation != generation or not kept.conversation.alive:
            return None
        return kept.conversation

    async def open(
        self, box: LiveSandbox, server: str, declaration: Json, check: Callable[[], Awaitable[None]]
    ) -> Conversation:
        """The conversation with a server, begun if need be: then its process is started. `McpServerFailed`. `check`
        refuses a declaration that does not hold any more: nothing ends the process of it between that and its start.
        """
        key, came = (box.record.id, server), time.monotonic()
        async with self._locks[key]:
            await check()
            generation = str(declaration["generation"])
            known = self.current(box, server, generation)
            if known is not None:
                return known
            failed = self._failed.pop(key, None)
            if failed is not None and failed.generation == generation and failed.at >= came:
                # Whoever waited meanwhile would try again in turn, and the last of them wait for all the others.
                self._failed[key] = failed
                raise McpServerFailed(failed.detail, field="server", hint=failed.hint)
            before = self._kept.pop(key, None)
            if before is not None:
                await before.conversation.close()
            try:
                conversation = await begin(box, server, declaration, self._start_s)
            except McpServerFailed as error:
                self._failed[key] = _Failed(generation, time.monotonic(), error.detail, error.hint)
                raise
            self._kept[key] = _Kept(generation, conversation)
            return conversation

    async def stop(self, box: LiveSandbox, server: str, *, forget: bool = False) -> None:
        """End the process of a server, and with `forget` its declaration in the sandbox too."""
        key = (box.record.id, server)
        async with self._locks[key]:
            self._failed.pop(key, None)
            kept = self._kept.pop(key, None)
            if kept is not None:
                await kept.conversation.close()
            await (box.connection.forget_mcp if forget else box.connection.stop_mcp)(server)

    @asynccontextmanager
    async def watching(self, box: LiveSandbox, server: str, conversation: Conversation) -> AsyncIterator[None]:
        """While the block lasts the conversation is used; when it ended meanwhile, so does the process behind it."""
        try:
            yield
        finally:
            key = (box.record.id, server)
            kept = self._kept.get(key)
            if not conversation.alive and kept is not None and kept.conversation is conversation:
                del self._kept[key]
                lock = self._locks[key]
                if not lock.locked():  # else somebody starts another, or ends it: then what is left goes, too
                    async with lock:
                        with suppress(CarrelError):
                            await end_running(box.connection, server)

    def ended(self, box: LiveSandbox) -> None:
        """A sandbox is about to end, and everything in it."""
        for key in [key for key in self._kept if key[0] == box.record.id]:
            kept = self._kept.pop(key)
            task = asyncio.get_running_loop().create_task(kept.conversation.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for key in [key for key in self._failed if key[0] == box.record.id]:
            del self._failed[key]
        for key in [key for key, lock in self._locks.items() if key[0] == box.record.id and not lock.locked()]:
            del self._locks[key]

    async def close(self) -> None:
        """End every conversation."""
        conversations = [kept.conversation for kept in self._kept.values()]
        self._kept.clear()
        await asyncio.gather(*(each.close() for each in conversations), *self._closing, return_exceptions=True)


async def begin(box: LiveSandbox, server: str, declaration: Json, start_s: float) -> Conversation:
    """A conversation with a fresh process of a server; whoever begins one closes it."""
    await sessions_module()
    from carrel.control.mcp.session import Conversation

    wire = await Wire.open(box.connection, declaration, server)
    try:
        return await Conversation.open(server, wire, start_s)
    except BaseException:
        with suppress(CarrelError):
            await asyncio.shield(end_running(box.connection, server))
        raise
