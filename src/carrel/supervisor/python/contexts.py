"""Code contexts: named processes that keep their variables and run cells in order.

Each is a process of a warm interpreter with its own host. A cell has an output like a command; its other results come
from `kernel`. Messages of a context are hostile input: their size is limited.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from carrel.errors import CarrelError, Conflict, LimitExceeded, NotFound
from carrel.primitives.backoff import Backoff
from carrel.supervisor.command import Order
from carrel.supervisor.commands import LAST_DRAIN, READ_SIZE, Commands
from carrel.supervisor.http import Json
from carrel.supervisor.output import STDERR, STDOUT, read_some
from carrel.supervisor.python.calls import Python
from carrel.supervisor.python.cell import Cell
from carrel.supervisor.python.hosts import PythonHost
from carrel.supervisor.reaper import Reaper, memory_file

MOST_QUEUED = 64
REMEMBERED = 32
RESULTS_LIMIT = 8 * 1024 * 1024
RESULTS_KEPT = 32 * 1024 * 1024
INLINE = 60_000
MOST_BETWEEN = 64 * 1024
STUBBORN_S = 3.0
"""How long a cell may run after it was interrupted at its deadline. Then its whole context is killed."""
_SLACK = 1024 * 1024


class CodeContext:
    """One context. Its process starts with the first cell, and again with the first cell after its end."""

    def __init__(self, name: str, commands: Commands, launch: ContextLaunch):
        self.name = name
        self._commands = commands
        self._launch = launch
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Cell] = deque()
        self._cells: dict[str, Cell] = {}
        self._current: Cell | None = None
        self._host: PythonHost | None = None
        self._control: socket.socket | None = None
        self._pipes: dict[int, int] = {}
        self._between: list[tuple[int, bytes]] = []
        self._worker: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()
        self._ending: dict[Reaper, asyncio.Future[None]] = {}
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._count = 0
        self._ran = 0
        self._started_at: datetime | None = None
        self._starting = False

    # state

    def info(self) -> dict[str, Any]:
        state = "dead"
        if self._host is not None:
            state = "idle" if self._current is None else "busy"
        elif self._starting or self._queue:
            state = "starting"
        return {
            "name": self.name,
            "state": state,
            "env": self._launch.env,
            "pid": None if self._host is None else self._host.spare,
            "cells": self._ran,
            "queued": len(self._queue),
            "started_at": None if self._started_at is None else self._started_at.isoformat(),
        }

    @property
    def busy(self) -> bool:
        return self._current is not None or bool(self._queue)

    @property
    def env(self) -> str | None:
        return self._launch.env

    def cell(self, name: str) -> Cell:
        try:
            return self._cells[name]
        except KeyError:
            raise NotFound(
                f"no cell {name[:40]!r} in code context '{self.name}'",
                hint=f"the last {REMEMBERED} cells are remembered",
            ) from None

    # running

    def ask(self, code: str, figures: list[str], timeout: float | None, output_limit: int) -> Cell:
        """Add a cell to the queue."""
        if len(self._queue) >= MOST_QUEUED:
            raise LimitExceeded(
                f"{MOST_QUEUED} cells wait in code context '{self.name}' already", hint="wait for some to end"
            )
        self._count += 1
        cell = Cell(
            f"{self._count}",
            code,
            figures,
            timeout,
            self._commands.new_output(output_limit),
            self._loop.create_future(),
        )
        self._cells[cell.id] = cell
        self._forget_old()
        self._queue.append(cell)
        if self._current is None and self._host is not None and len(self._queue) == 1 and self._worker is None:
            self._next()
        else:
            self._work()
        return cell

    def _work(self) -> None:
        if self._worker is None and self._current is None and self._queue:
            self._worker = self._loop.create_task(self._run_queue())

    async def _run_queue(self) -> None:
        """Start the process if there is none, then run the queue."""
        try:
            if await self._begin() and self._queue:
                self._queue[0].fresh = True
        except CarrelError as error:
            while self._queue:
                self._refuse(self._queue.popleft(), error)
            return
        finally:
            self._worker = None
        self._next()

    def _next(self) -> None:
        """Send the next cell to the process."""
        if self._current is not None or not self._queue or self._control is None or self._host is None:
            self._work()
            return
        cell = self._current = self._queue.popleft()
        self._ran += 1
        cell.number, cell.began, cell.pid = self._ran, time.monotonic(), self._host.spare
        for stream, data in self._between:
            cell.output.add(stream, data)
        self._between.clear()
        message = json.dumps({"code": cell.code, "number": cell.number, "figures": cell.figures}).encode()
        try:
            if len(message) <= INLINE:
                self._control.send(message)
            else:
                memory = memory_file(message)
                try:
                    socket.send_fds(self._control, [b"@"], [memory])
                finally:
                    os.close(memory)
        except OSError:
            return  # it has just died; the event of its end is still on the way
        if cell.timeout is not None:
            self._timer = self._loop.call_later(cell.timeout, self._expire, cell)

    async def _begin(self) -> bool:
        """Start the process; return False if there is one already. Cells and restarts may ask for it concurrently."""
        async with self._beginning:
            if self._host is not None:
                return False
            if not self._closed:
                await self._start()
            if self._closed:  # perhaps during the start
                await self.end()
                raise self._deleted()
            return True

    def _deleted(self) -> NotFound:
        return NotFound(f"code context '{self.name}' was deleted", hint="run a cell in it to create it again")

    async def _start(self) -> None:
        self._starting = True
        try:
            host = await self._launch.host()
        finally:
            self._starting = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        ends: list[int] = []
        try:
            for stream in (STDOUT, STDERR):
                read_end, write_end = os.pipe2(os.O_CLOEXEC)
                ends.append(write_end)
                os.set_blocking(read_end, False)
                self._pipes[read_end] = stream
            host.watcher = self._on_host
            self._launch.run(host, (ends[0], ends[1]), theirs.fileno())
        except OSError as error:
            ours.close()
            for descriptor in self._pipes:
                os.close(descriptor)
            self._pipes.clear()
            raise Conflict(f"the code context does not start: {error.strerror}", hint="try again") from None
        finally:
            theirs.close()
            for descriptor in ends:
                os.close(descriptor)
        self._host, self._control = host, ours
        self._ran = 0
        self._started_at = datetime.now(UTC)
        self._loop.add_reader(ours, self._hear)
        for descriptor in self._pipes:
            self._loop.add_reader(descriptor, self._read, descriptor)

    # hearing

    def _hear(self) -> None:
        assert self._control is not None
        try:
            message, fds, _flags, _address = socket.recv_fds(self._control, 1 << 17, 1)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        cell, size = self._current, len(message)
        try:
            if fds:
                size = os.fstat(fds[0]).st_size
                message = os.pread(fds[0], size, 0) if size <= RESULTS_LIMIT * 2 + _SLACK else b""
        finally:
            for descriptor in fds:
                os.close(descriptor)
        if not message and not fds:
            self._loop.remove_reader(self._control)  # the host reports the end
            self._kill_later()
            return
        if cell is not None:
            cell.take(message, size)
            self._finish(cell)

    def _read(self, descriptor: int) -> int:
        data = read_some(descriptor, READ_SIZE)
        if data is None:
            return 0
        if not data:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
            del self._pipes[descriptor]
        elif self._current is not None:
            self._current.output.add(self._pipes[descriptor], data)
        elif sum(len(each) for _, each in self._between) < MOST_BETWEEN:
            self._between.append((self._pipes[descriptor], data[:MOST_BETWEEN]))
        return len(data)

    def _drain(self) -> None:
        for descriptor in list(self._pipes):
            left = LAST_DRAIN
            while descriptor in self._pipes and left > 0 and (got := self._read(descriptor)) > 0:
                left -= got

    def _finish(self, cell: Cell) -> None:
        self._drain()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._current is cell:
            self._current = None
        cell.end()
        self._next()

    def _refuse(self, cell: Cell, error: CarrelError) -> None:
        cell.refusal, cell.status = error, "died"
        cell.end()

    def _on_host(self, reaper: Reaper, event: str, value: int) -> None:
        if event == "dead":
            self._commands.on_reaper(reaper, event, value)
            self._commands.sweep(reaper)
            self._died(reaper, signal.SIGKILL)
        elif event == "ended":
            self._died(reaper, value)
            self._kill_tree(reaper)
        if event in {"dead", "clean"} and (ended := self._ending.pop(reaper, None)) is not None:
            ended.set_result(None)

    def _died(self, reaper: Reaper, status: int) -> None:
        """Handle the end of the process: its variables are lost, so waiting cells fail, unless a new process has
        started already.
        """
        if self._host is not reaper:
            return
        self._drain()
        self._host = None
        if self._control is not None:
            self._loop.remove_reader(self._control)
            self._control.close()
            self._control = None
        for descriptor in list(self._pipes):
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._pipes.clear()
        self._between.clear()
        waiting, self._queue = list(self._queue), deque()
        for cell in [*([self._current] if self._current is not None else []), *waiting]:
            cell.status, cell.wait_status = "died", status
            self._finish(cell)

    # ending

    def interrupt(self) -> bool:
        """Interrupt the running cell; return whether there was one."""
        if self._current is None or self._host is None or not self._host.spare:
            return False
        try:
            os.killpg(self._host.spare, signal.SIGINT)
        except ProcessLookupError:
            return False
        return True

    def _expire(self, cell: Cell) -> None:
        if self._current is cell:
            cell.timed_out = True
            self.interrupt()
            self._timer = self._loop.call_later(STUBBORN_S, self._kill_later)

    def _kill_later(self) -> None:
        if self._host is not None:
            self._kill_tree(self._host)

    def _kill_tree(self, reaper: Reaper) -> asyncio.Future[None]:
        """Kill repeatedly until the host reports that nothing is left; right after, it may have other work."""
        if reaper not in self._ending:
            self._ending[reaper] = self._loop.create_future()
            self._kill_more(reaper, Backoff(0.001, 0.05))
        return self._ending[reaper]

    def _kill_more(self, reaper: Reaper, backoff: Backoff) -> None:
        if reaper in self._ending:
            reaper.kill_below()
            self._loop.call_later(backoff.next_pause(), self._kill_more, reaper, backoff)

    async def end(self) -> None:
        """Kill the process and everything that it started."""
        if self._host is not None:
            self._kill_tree(self._host)
        for ended in list(self._ending.values()):
            await asyncio.shield(ended)

    async def restart(self) -> None:
        """Start a new process without the old variables. Waiting cells are not run."""
        await self.end()
        if self._worker is None:
            await self._begin()

    async def close(self) -> None:
        """End, and forget every cell."""
        self._closed = True
        while self._queue:
            self._refuse(self._queue.popleft(), self._deleted())
        await self.end()
        for cell in self._cells.values():
            cell.output.release()
        self._cells.clear()

    def _forget_old(self) -> None:
        ended = [cell for cell in self._cells.values() if not cell.running]
        kept = sum(cell.results_size for cell in ended)
        for cell in ended:
            if len(self._cells) <= REMEMBERED and kept <= RESULTS_KEPT:
                return
            kept -= cell.results_size
            cell.output.release()
            del self._cells[cell.id]


class ContextLaunch:
    """Starts the process of a context, in an environment and with variables."""

    def __init__(self, python: Python, release: Callable[[Order], None], body: Json):
        self.env: str | None = body.get("env")
        self._python = python
        self._release = release
        self._body = {"variables": body.get("variables")}
        self._release(python.order(self._body, ""))  # validates the body now, not at the start

    async def host(self) -> PythonHost:
        """Return a host whose spare waits for work."""
        return await self._python.host(self.env)

    def run(self, host: PythonHost, streams: tuple[int, int], control: int) -> None:
        """Let the spare of a host become a context."""
        order = self._python.order(self._body, "")
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        work = {"code": "", "env": order.env, "live": True, "limit": RESULTS_LIMIT}
        try:
            host.run(work, order.directory, (null, *streams), control)
        finally:
            os.close(null)
            self._release(order)
