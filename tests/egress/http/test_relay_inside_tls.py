"""Requests inside opened tunnels: real clients, the real gateway, real TLS servers. No credential comes back."""

from __future__ import annotations

import asyncio
import logging
import ssl
import tempfile
from collections.abc import Sequence

import httpx
import pytest
import websockets
from tests.support.inspected import (
    CREDENTIAL,
    PUBLIC,
    SECRET,
    Seen,
    Site,
    plan,
    running,
    said,
    setting,
    spoken,
    way_out,
)

from carrel.egress.plan import Injected

# who may be asked


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: other.test:PORT\r\n\r\n", 421),
        (b"GET https://other.test:PORT/ HTTP/1.1\r\nHost: api.test\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: api.test:1\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: api.test:PORT\r\nHost: other.test\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: api.test@other.test:PORT\r\n\r\n", 400),
        (b"GET http://api.test:PORT/ HTTP/1.1\r\nHost: api.test\r\n\r\n", 400),
        (b"GET /#x HTTP/1.1\r\nHost: api.test:PORT\r\n\r\n", 400),
        (b"GET x HTTP/1.1\r\nHost: api.test:PORT\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: \r\n\r\n", 400),
        (b"CONNECT api.test:PORT HTTP/1.1\r\nHost: api.test\r\n\r\n", 400),
        (b"TRACE / HTTP/1.1\r\nHost: api.test:PORT\r\n\r\n", 501),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: api.test:PORT\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: api.test:PORT\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"GET / HTTP/1.1\nHost: api.test:PORT\n\n\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: api.test:PORT\r\nX: a\r\n b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: api.test:PORT\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: api.test:PORT\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 403),
    ],
)  # fmt: skip
async def test_what_does_not_reach_the_server(request_: bytes, status: int) -> None:
    async with setting() as (site, proxy):
        async with proxy.raw(site) as (reader, writer):
            writer.write(request_.replace(b"PORT", b"%d" % site.port))
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
        (access,) = proxy.report.requests
        assert access.result != "ok"
        assert access.verdict.verdict == "deny"
    assert not site.seen


async def test_a_bad_body_is_refused_and_nothing_after_it_is_a_request() -> None:
    async with setting() as (site, proxy), proxy.raw(site) as (reader, writer):
        writer.write(
            b"POST / HTTP/1.1\r\nHost: api.test:%d\r\nTransfer-Encoding: chunked\r\n\r\n1\nx\r\n0\r\n\r\n" % site.port
        )
        writer.write(b"GET /smuggled HTTP/1.1\r\nHost: api.test:%d\r\n\r\n" % site.port)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    assert not site.seen


async def test_requests_come_one_after_the_other_over_one_connection() -> None:
    async with setting(injected=[]) as (site, proxy), proxy.raw(site) as (reader, writer):
        one = b"GET /%d HTTP/1.1\r\nHost: api.test:" + b"%d\r\n\r\n" % site.port
        writer.write(b"".join(one % number for number in range(5)))  # at once
        for _ in range(5):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(size)
        writer.write(
            b"GET https://api.test:%d?q HTTP/1.1\r\nHost: api.test:%d\r\nConnection: close\r\n\r\n"
            % (site.port, site.port)
        )
        assert b"HTTP/1.1 200 OK" in await reader.read()
        assert site.connections == 1
    assert [seen.request.target for seen in site.seen] == ["/0", "/1", "/2", "/3", "/4", "/?q"]
    assert [access.path for access in proxy.report.requests] == ["/0", "/1", "/2", "/3", "/4", "/"]


