"""One declared MCP server: at most one process, started when a client connects, with a backoff when it keeps failing.

This module decides when to start; `mcp_process` runs the process.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from carrel.errors import CarrelError, Conflict, LimitExceeded, McpServerFailed, NotFound, NotRunning
from carrel.primitives.backoff import Backoff
from carrel.supervisor.command import Order, exit_of
from carrel.supervisor.commands import Commands
from carrel.supervisor.mcp_log import Log
from carrel.supervisor.mcp_process import Process
from carrel.supervisor.output import ByteBudget

QUICK_S = 5.0
"""A process that lived shorter than this has failed, and the next start has to wait."""
GOOD_S = 60.0
"""A process that lived this long resets the backoff."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
START_S = 10.0


class RestartDelay:
    """Decides how long a failing server has to wait. Pure: the caller passes the time."""

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
        self._until = 0.0

    def ended(self, now: float, lived: float) -> None:
        """Record that a process has ended although nobody asked for that."""
        if lived >= GOOD_S:
            self._backoff.reset()
        if lived < QUICK_S:
            self._until = now + self._backoff.next_pause()

    def left(self, now: float) -> float:
        """Return the seconds until the next start is allowed."""
        return max(0.0, self._until - now)


def _shown(wait: float) -> float:
    """Round up to milliseconds: a client that waits that long may start the server."""
    return math.ceil(wait * 1000) / 1000


@dataclass(frozen=True)
class ServerDeclaration:
    """How a server is started. Each call of `order` returns a new order, which the caller passes to `release`."""

    generation: str
    order: Callable[[], Order]
    release: Callable[[Order], None]


