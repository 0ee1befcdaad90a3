"""One cell of a code context: its code, output, results and end.

Messages of the context are hostile input: only values of the right form are taken. Knows nothing about processes.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from carrel.errors import CarrelError
from carrel.supervisor.command import exit_of
from carrel.supervisor.output import CommandOutput


@dataclass(eq=False)
class Cell:
    """A cell, from the request until it is forgotten."""

    id: str
    code: str
    figures: list[str]
    timeout: float | None
    output: CommandOutput
    finished: asyncio.Future[None]
    number: int = 0
    pid: int | None = None
    fresh: bool = False
    asked_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    began: float | None = None
    ended: float | None = None
    status: str = "ok"
    error: dict[str, Any] | None = None
    results: list[dict[str, Any]] = field(default_factory=list)
    results_size: int = 0
    results_dropped: int = 0
    wait_status: int | None = None
    timed_out: bool = False
    refusal: CarrelError | None = None

    @property
    def running(self) -> bool:
        """Whether it waits or runs."""
        return self.ended is None

    def duration_ms(self) -> float:
        """Return the milliseconds that it has run."""
        return 0.0 if self.began is None else round(((self.ended or time.monotonic()) - self.began) * 1000, 3)

    def info(self) -> dict[str, Any]:
        """Return the info object of a command, for clients that follow the output."""
        code, name = exit_of(self.wait_status)
        if not self.running and self.wait_status is None:
            code = 0 if self.status == "ok" else 1
        return {
            "id": self.id,
            "command": ["python3", self.code[:4096]],
            "running": self.running,
            "pid": self.pid,
            "terminal": False,
            "started_at": self.asked_at.isoformat(),
            "duration_ms": self.duration_ms(),
            "exit_code": code,
            "signal": name,
            "timed_out": self.timed_out,
            "output_bytes": len(self.output),
            "dropped_bytes": self.output.dropped,
        }

    def result(self, context: str) -> dict[str, Any]:
        code, name = exit_of(self.wait_status)
        stdout, stderr = (data.decode(errors="replace") for data in self.output.whole())
        dropped = self.output.dropped + self.results_dropped
        return {
            "id": self.id,
            "context": context,
            "number": self.number,
            "status": self.status,
            "stdout": stdout,
            "stderr": stderr,
            "results": self.results,
            "error": self.error,
            "exit_code": code,
            "signal": name,
            "timed_out": self.timed_out,
            "fresh": self.fresh,
            "duration_ms": self.duration_ms(),
            "truncated": dropped > 0,
            "dropped_bytes": dropped,
        }

    def take(self, message: bytes, size: int) -> None:
        """Take the message of the context about this cell, as far as it has the right form."""
        try:
            parsed = json.loads(message)
            status, error, dropped = str(parsed["status"]), parsed["error"], int(parsed["dropped"])
            results = [
                {"kind": _text(each["kind"]), "data": {_text(key): _text(form) for key, form in each["data"].items()}}
                for each in parsed["results"]
            ]
            fault = None if error is None else {key: _text(error[key]) for key in ("name", "value", "traceback")}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.status, self.results_dropped = "error", size
            return
        self.status = status if status in {"ok", "error", "interrupted"} else "error"
        self.results, self.error, self.results_size, self.results_dropped = results, fault, size, dropped

    def end(self) -> None:
        """Mark the end, and wake everyone who waits for it."""
        self.ended = time.monotonic()
        self.output.end()
        if not self.finished.done():
            self.finished.set_result(None)


def _text(value: object) -> str:
    return str(value).encode(errors="replace").decode()
