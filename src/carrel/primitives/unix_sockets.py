"""Connecting to a Unix socket on an event loop."""

from __future__ import annotations

import asyncio
import os
import socket

LONGEST_ADDRESS = 107
_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5


def short(path: str) -> str:
    """Return a path that fits into the address of a Unix socket: a longer one is given relative to the working
    directory.
    """
    if len(os.fsencode(path)) <= LONGEST_ADDRESS:
        return path
    return min(path, os.path.relpath(path), key=len)


async def connect(path: str, patience_s: float, *, absent: bool = False) -> socket.socket:
    """Return a connection. A full queue of the listener is waited for, with `absent` also a listener. Raises `OSError`,
    among them `TimeoutError`. The loop's own `sock_connect` takes a full queue for a connection that is being made.
    """
    waits = (BlockingIOError, ConnectionRefusedError, FileNotFoundError) if absent else (BlockingIOError,)
    pause = _PAUSE_S
    async with asyncio.timeout(patience_s):
        while True:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            try:
                found.connect(path)
                return found
            except waits:
                found.close()
            except BaseException:
                found.close()
                raise
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, pause * 2)
