"""Carries connections from a port of the sandbox's loopback to its egress, and back.

Where the supervisor is a program of its own, the server cannot accept on the sandbox's port itself: a container, a
gVisor sandbox and a virtual machine have different networks, but all of them can show a socket of the host. On another
machine there are lines instead (`carrel.supervisor.egress_lines`). Bytes are not read here. What a client sends is
hostile input, which only the proxy behind the socket judges.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine

from carrel.primitives.unix_sockets import connect

MOST_OPEN = 1024
"""Connections at a time; more wait in the queue of the port."""
PATIENCE_S = 30.0
"""How long a connection waits for a proxy that does not listen, because the server is being restarted."""
_PAUSE_S = 0.01
_CHUNK = 256 * 1024

Carry = Callable[[socket.socket], Coroutine[None, None, None]]
"""Carries a connection until it has ended. The caller closes the socket."""


async def relay_all(listener: socket.socket, carry: Carry) -> None:
    """Carry every connection to the listener, for as long as the loop runs."""
    listener.setblocking(False)
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(MOST_OPEN)
    tasks: set[asyncio.Task[None]] = set()
    while True:
        await room.acquire()
        try:
            client, _ = await loop.sock_accept(listener)
        except OSError:  # too many open files, or the client is gone already
            room.release()
            await asyncio.sleep(_PAUSE_S)
            continue
        task = loop.create_task(_carry(client, carry))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: room.release())


async def _carry(client: socket.socket, carry: Carry) -> None:
    with client:
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await carry(client)
        except (OSError, TimeoutError):
            return  # closing the connection is the answer


def to_socket(path: str) -> Carry:
    """Carry connections to a Unix socket."""

    async def carry(client: socket.socket) -> None:
        with await connect(path, PATIENCE_S, absent=True) as proxy:
            copies = (_copy(client, proxy), _copy(proxy, client))
            await asyncio.gather(*copies, return_exceptions=True)

    return carry


async def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy one direction until it ends; a failure ends the other one too."""
    loop = asyncio.get_running_loop()
    try:
        while data := await loop.sock_recv(source, _CHUNK):
            await loop.sock_sendall(target, data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
