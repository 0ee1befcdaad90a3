"""One process of an MCP server, from its start until nothing of its process tree is left.

It has a reaper of its own, so everything that it forks is found and ended with it. Standard output is read only as fast
as a client reads the messages. Knows nothing about declarations and restarts.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from carrel.errors import LimitExceeded, McpServerFailed, NotRunning
from carrel.primitives.backoff import Backoff
from carrel.supervisor.answers import frame
from carrel.supervisor.command import Order, exit_of
from carrel.supervisor.commands import LAST_DRAIN, READ_SIZE, Commands
from carrel.supervisor.mcp_lines import MOST_LINE, MessageLines
from carrel.supervisor.mcp_log import Log
from carrel.supervisor.output import ByteBudget, read_some
from carrel.supervisor.reaper import ProgramStart, Reaper, Runner, find_program, kill_below, signal_below

END, MESSAGE, OPENED = 0, 1, 2
"""Kinds of frames: the end, one message, and the first frame, which says which process this is."""
FRAME = 64 * 1024
POLITE_S, TERM_S = 0.5, 1.5
"""How long a process may take to end after its input was closed, and then after SIGTERM."""
STUCK_S = 1.0
"""How long a reaper may take to report that nothing is left below it."""
CLOSED_S = 2.0
"""How long a process may run after it closed its output: most close it because they are about to exit."""

CLOSED_OUTPUT = "closed its standard output"
CLOSED_INPUT = "closed its standard input"
DEAF = "does not read its input"
NO_ROOM = "printed a line longer than there is memory for"


class _ReportingRunner(Runner):
    """A runner that reports its own end, whatever caused it."""

    def gone(self) -> None:
        self.on_event(self, "gone", 0)


class _MessageReader:
    """One reader of the messages."""

    begun = False


class Process:
    """The constructor starts the process, or raises `OSError`. `begun` and `over` are its start and its end."""

    def __init__(
        self,
        name: str,
        commands: Commands,
        order: Order,
        incarnation: int,
        log: Log,
        room: ByteBudget,
        on_over: Callable[[Process], None],
    ):
        self.name = name
        self.incarnation = incarnation
        self.pid: int | None = None
        self.status: int | None = None
        self.failure = 0
        self.reason: str | None = None
        self.wanted = False
        self._commands = commands
        self._loop = asyncio.get_running_loop()
        self._log = log
        self._room = room
        self._counted = 0
        self._on_over = on_over
        self._lines = MessageLines()
        self._left = LAST_DRAIN
        self._reader: _MessageReader | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._killing = False
        self._clean = False
        self._writing = asyncio.Lock()
        self._fed = 0
        self._writable: asyncio.Future[None] | None = None
        self._writers: set[asyncio.Task[None]] = set()
        self.began = time.monotonic()
        self.begun: asyncio.Future[None] = self._loop.create_future()
        self.over: asyncio.Future[None] = self._loop.create_future()
        argv = list(order.command)
        program = find_program(argv[0], order.env.get("PATH", ""), order.directory)
        if program is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._stdin = self._stdout = self._stderr = -1
        theirs: list[int] = []
        ours: list[int] = []
        try:
            for stream in range(3):
                read_end, write_end = os.pipe2(os.O_CLOEXEC)
                theirs.append(read_end if stream == 0 else write_end)
                ours.append(write_end if stream == 0 else read_end)
            self._runner = _ReportingRunner(self._on_runner, commands.oom_score_fd)
            commands.adopt(self._runner)
            self._hand_over(ProgramStart((program, *argv[1:]), order.env, (theirs[0], theirs[1], theirs[2])), order)
        except OSError:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        for descriptor in ours:
            os.set_blocking(descriptor, False)
        self._stdin, self._stdout, self._stderr = ours
        self._loop.add_reader(self._stderr, self._read_stderr)

    def _hand_over(self, program: ProgramStart, order: Order) -> None:
        try:
            self._runner.start(program, order.directory)
        except OSError as error:
            self.failure, self._clean = error.errno or errno.EIO, True
            self._commands.disown(self._runner)
            raise

    # state

    @property
    def ending(self) -> bool:
        return self.wanted or self._killing or self.over.done()

    @property
    def connected(self) -> bool:
        return self._reader is not None

    def _end(self, **more: object) -> bytes:
        code, name = exit_of(self.status)
        body: dict[str, Any] = {"incarnation": self.incarnation, "exit_code": code, "signal": name}
        return frame(END, json.dumps({**body, "reason": self.reason, "taken_over": False, **more}).encode())

    # messages

    def messages(self) -> AsyncIterator[bytes | memoryview]:
        """Return the messages as frames, unread ones first. An earlier reader gets no more."""
        reader = self._reader = _MessageReader()
        self._wake()
        return self._messages(reader)

    async def _messages(self, reader: _MessageReader) -> AsyncIterator[bytes | memoryview]:
        reader.begun = True
        try:
            yield frame(OPENED, json.dumps({"incarnation": self.incarnation, "pid": self.pid}).encode())
            while self._reader is reader:
                message = self._lines.take()
                if message is not None:
                    yield MESSAGE.to_bytes(1, "big") + len(message).to_bytes(4, "big") + message[:FRAME]
                    for start in range(FRAME, len(message), FRAME):
                        yield memoryview(message)[start : start + FRAME]
                    self._count()
                elif self._lines.broken is not None or self._stdout < 0:
                    break
                elif self._read_stdout():
                    await asyncio.sleep(0)  # others have a turn, however much comes
                elif self.over.done():
                    break
                else:
                    await self._changed()
            while self._reader is reader and not self.over.done():
                await self._changed()
            if self._reader is reader:
                yield self._end()
            else:
                yield self._end(reason="another connection took over", taken_over=True)
        finally:
            if self._reader is reader:
                self._reader = None
                self._release()

    def _read_stdout(self) -> bool:
        """Read a part of the output; return False when there is nothing to read yet."""
        data = read_some(self._stdout, FRAME)
        if data is None:
            return False
        if self.over.done():  # a process that is not of this tree still has the pipe open
            self._left -= len(data)
            data = data if self._left > 0 else b""
        if data:
            self._lines.feed(data)
        else:
            self._close_stdout()
        for other in self._lines.others:
            self._log.say(b"stdout: " + other)
        self._lines.others.clear()
        self._count()
        if self._room.left < 0 and self._lines.held > FRAME:
            self._lines.give_up(NO_ROOM)
            self._count()
        if self._lines.broken is not None:
            self.end(self._lines.broken)
        elif not data and not self.ending and self.status is None:
            self._at(CLOSED_S, self.end, CLOSED_OUTPUT)
        return True

    def _count(self) -> None:
        self._room.left -= self._lines.held - self._counted
        self._counted = self._lines.held

    def _close_stdout(self) -> None:
        if self._stdout >= 0:
            self._loop.remove_reader(self._stdout)
            os.close(self._stdout)
            self._stdout = -1
            self._lines.finish()

    async def _changed(self) -> None:
        """Wait for output, for the end, or for another reader."""
        if self._stdout >= 0 and not self.over.done():
            self._loop.add_reader(self._stdout, self._wake)
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(future)
        await future

    def _wake(self) -> None:
        if self._stdout >= 0:
            self._loop.remove_reader(self._stdout)
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    # input

    async def send(self, line: bytes, deadline_s: float) -> None:
        """Write one line. It is written completely or the process is ended, even if the caller goes away."""
        if self._fed + len(line) > 2 * MOST_LINE:
            why = f"MCP server '{self.name}' {DEAF}: too much waits for it already"
            raise LimitExceeded(why, field="stdin", hint="wait, or stop it")
        task = self._loop.create_task(self._send(line, deadline_s))
        self._writers.add(task)
        self._fed += len(line)
        task.add_done_callback(partial(self._sent, len(line)))
        await asyncio.shield(task)

    def _sent(self, size: int, task: asyncio.Task[None]) -> None:
        self._writers.discard(task)
        self._fed -= size
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller may be gone

    async def _send(self, line: bytes, deadline_s: float) -> None:
        view = memoryview(line)
        try:
            async with asyncio.timeout(deadline_s), self._writing:
                while view:
                    if self._stdin < 0:
                        raise NotRunning(f"MCP server '{self.name}' has ended", field="incarnation")
                    try:
                        view = view[os.write(self._stdin, view) :]
                    except BlockingIOError:
                        await self._can_write()
        except TimeoutError:
            if len(view) < len(line):
                self.end(DEAF)
            why = f"MCP server '{self.name}' {DEAF}: it had {deadline_s:g} s for a line"
            raise McpServerFailed(why, field="stdin", hint="wait, or stop it") from None
        except OSError:
            self.end(CLOSED_INPUT)
            why = f"MCP server '{self.name}' has {CLOSED_INPUT}"
            raise McpServerFailed(why, field="stdin", hint="connect again to restart it") from None

    async def _can_write(self) -> None:
        self._writable = self._loop.create_future()
        self._loop.add_writer(self._stdin, self._now_writable)
        await self._writable

    def _now_writable(self) -> None:
        if self._stdin >= 0:
            self._loop.remove_writer(self._stdin)
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def _close_stdin(self) -> None:
        self._now_writable()
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    # the log

    def _read_stderr(self) -> int:
        data = read_some(self._stderr, READ_SIZE)
        if data is None:
            return 0
        if data:
            self._log.add(data)
        else:
            self._close_stderr()
        return len(data)

    def _close_stderr(self) -> None:
        if self._stderr >= 0:
            self._loop.remove_reader(self._stderr)
            os.close(self._stderr)
            self._stderr = -1

    # ending

    def stop(self, reason: str) -> None:
        """End the process gently: close its input, then send SIGTERM, then kill. `over` is set when it has ended."""
        if not self.ending:
            self.wanted, self.reason = True, reason
            self._close_stdin()
            self._at(POLITE_S, self._terminate)

    def _terminate(self) -> None:
        signal_below(self._runner.pid, signal.SIGTERM)
        self._at(TERM_S, self._kill)

    def end(self, reason: str) -> None:
        """Kill the process tree now."""
        if not self.ending and self.status is None:
            self.reason = reason
            self._kill()

    def _kill(self) -> None:
        if not self._killing:
            self._killing = True
            self._kill_more(Backoff(0.001, 0.05), time.monotonic() + STUCK_S)

    def _kill_more(self, backoff: Backoff, until: float) -> None:
        if self.over.done():
            return
        now = time.monotonic()
        if kill_below(self._runner.pid):
            until = now + STUCK_S
        elif now > until:  # nothing is left, but the reaper does not report that: a process has stopped it
            self._commands.disown(self._runner)
            return
        self._at(backoff.next_pause(), self._kill_more, backoff, until)

    def _at(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if self.over.done() else self._loop.call_later(seconds, call, *args)

    def _on_runner(self, runner: Reaper, event: str, value: int) -> None:
        if event == "started":
            self.pid = value
            self._log.say(f"carrel: started, process {value}, incarnation {self.incarnation}".encode())
            self._begin()
        elif event == "failed":
            self.failure = value
            self._begin()
        elif event == "ended":
            self.status = value
            self._kill()
        elif event == "clean":
            self._clean = True
            self._commands.disown(runner)
        elif event == "dead":
            self._commands.disown(runner)
        elif event == "gone":
            if not self._clean:
                self.status = signal.SIGKILL if self.status is None else self.status
                self._commands.sweep(runner)
            self._finish()

    def _begin(self) -> None:
        if not self.begun.done():
            self.begun.set_result(None)

    def _finish(self) -> None:
        left = LAST_DRAIN
        while self._stderr >= 0 and left > 0 and (got := self._read_stderr()) > 0:
            left -= got
        self._close_stderr()
        self._close_stdin()
        self.over.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        self._begin()
        self._wake()
        self._on_over(self)
        if self._reader is None:
            self._release()

    def abandon(self) -> None:
        """Release a process that is over. A reader that has begun may finish; one that has not begun never will."""
        if self._reader is None or not self._reader.begun:
            self._reader = None
            self._release()

    def _release(self) -> None:
        """Free the memory once the process is over and nobody reads."""
        if self.over.done():
            self._close_stdout()
            self._lines = MessageLines()
            self._count()
