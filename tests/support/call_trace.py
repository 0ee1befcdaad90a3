"""Records which functions of carrel a process calls, in order, with `sys.setprofile`.

`CallTrace` records this process. A copy of this file named `sitecustomize.py` in a folder of PYTHONPATH records every
Python process that is started with that path, and its forks: each writes to a memory-mapped file of that folder, because
a sandbox can open no file of the host. They record while the first byte of their file is 1.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

_SLOT, _SLOTS = 192, 30_000


@dataclass(frozen=True, order=True)
class Call:
    """A call, or the continuation of a coroutine, at a time of the machine's monotonic clock."""

    at: int
    module: str
    function: str
    process: int


def _called(frame: FrameType) -> tuple[str, str] | None:
    """The module and the qualified name of a function, if it is one of carrel."""
    spec = frame.f_globals.get("__spec__")
    module = getattr(spec, "name", "")
    return (module, frame.f_code.co_qualname) if module.startswith("carrel.") else None


class CallTrace:
    """The calls of this thread while the block lasts."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __enter__(self) -> CallTrace:
        sys.setprofile(self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and (called := _called(frame)) is not None:
            self.calls.append(Call(time.monotonic_ns(), *called, os.getpid()))


def record_this_process(folder: str) -> None:
    """Record this process from now on, and any fork of it that is the first process of a sandbox."""
    me = os.getpid()
    with open(os.path.join(folder, f"{me}.calls"), "w+b") as file:
        file.truncate(_SLOT * _SLOTS)
        shared = mmap.mmap(file.fileno(), _SLOT * _SLOTS)
    slots = itertools.count(1)

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or not shared[0] or os.getpid() not in {me, 1}:
            return
        if (called := _called(frame)) is not None:
            line = f"{time.monotonic_ns()} {' '.join(called)} {os.getpid()}\n".encode()
            start = next(slots) * _SLOT
            shared[start : start + len(line)] = line

    threading.setprofile(note)
    sys.setprofile(note)


def switch(folder: Path, *, on: bool) -> None:
    """Let every recorded process begin or end to record."""
    for path in folder.glob("*.calls"):
        with path.open("r+b") as file:
            file.write(b"\1" if on else b"\0")


def recorded(folder: Path) -> list[Call]:
    """The calls of all recorded processes, in the order of time."""
    calls = []
    for path in folder.glob("*.calls"):
        content = path.read_bytes()
        for start in range(_SLOT, len(content), _SLOT):
            if line := content[start : start + _SLOT].partition(b"\n")[0].rstrip(b"\0"):
                at, module, function, process = line.decode().split()
                calls.append(Call(int(at), module, function, int(process)))
    return sorted(calls)


if __name__ == "sitecustomize":
    record_this_process(os.path.dirname(__file__))
