"""Carries connections from a port of the sandbox's loopback to the Unix socket of its egress, and back.

Where the supervisor is a program of its own, the server cannot accept on the sandbox's port itself: a container, a
gVisor sandbox and a virtual machine have different networks, but all of them can show a socket of the host. Bytes are
not read here. What a client sends is hostile input, which only the proxy behind the socket judges.
"""

from __future__ import annotations

import asyncio
import socket

MOST_OPEN = 1024
"""Connections at a time; more wait in the queue of the port."""
PATIENCE_S = 30.0
"""How long a connection waits for a proxy that does not listen, because the server is being restarted."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_CHUNK = 256 * 1024


async def relay_all(listener: socket.socket, path: str) -> None:
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
        task = loop.create_task(_carry(client, path))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: room.release())


async def _carry(client: socket.socket, path: str) -> None:
    with client:
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            proxy = await _connect(path)
        except (OSError, TimeoutError):
            return  # closing the connection is the answer
        with proxy:
            copies = (_copy(client, proxy), _copy(proxy, client))
            await asyncio.gather(*copies, return_exceptions=True)


async def _connect(path: str) -> socket.socket:
    """Connect to the proxy. The server may be restarted just now: then its socket is missing or nobody listens."""
    pause = _PAUSE_S
    async with asyncio.timeout(PATIENCE_S):
        while True:
            proxy = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            try:
                proxy.connect(path)  # at once, or EAGAIN when its queue is full
                return proxy
            except (BlockingIOError, ConnectionRefusedError, FileNotFoundError):
                proxy.close()
            except BaseException:
                proxy.close()
                raise
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, pause * 2)


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
