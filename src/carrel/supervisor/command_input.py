"""Input for a running command: bytes for its standard input or its terminal, and the size of the terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios
from contextlib import suppress

from carrel.errors import InvalidRequest, NotRunning
from carrel.supervisor.command import SupervisedCommand

_END_OF_FILE = b"\x04"
"""The key Ctrl-D."""


async def send(command: SupervisedCommand, data: bytes) -> None:
    """Write to standard input or to the terminal, and wait while the program does not read."""
    descriptor = command.terminal_fd if command.order.terminal else command.stdin_fd
    if not command.running:
        raise NotRunning(f"command {command.id} has ended")
    if descriptor < 0:
        raise NotRunning(
            f"standard input of command {command.id} is closed",
            hint="start it with interactive=true to send it input",
        )
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            await _writable(command, descriptor)
            if descriptor not in {command.terminal_fd, command.stdin_fd} or not command.running:
                raise NotRunning(f"command {command.id} ended before it read all of its input") from None
        except OSError:
            raise NotRunning(f"command {command.id} no longer reads its input") from None


async def type_all(command: SupervisedCommand, data: bytes) -> None:
    """Type something into the terminal of a command, and then its end."""
    whole_lines = not data or data.endswith(b"\n")  # within a line, the first end only passes the line on
    async with command.input_lock:
        with suppress(NotRunning):  # it ended before it had read everything, as with a pipe
            await send(command, data + _END_OF_FILE * (1 if whole_lines else 2))


async def _writable(command: SupervisedCommand, descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await asyncio.wait({ready, command.finished}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if descriptor in {command.terminal_fd, command.stdin_fd}:
            loop.remove_writer(descriptor)


def close_stdin(command: SupervisedCommand, loop: asyncio.AbstractEventLoop) -> None:
    """Close standard input, so that the program sees its end."""
    if command.stdin_fd >= 0:
        loop.remove_writer(command.stdin_fd)  # the number of the descriptor may be used again soon
        os.close(command.stdin_fd)
        command.stdin_fd = -1


def resize(command: SupervisedCommand, rows: int, cols: int) -> None:
    """Set the size of a terminal. The programs in it get SIGWINCH."""
    if command.order.terminal is None:
        raise InvalidRequest(f"command {command.id} has no terminal", field="terminal")
    if command.terminal_fd < 0:
        raise NotRunning(f"terminal {command.id} has ended")
    fcntl.ioctl(command.terminal_fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
