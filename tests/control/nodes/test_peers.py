from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.wayout import tls_for
from websockets.exceptions import WebSocketException

from carrel.control.nodes.peers import MAX_OPEN, NotConnected, Peer, TcpLink
from carrel.errors import LimitExceeded, NodeUnreachable, PlatformError
from carrel.primitives.spiffe import SpiffeId, Svid, server_context
from carrel.spiffe.authority import CertificateAuthority
from carrel.spiffe.identity import NodeIdentity, OwnSource
from carrel.store.nodes import NodeRecord


def record(url: str) -> NodeRecord:
    return NodeRecord("b", "boot", url, "machine", "key", "1", (), 0, 1, 30.0, 0.0, 0.0, 0.0)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        pass
    finally:
        writer.close()


async def ask(peer: Peer) -> bytes:
    wire = await peer.wire()
    wire.begin(100)
    try:
        assert wire.transport is not None
        wire.transport.write(b"GET / HTTP/1.1\r\nhost: %s\r\n\r\n" % peer.link.authority)
        return await wire.finish(10)
    finally:
        wire.release()


async def test_connections_are_kept_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    came = 0

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        await serve(reader, writer)

    server = await asyncio.start_server(counted, "127.0.0.1", 0)
    peer = Peer(record(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), None)
    assert [await ask(peer) for _ in range(5)] == [b"ok"] * 5
    assert came == 1
    monkeypatch.setattr("carrel.control.nodes.peers.IDLE_S", -1.0)
    await ask(peer)
    assert came == 2, "one that was idle for long is not used: the other side may just close it"
    monkeypatch.setattr("carrel.control.nodes.peers.IDLE_S", 30.0)
    monkeypatch.setattr("carrel.control.nodes.peers.MAX_OPEN", 2)
    held = [await peer.wire() for _ in range(2)]
    with pytest.raises(LimitExceeded):
        await peer.wire()
    held[0].begin(100)
    waiting = asyncio.ensure_future(held[0].finish(None))
    await asyncio.sleep(0)
    peer.close("no longer answers")
    with pytest.raises(NodeUnreachable, match="no longer answers") as caught:
        await waiting
    assert caught.value.extra["retry_after"] >= 1 and caught.value.extra["node"] == "b"  # type: ignore[operator]
    assert MAX_OPEN > 2
    server.close()
    await server.wait_closed()
    with pytest.raises(NotConnected):
        await peer.wire()


async def test_an_https_address_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, certificate = tls_for("localhost")
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(NotConnected):
        await Peer(record(url), None).wire()
    trusting = ssl.create_default_context(cadata=certificate)
    monkeypatch.setattr(ssl, "create_default_context", lambda: trusting)
    peer = Peer(record(url), None)
    assert await ask(peer) == b"ok"
    peer.close("ends")
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://[", "http://x:99999", "unix:///x"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(PlatformError):
        TcpLink.of(url, "b", None)


# servers with SPIFFE IDs

AUTHORITY = CertificateAuthority(b"k" * 32, "peers.test")
EXPECTED = SpiffeId.node("peers.test", "b")
IMPOSTORS = {
    "foreign": lambda: CertificateAuthority(b"x" * 32, "peers.test").issue(EXPECTED, 60),
    "expired": lambda: AUTHORITY.issue(EXPECTED, 60, now=time.time() - 120),
    "another server": lambda: AUTHORITY.issue(SpiffeId.node("peers.test", "c"), 60),
    "a sandbox": lambda: AUTHORITY.issue(SpiffeId.sandbox("peers.test", "b"), 60),
    "no certificate that it asks for": None,
}


def myself() -> NodeIdentity:
    me = SpiffeId.node("peers.test", "a")
    return NodeIdentity(me, OwnSource(AUTHORITY, me, 60), AUTHORITY.issue(me, 60))


@asynccontextmanager
async def listening(make: Callable[[], Svid] | None, got: list[bytes]) -> AsyncIterator[str]:
    """A TLS server that keeps whatever it is sent; the address of a node there."""

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            got.append(await reader.read(1000))
        writer.close()

    if make is None:
        context, _ = tls_for("localhost")
    else:
        context = server_context(replace(make(), bundle=AUTHORITY.bundle))
    server = await asyncio.start_server(keep, "127.0.0.1", 0, ssl=context)
    yield f"https+spiffe://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("kind", IMPOSTORS)
async def test_nothing_is_sent_to_a_server_with_another_identity(kind: str) -> None:
    got: list[bytes] = []
    async with listening(IMPOSTORS[kind], got) as url:
        peer = Peer(record(url), myself())
        with pytest.raises(NotConnected):
            await peer.wire()
        with pytest.raises((OSError, WebSocketException, EOFError)):
            await peer.websocket("/v1/terminals", [("carrel-forwarded", "a pass")], [])
    assert not b"".join(got)


async def test_the_expected_server_is_sent_requests() -> None:
    got: list[bytes] = []
    async with listening(lambda: AUTHORITY.issue(EXPECTED, 60), got) as url:
        peer = Peer(record(url), myself())
        wire = await peer.wire()
        assert wire.transport is not None
        wire.transport.write(b"hello")
        async with asyncio.timeout(20):
            while not got:
                await asyncio.sleep(0.01)
        peer.close("ends")
        with pytest.raises((OSError, WebSocketException, EOFError)):
            await peer.websocket("/v1/terminals", [("carrel-forwarded", "a pass")], [])
    assert got[0] == b"hello" and b"carrel-forwarded: a pass" in got[1]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://127.0.0.1:1", "https+spiffe://127.0.0.1"])
def test_an_address_without_identity_is_refused_where_servers_have_some(url: str) -> None:
    with pytest.raises(PlatformError):
        TcpLink.of(url, "b", myself())
    with pytest.raises(PlatformError):
        TcpLink.of("https+spiffe://127.0.0.1:1", "b", None)
