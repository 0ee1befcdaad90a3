"""Starts the processes that build the root of a sandbox and become its program, `runsc` or the keeper of a virtual
machine (see `carrel.isolation.staging` and `carrel.isolation.machine.keeper`).

An interpreter takes longer to start than such a root to build. So one process is kept ready; it knows nothing of the
sandbox that it will start. For one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable

from carrel.errors import PlatformError
from carrel.isolation import staging
from carrel.providers import own_processes

_LONGEST_ERROR = 4096


class Stagers:
    """One process that is ready, and those that are starting a sandbox."""

    def __init__(self, module: str, program: str) -> None:
        """`module` is what a process runs, `program` the name of what it becomes, for errors."""
        self._module = module
        self._program = program
        self._spare: asyncio.Task[Process] | None = None

    def prepare(self) -> None:
        """Start a process for the next sandbox, unless there is one."""
        if self._spare is None:
            self._spare = asyncio.create_task(_spawn(self._module))

    async def start(self, order: str) -> Awaitable[str]:
        """Carry out the order at this path. Returns at once; what it returns waits for the reason of a failure."""
        self.prepare()
        spare, self._spare = self._spare, None
        assert spare is not None
        try:
            process = await spare
            if process.returncode is not None:  # it was killed while it waited
                process = await _spawn(self._module)
        except OSError as error:
            raise PlatformError(f"no process can be started: {error}") from error
        assert process.stdin is not None
        process.stdin.write(os.fsencode(order) + b"\n")
        process.stdin.close()
        return _failure(process, self._program)

    async def close(self) -> None:
        """End the process that is ready."""
        if self._spare is not None:
            spare, self._spare = self._spare, None
            with contextlib.suppress(OSError):
                process = await spare
                assert process.stdin is not None
                process.stdin.close()
                await process.wait()


async def _spawn(module: str) -> Process:
    return await own_processes.start(module, stdout=DEVNULL, stderr=PIPE)


async def _failure(process: Process, program: str) -> str:
    """Wait until starting has failed; return the reason. Does not return if it succeeds."""
    assert process.stderr is not None
    words = b""
    with contextlib.suppress(asyncio.IncompleteReadError):
        while len(words) < _LONGEST_ERROR and (part := await process.stderr.read(_LONGEST_ERROR)):
            words += part
    status = await process.wait()
    if status == 0 and not words:
        await asyncio.Event().wait()
    text = words.decode(errors="replace").strip()
    who = "building the root" if status == staging.FAILED else program
    return f"{who} failed: {text[-1000:] or f'status {status}'}"
