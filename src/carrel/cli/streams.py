"""Carries bytes between a command in a sandbox and this process's own descriptors, live and unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from carrel.cli.failures import TIMED_OUT, note
from carrel.errors import CarrelError, NotFound, NotRunning, SandboxLost

if TYPE_CHECKING:
    from carrel.client import AsyncCommand, AsyncSandbox
    from carrel.models import CommandInfo


def write_out(stream: str, data: bytes) -> None:
    """Write to the descriptor of that name at once."""
    target = sys.stderr.buffer if stream == "stderr" else sys.stdout.buffer
    target.write(data)
    target.flush()


async def standard_input() -> AsyncIterator[bytes]:
    """What arrives at standard input.

    A daemon thread reads, so that an input nobody closes cannot hold up the end.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes] = asyncio.Queue()
    room = threading.Semaphore(4)

    def read() -> None:
        while room.acquire():
            try:
                data = os.read(sys.stdin.fileno(), 65536)
            except (OSError, ValueError):
                data = b""
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, data)
            except RuntimeError:
                return
            if not data:
                return

    threading.Thread(target=read, name="standard-input", daemon=True).start()
    while data := await arrived.get():
        room.release()
        yield data


async def attended(
    box: AsyncSandbox,
    command: str | list[str],
    *,
    cwd: str | None,
    env: dict[str, str],
    timeout: float | None,
) -> int:
    """Run a command with this process's input and output as its own; gives the exit code."""
    from carrel.models import MAX_OUTPUT_BYTES

    piped = not sys.stdin.closed and not sys.stdin.isatty()
    handle = await box.commands.start(
        command,
        cwd=cwd,
        env=env,
        timeout="default" if timeout is None else timeout,
        output_limit=MAX_OUTPUT_BYTES,
        interactive=piped,
    )
    feeding = asyncio.ensure_future(_feed(handle)) if piped else None
    try:
        stream = handle.stream()
        async for chunk in stream:
            await asyncio.to_thread(write_out, chunk.stream, chunk.data)
    except BaseException:
        with contextlib.suppress(CarrelError):
            await handle.kill()
        raise
    finally:
        if feeding is not None:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
    if stream.info is None:
        raise SandboxLost("the server did not say how the command ended")
    return exit_code(stream.info)


async def _feed(handle: AsyncCommand) -> None:
    # A command may end, or close its input, before it has read all of it.
    with contextlib.suppress(NotRunning, NotFound):
        async for data in standard_input():
            await handle.send_input(data)
        await handle.close_input()


def exit_code(info: CommandInfo) -> int:
    """The exit code a shell would show; 124 at a deadline. What a program cannot tell is said on stderr."""
    if info.dropped_bytes:
        note(f"carrel: {info.dropped_bytes} bytes of output were over the limit and dropped")
    if info.timed_out:
        note("carrel: the deadline was reached and everything the command started was killed")
        return TIMED_OUT
    if info.oom_killed:
        note("carrel: a process was killed because the sandbox was out of memory")
    if info.exit_code is not None:
        return info.exit_code
    return 128 + signal_number(info.signal)


def signal_number(name: str | None) -> int:
    """The number of a signal named `SIGTERM`, `TERM` or `15`; 0 when it is unknown."""
    text = (name or "").upper()
    if text.isdecimal():
        return int(text) if int(text) < 128 else 0
    found = signal.Signals.__members__.get(text if text.startswith("SIG") else f"SIG{text}")
    return 0 if found is None else int(found)
