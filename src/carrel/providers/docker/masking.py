"""Has masks applied in containers by a process of its own (see `carrel.isolation.mask_process`). For one event loop.

The process is started for the first sandbox with masks, and ends with this one: by the end of its standard input.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from contextlib import suppress

from carrel.errors import PlatformError
from carrel.isolation import mask_process, masks
from carrel.isolation.masks import Masks
from carrel.providers import control_directory, own_processes

DEADLINE_S = 60.0


class Masking:
    """The process, and the requests that it has not answered."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[str]] = {}

    async def apply(self, pid: int, started: int, wanted: Masks, path: Sequence[str] = ()) -> None:
        """Apply masks in the sandbox of a process. `path` are further directories of programs.

        Raises `PlatformError`; then some may be applied, and the sandbox has to be ended.
        """
        packed = masks.pack(wanted)
        try:
            content = masks.content(packed)
        finally:
            os.close(packed)
        number = next(self._numbers)
        request = {
            "number": number,
            "pid": pid,
            "started": started,
            "masks": base64.b64encode(content).decode(),
            "place": control_directory.SECRETS,
            "path": list(path),
        }
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            process = await self._running()
            assert process.stdin is not None
            async with asyncio.timeout(DEADLINE_S):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                await process.stdin.drain()
                reason = await answer
        except TimeoutError:
            reason = f"that took longer than {DEADLINE_S:.0f} s"
        except OSError as error:
            reason = str(error)
        finally:
            del self._answers[number]
        if reason:
            raise PlatformError(f"the masks of a sandbox cannot be applied: {reason}")

    async def _running(self) -> Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._ended()
                self._process = await own_processes.start(mask_process.__name__, stdout=PIPE, stderr=DEVNULL)
                self._reading = asyncio.create_task(self._read(self._process))
            return self._process

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            number, reason = json.loads(line)
            if (answer := self._answers.get(number)) is not None and not answer.done():
                answer.set_result(reason)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result("the process that does it has ended")

    async def _ended(self) -> None:
        if self._process is not None and self._reading is not None:
            await self._process.wait()
            await self._reading

    async def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with suppress(OSError):
                await self._ended()
            self._process = None