class Server:
    """A declared server."""

    def __init__(
        self, name: str, commands: Commands, room: ByteBudget, count: Callable[[], int], declared: ServerDeclaration
    ):
        self.name = name
        self.closed = False
        self._commands = commands
        self._room = room
        self._count = count
        self._turn = asyncio.Lock()  # one start or stop at a time
        self._process: Process | None = None
        self.log = Log()
        self._declare(declared)

    def _declare(self, declared: ServerDeclaration) -> None:
        self._declared = declared
        self._delay = RestartDelay()
        self._incarnation = self._starts = self._restarts = 0
        self._last_exit: dict[str, Any] | None = None
        self._reason: str | None = None
        self._failing = False  # the last process ended although nobody asked for that

    # state

    def info(self) -> dict[str, Any]:
        running = self._running()
        wait = 0.0 if running else self._delay.left(time.monotonic())
        if running is not None:
            state = "running"
        elif wait > 0:
            state = "backing_off"
        else:
            state = "stopped" if self._reason is None else "failed"
        return {
            "name": self.name,
            "generation": self._declared.generation,
            "state": state,
            "pid": None if running is None else running.pid,
            "connected": running is not None and running.connected,
            "incarnation": self._incarnation,
            "started": self._starts,
            "restarts": self._restarts,
            "last_exit": self._last_exit,
            "reason": None if running is not None else self._reason,
            "retry_in_s": _shown(wait) if wait > 0 else None,
            "log_bytes": self.log.size,
        }

    def _running(self) -> Process | None:
        process = self._process
        return None if process is None or process.over.done() else process

    # using

    async def connect(self) -> AsyncIterator[bytes | memoryview]:
        """Return the messages of the process as frames. Starts a process if none runs; replaces any other reader."""
        async with self._turn:
            self._check_open()
            process = self._running()
            if process is not None and process.ending:
                await asyncio.shield(process.over)
                process = None
            if process is None:
                process = await self._start()
            return process.messages()

    async def _start(self) -> Process:
        wait = self._delay.left(time.monotonic())
        if wait > 0:
            raise McpServerFailed(
                f"MCP server '{self.name}' {self._reason}; it may start again in {wait:.1f} s",
                field="retry_in_s",
                hint="read its log; wait, or stop it to have it started at once",
                retry_in_s=_shown(wait),
            )
        if self._process is not None:
            self._process.abandon()
        try:
            order = self._declared.order()
        except CarrelError as error:
            self._reason = f"cannot be started: {error.detail}"
            self.log.say(f"carrel: {self._reason}".encode(errors="replace"))
            raise
        program = order.command[0]
        self._incarnation = self._count()
        self._starts += 1
        self._restarts += self._failing
        self._failing = False
        try:
            process = Process(self.name, self._commands, order, self._incarnation, self.log, self._room, self._ended)
        except FileNotFoundError as error:
            raise self._never_began(program, error.errno or errno.ENOENT) from None
        except OSError as error:
            why = f"this sandbox cannot start another process: {error.strerror}"
            raise LimitExceeded(why, hint="wait for something to end, or end it") from None
        finally:
            self._declared.release(order)
        self._process = process
        try:
            await asyncio.wait_for(asyncio.shield(process.begun), START_S)
        except TimeoutError:
            process.end(f"did not start within {START_S:g} s")
            raise McpServerFailed(f"MCP server '{self.name}' {process.reason}", hint="try again") from None
        if process.failure:
            process.end("cannot be started")
            await asyncio.shield(process.over)
            raise self._never_began(program, process.failure)
        return process

    def _never_began(self, program: str, code: int) -> McpServerFailed:
        words = "command not found" if code == errno.ENOENT else os.strerror(code)
        self._reason = f"cannot be started: {program}: {words}".encode(errors="replace").decode()
        self._last_exit = {"exit_code": 127 if code == errno.ENOENT else 126, "signal": None}
        self._failing = True
        self._delay.ended(time.monotonic(), 0.0)
        self.log.say(f"carrel: {self._reason}".encode())
        return McpServerFailed(
            f"MCP server '{self.name}' {self._reason}",
            field="command",
            hint="repair its declaration, or install the program",
        )

    async def send(self, incarnation: int, line: bytes, deadline_s: float) -> None:
        process = self._running()
        if process is None:
            raise NotRunning(f"MCP server '{self.name}' does not run", field="incarnation", hint="connect first")
        if process.incarnation != incarnation:
            raise Conflict(
                f"MCP server '{self.name}' was started again since",
                field="incarnation",
                hint="connect again",
                incarnation=process.incarnation,
            )
        await process.send(line + b"\n", deadline_s)

    def _ended(self, process: Process) -> None:
        """Called when a process and everything that it started have ended."""
        if process.failure:
            return  # `_start` reports the failure
        code, name = exit_of(process.status)
        self._last_exit = {"exit_code": code, "signal": name}
        why = f"; it {process.reason}" if process.reason else ""
        self.log.say(f"carrel: ended with {name or f'exit code {code}'}{why}".encode())
        if process.wanted:
            return
        now = time.monotonic()
        self._failing = True
        self._delay.ended(now, now - process.began)
        if process.reason is None and (code != 0 or now - process.began < QUICK_S):
            process.reason = f"was ended by {name}" if code is None else f"ended by itself with exit code {code}"
        self._reason = process.reason

    # changing

    async def declare(self, declared: ServerDeclaration) -> None:
        """Replace the declaration; the same generation changes nothing."""
        async with self._turn:
            self._check_open()
            if declared.generation != self._declared.generation:
                await self._end("was declared again")
                self._declare(declared)

    async def stop(self) -> None:
        """End the process. The next one may start at once."""
        async with self._turn:
            self._check_open()
            await self._end("was stopped")
            self._delay = RestartDelay()
            self._reason, self._failing = None, False

    async def close(self) -> None:
        """End the server for good."""
        async with self._turn:
            self._check_open()
            await self._end("was removed")
            self.closed = True
            if self._process is not None:
                self._process.abandon()

    def _check_open(self) -> None:
        if self.closed:
            raise NotFound(f"MCP server '{self.name}' was removed", hint="declare it first")

    async def _end(self, why: str) -> None:
        process = self._running()
        if process is not None:
            process.stop(why)
            await asyncio.shield(process.over)