async def test_head_and_answers_without_a_body() -> None:
    def bodiless(seen: Seen) -> Sequence[bytes]:
        if seen.request.method == "HEAD":
            return [b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n"]
        return [b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n"]

    for injected in ([], [CREDENTIAL]):
        async with setting(bodiless, injected=injected) as (site, proxy), proxy.client() as client:
            for _ in range(2):
                head = await client.head(f"https://api.test:{site.port}/")
                assert head.headers.get("content-length") == (None if injected else "1234")
                assert (await client.get(f"https://api.test:{site.port}/")).status_code == 304
            assert site.connections == 1


@pytest.mark.parametrize(
    "reply",
    [
        [None],
        [b"nonsense\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
        [b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"],
        [b"HTTP/1.1 103 Early Hints\r\n\r\n" * 20],
        [b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000],
    ],
    ids=["nothing", "nonsense", "lengths", "both", "switch", "interim", "long"],
)
async def test_a_server_that_makes_no_sense(reply: Sequence[bytes | None]) -> None:
    async with setting(lambda _seen: reply) as (site, proxy), proxy.client() as client:
        answer = await client.get(f"https://api.test:{site.port}/")
        assert answer.status_code == 502
        assert answer.json()["operation"] == "network"
        assert proxy.report.requests[0].result in ("bad_response", "unreachable")


@pytest.mark.parametrize(
    "reply",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", None],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", None],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcX\r\n"],
    ],
)
async def test_an_answer_that_is_cut_is_seen_to_be_cut(reply: Sequence[bytes | None]) -> None:
    async with setting(lambda _seen: reply) as (site, proxy), proxy.client() as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"https://api.test:{site.port}/")


async def test_an_early_answer_ends_the_connection() -> None:
    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await reader.read()

    async with running(Site(handler=early)) as site, way_out(plan(site)) as proxy, proxy.raw(site) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: api.test:%d\r\nContent-Length: 9\r\n\r\nabc" % site.port)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 413 Too Large\r\n")
        assert b"connection: close" in answer.lower()


async def test_a_client_that_does_not_read_does_not_fill_the_memory() -> None:
    written = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 40))
        while True:
            writer.write(bytes(65536))
            await writer.drain()
            written += 65536

    async with running(Site(handler=endless)) as site, way_out(plan(site)) as proxy, proxy.raw(site) as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: api.test:%d\r\n\r\n" % site.port)
        before = -1
        while before != written or not written:
            before = written
            await asyncio.sleep(0.3)
        assert written < 64 << 20


async def test_bytes_are_limited() -> None:
    async with (
        setting(lambda _seen: said(bytes(3 << 20)), max_download_mb=1) as (site, proxy),
        proxy.client() as client,
    ):
        with pytest.raises(httpx.TransportError):
            await client.get(f"https://api.test:{site.port}/")
        assert proxy.report.requests[0].result == "limit_exceeded"
    async with setting(max_upload_mb=1) as (site, proxy):
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(3 << 20))
            file.flush()
            _, output = await proxy.curl(f"https://api.test:{site.port}/", "-T", file.name)
        assert b"HTTP/1.1 429" in output
        assert not site.seen


# WebSockets


async def test_websockets_pass_where_no_credential_is_put_in() -> None:
    one = Injected("api.test", "Authorization", f"Bearer {SECRET}", SECRET, "API_KEY", None, ("/v1",))

    async def talk(connection: websockets.ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    site = Site()
    server = await websockets.serve(talk, "127.0.0.2", 0, ssl=PUBLIC.context("api.test"))
    site.port = server.sockets[0].getsockname()[1]
    try:
        async with way_out(plan(site, [one])) as proxy:
            context = ssl.create_default_context(cafile=proxy.roots)
            url = f"wss://api.test:{site.port}"
            async with websockets.connect(f"{url}/chat", ssl=context, proxy=proxy.url) as connection:
                for message in ("hello", "x" * 300_000, SECRET[:1]):
                    await connection.send(message)
                    assert await connection.recv() == message
                await connection.send(f"<{SECRET}>")  # as a server that knows it would
                with pytest.raises(websockets.ConnectionClosed):
                    while not spoken(str(await asyncio.wait_for(connection.recv(), 5)).encode()):
                        await connection.send("more" * 100)
            with pytest.raises(websockets.InvalidStatus, match="403"):
                await websockets.connect(f"{url}/v1/chat", ssl=context, proxy=proxy.url)
            assert [each.result for each in proxy.report.requests][1:] == ["denied_by_policy"]
    finally:
        server.close()
        await server.wait_closed()


# nothing is told


async def test_a_failure_of_ours_tells_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> bytes:
        raise RuntimeError(repr(given))

    monkeypatch.setattr("carrel.egress.http.relay.write_request", fail)
    with caplog.at_level(logging.DEBUG):
        async with setting() as (site, proxy), proxy.client() as client:
            answer = await client.get(f"https://api.test:{site.port}/")
            assert (answer.status_code, answer.json()["code"]) == (500, "platform_error")
            assert proxy.report.requests[0].result == "platform_error"
    assert "RuntimeError" in caplog.text
    assert not spoken(caplog.text.encode() + answer.content)
