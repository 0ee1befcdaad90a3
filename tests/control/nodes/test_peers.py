from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from tests.support.wayout import tls_for

from carrel.control.nodes.peers import MAX_OPEN, NotConnected, Peer, TcpLink
from carrel.errors import LimitExceeded, NodeUnreachable, PlatformError
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
