"""One command: the request and its state. Knows nothing about how processes are started or found."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

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

    def info(self) -> dict[str, Any]:
        code, name = exit_of(self.status)
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
