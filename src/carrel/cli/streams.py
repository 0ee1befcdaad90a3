"""Connects the standard streams of this process to a command in a sandbox: bytes pass live and unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from carrel.cli.failures import TIMED_OUT, note
from carrel.errors import CarrelError, InvalidRequest, NotFound, NotRunning, SandboxLost

if TYPE_CHECKING:
    from carrel.client import AsyncCommand, AsyncSandbox
    from carrel.local import LocalCommand, LocalSandbox
    from carrel.models import CommandInfo


def write_out(stream: str, data: bytes) -> None:
    """Write to `stdout` or `stderr` and flush."""
    target = sys.stderr.buffer if stream == "stderr" else sys.stdout.buffer
    target.write(data)
    target.flush()


async def standard_input() -> AsyncIterator[bytes]:
    """Yield standard input as it arrives. A daemon thread reads, so an input that stays open does not block exit."""
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


async def run_attached(
    box: AsyncSandbox | LocalSandbox,
    command: str | list[str],
    *,
    cwd: str | None,
    env: dict[str, str],
    timeout: float | None,
    interactive: bool = False,
    tty: bool = False,
    json: bool = False,
) -> int:
    """Run a command with the standard streams of this process; return its exit code.

    With `tty` the command has a terminal and receives every key. Piped input is always passed on, input from a
    terminal only with `interactive`.
    """
    from carrel.models import MAX_OUTPUT_BYTES

    if tty and json:
        raise InvalidRequest("--json and -t exclude each other", field="--json", hint="leave out one of them")
    at_terminal = not sys.stdin.closed and sys.stdin.isatty()
    if tty and not at_terminal:
        raise InvalidRequest(
            "-t needs a terminal, but standard input is not one", field="--tty", hint="leave out -t (--tty)"
        )
    rows, columns = terminal_size()
    fed = interactive or tty or (not sys.stdin.closed and not at_terminal)
    handle = await box.commands.start(
        command,
        cwd=cwd,
        env=env,
        timeout="default" if timeout is None else timeout,
        output_limit=MAX_OUTPUT_BYTES,
        interactive=fed,
        terminal=(rows, columns) if tty else None,
    )
    if not tty:
        return await follow(handle, fed=fed, json=json)
    with raw_mode(), following_size(handle.resize):
        return await follow(handle, fed=True)


async def follow(handle: AsyncCommand | LocalCommand, *, fed: bool = False, json: bool = False) -> int:
    """Print the output of a command until it ends, pass on input and Ctrl-C; return its exit code.

    With `json` one object with output and exit status is printed at the end.
    """
    written = {"stdout": bytearray(), "stderr": bytearray()}
    feeding = asyncio.ensure_future(_feed(handle)) if fed else None
    try:
        with _interrupting(handle):
            stream = handle.stream()
            async for chunk in stream:
                if json:
                    written[chunk.stream] += chunk.data
                else:
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
    if json:
        from carrel.cli.printing import print_json

        texts = {name: data.decode(errors="replace") for name, data in written.items()}
        print_json({**texts, **stream.info.model_dump(mode="json")})
    return exit_code(stream.info)


@contextlib.contextmanager
def _interrupting(handle: AsyncCommand | LocalCommand) -> Iterator[None]:
    """Let the first Ctrl-C interrupt the command, the second kill it, the third end this process."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    pressed = 0
    sending: set[asyncio.Task[None]] = set()

    async def send(number: int) -> None:
        with contextlib.suppress(NotRunning, NotFound):
            await (handle.signal("INT") if number == 1 else handle.kill())

    def interrupt() -> None:
        nonlocal pressed
        pressed += 1
        if pressed > 2 and task is not None:
            task.cancel()
            return
        if pressed == 1 and sys.stderr.isatty():
            note("carrel: interrupted; Ctrl-C again kills the command")
        sent = loop.create_task(send(pressed))
        sending.add(sent)
        sent.add_done_callback(sending.discard)

    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    except asyncio.CancelledError:
        if pressed > 2:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
        for each in sending:
            each.cancel()


@contextlib.contextmanager
def raw_mode() -> Iterator[None]:
    """Send every key to the sandbox, Ctrl-C included. The terminal is restored afterwards in any case."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        # TCSADRAIN keeps keys that were typed ahead: they are for the shell.
        tty.setraw(descriptor, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def terminal_size() -> tuple[int, int]:
    """Return rows and columns of this terminal. The device is asked first: `LINES` and `COLUMNS` may be outdated."""
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        columns, rows = shutil.get_terminal_size()
    return max(rows, 1), max(columns, 1)


@contextlib.contextmanager
def following_size(resize: Callable[[int, int], Awaitable[None]]) -> Iterator[None]:
    """Call `resize` with rows and columns whenever this terminal is resized."""
    if not sys.stdout.isatty():
        yield
        return
    loop = asyncio.get_running_loop()
    pending: set[asyncio.Task[None]] = set()

    async def follow() -> None:
        with contextlib.suppress(NotRunning, NotFound):
            await resize(*terminal_size())

    def changed() -> None:
        task = loop.create_task(follow())
        pending.add(task)
        task.add_done_callback(pending.discard)

    loop.add_signal_handler(signal.SIGWINCH, changed)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        for task in pending:
            task.cancel()


async def _feed(handle: AsyncCommand | LocalCommand) -> None:
    # A command may end, or close its input, before it has read all of it.
    with contextlib.suppress(NotRunning, NotFound):
        async for data in standard_input():
            await handle.send_input(data)
        await handle.close_input()


def exit_code(info: CommandInfo) -> int:
    """Return the exit code that a shell would show, 124 on a timeout. Limits that were hit are noted on stderr."""
    if info.dropped_bytes:
        note(f"carrel: {info.dropped_bytes} bytes of output were over the limit and dropped")
    if info.timed_out:
        note("carrel: the command timed out and was killed with everything it started")
        return TIMED_OUT
    if info.oom_killed:
        note("carrel: a process was killed because the sandbox was out of memory")
    if info.exit_code is not None:
        return info.exit_code
    return signal_code(info.signal)


def signal_code(name: str | None) -> int:
    """Return the exit code that a shell would show for a signal."""
    return 128 + signal_number(name)


def signal_number(name: str | None) -> int:
    """Return the number of a signal named `SIGTERM`, `TERM` or `15`; 0 if it is unknown."""
    text = (name or "").upper()
    if text.isdecimal():
        return int(text) if int(text) < 128 else 0
    found = signal.Signals.__members__.get(text if text.startswith("SIG") else f"SIG{text}")
    return 0 if found is None else int(found)
