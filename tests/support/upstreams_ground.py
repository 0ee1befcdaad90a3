"""What tests of upstream proxies share: an origin, a SOCKS server, and ports where nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Address, ip_address
from typing import Any
from urllib.parse import quote

from tests.support.squid import Squid

from carrel.egress.access import Access, Target
from carrel.egress.outbound.upstreams import Health
from carrel.egress.plan import Upstream

USER, PASSWORD = "ann", "pä: s/w@%rd?"
HERE = IPv4Address("127.0.0.1")


def access() -> Access:
    return Access("s1", "connect")


def target(host: str, port: int) -> Target:
    try:
        return Target(host, port, ip_address(host))
    except ValueError:
        return Target(host, port)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(handler: Handler, at: socket.socket | None = None) -> AsyncIterator[int]:
    """A server whose connections end with it, at a socket that has its port already if there is one."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await handler(reader, writer)
        writer.close()
        tasks.discard(task)

    where: dict[str, Any] = {"host": "127.0.0.1", "port": 0} if at is None else {"sock": at}
    server = await asyncio.start_server(serve, **where)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
        await asyncio.sleep(0)  # transports that were told to close do


@dataclass
class Origin:
    """Greets whoever comes, then says everything back."""

    visits: int = 0
    port: int = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visits += 1
        writer.write(b"hello")
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


@dataclass
class Socks:
    """A SOCKS5 server; `names` says where names lead, `reply` is what it answers when it is not 0."""

    user: bytes | None = None
    password: bytes = b""
    names: dict[str, str] = field(default_factory=dict)
    reply: int = 0
    asked: list[tuple[str, int]] = field(default_factory=list)
    port: int = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        version, count = await reader.readexactly(2)
        assert version == 5
        methods = await reader.readexactly(count)
        method = 0 if self.user is None else 2
        if method not in methods:
            writer.write(b"\x05\xff")
            return
        writer.write(bytes([5, method]))
        if method == 2:
            assert await reader.readexactly(1) == b"\x01"
            user = await reader.readexactly((await reader.readexactly(1))[0])
            password = await reader.readexactly((await reader.readexactly(1))[0])
            good = (user, password) == (self.user, self.password)
            writer.write(b"\x01\x00" if good else b"\x01\x01")
            if not good:
                return
        assert await reader.readexactly(3) == b"\x05\x01\x00"
        kind = (await reader.readexactly(1))[0]
        if kind == 3:
            host = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
        else:
            host = str(ip_address(await reader.readexactly(4 if kind == 1 else 16)))
        port = int.from_bytes(await reader.readexactly(2))
        self.asked.append((host, port))
        if self.reply:
            writer.write(bytes([5, self.reply, 0, 3, 3]) + b"xyz\0\0")
            return
        try:
            further, on = await asyncio.open_connection(self.names.get(host, host), port)
        except OSError:
            writer.write(b"\x05\x05\x00\x01" + bytes(6))
            return
        # The answer and the first words of the target in one piece.
        try:
            writer.write(b"\x05\x00\x00\x04" + bytes(18) + await further.read(5))
            await asyncio.gather(_pour(reader, on), _pour(further, writer))
        finally:
            on.close()


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def healthy(every_s: float = 60.0) -> AsyncIterator[Health]:
    health = Health(every_s=every_s)
    health.start()
    try:
        yield health
    finally:
        await health.close()


def through(squid: Squid, *, user: str = USER, password: str = PASSWORD, names: bool = False) -> Upstream:
    url = f"http://{quote(user, safe='')}:{quote(password, safe='')}@127.0.0.1:{squid.port}"
    return Upstream("office", url, remote_names=names)


async def talks(connection: socket.socket) -> bool:
    """Whether the origin is at the other end, with its first words not lost."""
    loop = asyncio.get_running_loop()
    with connection:
        assert not connection.getblocking()
        heard = b""
        while len(heard) < 5:
            heard += await loop.sock_recv(connection, 100)
        await loop.sock_sendall(connection, b"and back")
        while len(heard) < 13:
            heard += await loop.sock_recv(connection, 100)
    return heard == b"helloand back"


@contextlib.contextmanager
def silent_address(server: socket.socket) -> Iterator[int]:
    """A port whose queue of new connections is full: nothing is answered there."""
    with contextlib.ExitStack() as stack:
        server.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()[1]
