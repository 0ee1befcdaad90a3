"""One command: the request and its state. Knows nothing about how processes are started or found."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from carrel.errors import InvalidRequest
from carrel.supervisor.output import CommandOutput
from carrel.supervisor.reaper import Reaper


@dataclass(frozen=True)
class Order:
    """A command to run, with everything already resolved."""

    command: str | list[str]
    directory: int
    env: dict[str, str]
    timeout: float | None = None
    stdin: bytes | None = None
    interactive: bool = False
    output_limit: int = 10 * 1024 * 1024
    terminal: tuple[int, int] | None = None
    attached: bool = False
    """One caller reads the output while the command runs: it is not kept, and stops are reported, as by Ctrl-Z."""
    id: str | None = None
    heartbeat: str | None = None
    """The file in which the command says how far it is, see `Progress`."""


class Progress(NamedTuple):
    """What a command said last about its progress. `beat` changes each time that it says something."""

    text: str
    beat: int


_MOST_PROGRESS, _LONGEST_PROGRESS = 1024, 200


def read_progress(path: str) -> Progress | None:
    """Return what the file says; None if it says nothing. Only the first bytes of a regular file are read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            return None
        text = os.read(descriptor, _MOST_PROGRESS).decode(errors="replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)
    shown = "".join(c if c.isprintable() else " " for c in text).strip()[:_LONGEST_PROGRESS]
    return Progress(shown, max(0, facts.st_mtime_ns))


@dataclass(eq=False)
class SupervisedCommand:
    """A command, from its start until it is forgotten."""

    id: str
    order: Order
    output: CommandOutput
    started_at: datetime
    started: float
    finished: asyncio.Future[None]
    pid: int | None = None
    runner: Reaper | None = None
    status: int | None = None
    ended: float | None = None
    timed_out: bool = False
    killing: bool = False
    readers: dict[int, int] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)  # readers that wait until the output is read
    stdin_fd: int = -1
    terminal_fd: int = -1
    slave_fd: int = -1
    deadline: asyncio.TimerHandle | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # its first process is known, or there is none
    progress: Progress | None = None
    input_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one writer of its input at a time

    @property
    def running(self) -> bool:
        """Whether the command itself still runs; processes that it left behind do not count."""
        return self.ended is None

    async def wait(self) -> None:
        """Wait for the end. Wakes in the same turn of the loop, unlike a shielded future."""
        while self.running:
            await self.output.changed()

    def close_slave(self) -> None:
        """Close the slave side of the terminal, once the program has it."""
        if self.slave_fd >= 0:
            os.close(self.slave_fd)
            self.slave_fd = -1

    def duration_ms(self) -> float:
        """Return the milliseconds from start to end, or until now."""
        return round(((self.ended or time.monotonic()) - self.started) * 1000, 3)

    def look_at_progress(self) -> None:
        """Read what the command says about its progress."""
        if self.order.heartbeat is not None:
            self.progress = read_progress(self.order.heartbeat) or self.progress

    def end_progress(self) -> None:
        """Read it for the last time, and remove its file."""
        if self.order.heartbeat is not None:
            self.look_at_progress()
            with suppress(OSError):
                os.unlink(self.order.heartbeat)

    def info(self) -> dict[str, Any]:
        code, name = exit_of(self.status)
        if self.running:
            self.look_at_progress()
        said = {} if self.progress is None else self.progress._asdict()
        return {
            "id": self.id,
            "command": self.order.command,
            "running": self.running,
            "pid": self.pid,
            "terminal": self.order.terminal is not None,
            "started_at": self.started_at.isoformat(),
            "duration_ms": self.duration_ms(),
            "exit_code": code,
            "signal": name,
            "timed_out": self.timed_out,
            "output_bytes": len(self.output),
            "dropped_bytes": self.output.dropped,
            "progress": said.get("text"),
            "beat": said.get("beat"),
        }


def exit_of(status: int | None) -> tuple[int | None, str | None]:
    """Return the exit code or the name of the signal of a wait status; both None while there is no status."""
    if status is None:
        return None, None
    code = os.waitstatus_to_exitcode(status)
    return (code, None) if code >= 0 else (None, signal_name(-code))


_SIGNALS = {number.name: number.value for number in signal.Signals}


def signal_number(name: str) -> int:
    """Return the number of a signal: 9 for `KILL`, `sigkill` or `9`."""
    text = name.upper()
    number = _SIGNALS.get(text if text.startswith("SIG") else f"SIG{text}")
    if number is None and text.isascii() and text.isdigit() and 0 < int(text) < 65:
        number = int(text)
    if number is None:
        raise InvalidRequest(
            f"unknown signal {name[:20]!r}", field="signal", hint="use a name such as TERM, INT, KILL, HUP"
        )
    return number


def signal_name(number: int) -> str:
    """Return the name of a signal: `SIGKILL` for 9, `SIG34` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
