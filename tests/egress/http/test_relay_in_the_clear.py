"""Plain HTTP through the gateway, against servers that are honest and servers that are not."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import h11
import httpx
import pytest
import websockets
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import loops
from tests.support.wayout import CLOSED, OPEN, Wayout, plan, server, wayout

from carrel.egress.index.cache import PackageCache
from carrel.egress.index.client import IndexClient
from carrel.egress.index.front import Front

NAMES: dict[str, Sequence[str]] = {"a.test": [OPEN], "b.test": [OPEN], "bad.test": [CLOSED]}


class Site:
    """An HTTP server by h11 that remembers every request, byte for byte, and answers as told."""

    def __init__(self, answer: bytes | Callable[[h11.Request, bytes], bytes] = b"") -> None:
        self.requests: list[tuple[h11.Request, bytes]] = []
        self.raw = b""
        self.connections = 0
        self.answer = answer
        self.port = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = h11.Connection(h11.SERVER)
        request, body = None, b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                if connection.they_are_waiting_for_100_continue:
                    writer.write(connection.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                data = await reader.read(65536)
                self.raw += data
                connection.receive_data(data)
            elif isinstance(event, h11.Request):
                request, body = event, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert request is not None
                self.requests.append((request, body))
                if self.answer:
                    writer.write(self.answer if isinstance(self.answer, bytes) else self.answer(request, body))
                    await writer.drain()
                    if isinstance(self.answer, bytes):
                        return
                    connection = h11.Connection(h11.SERVER)
                    continue
                said = json.dumps({"path": event_path(request), "size": len(body)}).encode()
                headers = [("content-length", str(len(said)))]
                writer.write(connection.send(h11.Response(status_code=200, headers=headers)) or b"")
                if request.method != b"HEAD":
                    writer.write(connection.send(h11.Data(data=said)) or b"")
                writer.write(connection.send(h11.EndOfMessage()) or b"")
                await writer.drain()
                if connection.our_state is h11.MUST_CLOSE:
                    return
                connection.start_next_cycle()
            else:
                return


def event_path(request: h11.Request) -> str:
    return bytes(request.target).decode()


@asynccontextmanager
async def site(made: Site | None = None, **more: Any) -> AsyncIterator[tuple[Site, Wayout]]:
    """A site at a.test and b.test, and the way to it."""
    made = made or Site()
    async with server(made) as made.port:
        rules = [f"{name}:{made.port}" for name in NAMES]
        async with wayout(plan([*rules, OPEN], web=more.pop("web", None)), NAMES, **more) as out:
            yield made, out


async def test_requests_are_written_anew() -> None:
    async with site() as (made, out):
        asked = (
            f"GET http://A.test:{made.port}/x/../y?q=1 HTTP/1.1\r\nhOsT: a.test:{made.port}\r\nX-One: 1\r\n"
            "Proxy-Connection: keep-alive\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nTE: trailers\r\n"
            "Proxy-Authorization: Basic eDp5\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n\r\n".encode()
        )
        answer = await out.say(asked)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert made.raw == (
            f"GET /x/../y?q=1 HTTP/1.1\r\nHost: a.test:{made.port}\r\nX-One: 1\r\n"
            "HTTP2-Settings: AAMAAABkAAQ\r\n\r\n".encode()
        )
        [access] = await out.records.settled(1)
        assert (access.method, access.path, access.result) == ("GET", "/x/../y", "ok")
        assert access.sent == len(asked)


@loops.each
async def test_a_connection_is_kept_for_the_same_host_and_each_request_is_decided() -> None:
    async with site() as (made, out), httpx.AsyncClient(proxy=out.url) as client:
        for number in range(3):
            answer = await client.get(f"http://a.test:{made.port}/{number}")
            assert answer.json()["path"] == f"/{number}"
        assert made.connections == 1
        await client.get(f"http://b.test:{made.port}/")
        assert made.connections == 2
        assert (await client.get(f"http://bad.test:{made.port}/")).status_code == 403
        assert (await client.head(f"http://a.test:{made.port}/")).status_code == 200
        done = await out.records.settled(6)
        assert [each.verdict.verdict for each in done] == ["allow"] * 4 + ["deny", "allow"]
        out.outbound.change(plan(deny=["a.test"]))
        assert (await client.get(f"http://a.test:{made.port}/")).status_code == 403


@loops.each
async def test_bodies_of_every_kind_and_size() -> None:
    async def pieces(count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            yield bytes([number % 256]) * 10_007

    async with site() as (made, out), httpx.AsyncClient(proxy=out.url, timeout=30) as client:
        url = f"http://a.test:{made.port}/"
        for size in (0, 1, 70_000, 3_000_000):
            answer = await client.post(url, content=b"x" * size)
            assert answer.json()["size"] == size
        answer = await client.post(url, content=pieces(300))
        assert answer.json()["size"] == 300 * 10_007
        request, body = made.requests[-1]
        assert (b"transfer-encoding", b"chunked") in list(request.headers)
        assert body == b"".join([piece async for piece in pieces(300)])
        answer = await client.put(url, content=b"y" * 1000, headers={"expect": "100-continue"})
        assert answer.json()["size"] == 1000


def chunked(body: bytes) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n"
        + b"".join(
            b"%x;ext=1\r\n%s\r\n" % (len(body[at : at + 999]), body[at : at + 999]) for at in range(0, len(body), 999)
        )
        + b"0\r\nX-T: 1\r\n\r\n"
    )


BODY = bytes(range(256)) * 5000


@loops.each
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
        b"HTTP/1.1 200 OK\r\n\r\n" + BODY,
        b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
        chunked(BODY),
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + chunked(BODY),
    ],
    ids=["length", "until the end", "1.0", "chunks", "after others"],
)
async def test_answers_of_every_kind(answer: bytes) -> None:
    async with site(Site(answer)) as (made, out):
        async with httpx.AsyncClient(proxy=out.url) as client:
            got = await client.get(f"http://a.test:{made.port}/")
            assert got.content == BODY
            assert "x-t" not in got.headers
        old = await out.say(f"GET http://a.test:{made.port}/ HTTP/1.0\r\n\r\n".encode())
        assert old.endswith(BODY)
        assert b"chunked" not in old[:200].lower()
        done = await out.records.settled(2)
        assert {each.result for each in done} == {"ok"}
        assert all(each.received >= len(BODY) for each in done)


@loops.the_fast_one
@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
        b"\x16\x03\x01\x00\x05hello",
    ],
)
async def test_an_answer_that_cannot_be_trusted_is_not_passed_on(answer: bytes) -> None:
    async with site(Site(answer)) as (made, out):
        got = await out.say(f"GET http://a.test:{made.port}/ HTTP/1.0\r\n\r\n".encode())
        assert got.startswith(b"HTTP/1.1 502 ")
        [access] = await out.records.settled(1)
        assert access.result in ("bad_response", "unreachable")


@loops.the_fast_one
async def test_an_answer_that_breaks_off_is_not_made_whole() -> None:
    for answer in (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", chunked(BODY)[:-200]):
        async with site(Site(answer)) as (made, out), httpx.AsyncClient(proxy=out.url) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(f"http://a.test:{made.port}/")
            [access] = await out.records.settled(1)
            assert access.result == "reset"


@loops.the_fast_one
@pytest.mark.parametrize(
    "request_",
    [
        "GET http://a.test:{port}/ HTTP/1.1\r\nHost: b.test:{port}\r\n\r\n",
        "GET http://a.test:{port}/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "GET http://a.test:{port}/ HTTP/1.1\r\nHost: a.test:{port}\r\nHost: b.test:{port}\r\n\r\n",
        "GET http://a.test:{port}@bad.test:{port}/ HTTP/1.1\r\nHost: bad.test:{port}\r\n\r\n",
        "GET http://a.test:{port}\\@bad.test/ HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n",
        "GET http://a.test:{port}#@bad.test/ HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n",
        "GET http:///etc HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n",
        "GET //a.test:{port}/ FTP/1.1\r\nHost: a.test:{port}\r\n\r\n",
        "GET https://a.test:{port}/ HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n",
        "GET ftp://a.test:{port}/ HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n",
        "GET http://bad.test:{port}/ HTTP/1.1\r\nHost: bad.test:{port}\r\n\r\n",
        "GET http://127.0.0.3:{port}/ HTTP/1.1\r\nHost: 127.0.0.3:{port}\r\n\r\n",
        "GET http://0x7f.2:{port}/ HTTP/1.1\r\nHost: 0x7f.2:{port}\r\n\r\n",
        "GET http://[::ffff:7f00:3]:{port}/ HTTP/1.1\r\nHost: [::ffff:7f00:3]:{port}\r\n\r\n",
        "GET http://a.test:{port}/ HTTP/1.1\r\nHost: a.test:{port}\r\nX: y\n\r\n\r\n",
        "POST http://a.test:{port}/ HTTP/1.1\r\nHost: a.test:{port}\r\nContent-Length: 4\r\nTransfer-Encoding: chunked"
        "\r\n\r\n0\r\n\r\nGET /admin HTTP/1.1\r\nHost: b.test\r\n\r\n",
        "TRACE http://a.test:{port}/ HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n",
        "GET http://a.test:{port}/ HTTP/2.0\r\nHost: a.test:{port}\r\n\r\n",
        "GET http://a.test:{port}/\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n",
        "POST http://a.test:{port}/ HTTP/1.1\r\nHost: a.test:{port}\r\nExpect: magic\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_odd_requests_reach_nobody(request_: str) -> None:
    async with site() as (made, out):
        answer = await out.say(request_.format(port=made.port).encode())
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")), answer
        assert answer.count(b"HTTP/1.1 ") == 1
        assert made.raw == b""
        [access] = await out.records.settled(1)
        assert access.verdict.verdict == "deny"


@loops.the_fast_one
@pytest.mark.parametrize(
    "body",
    [
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhelloXX0\r\n\r\n",
        b"-1\r\n\r\n",
        b"5;" + b"x" * 5000 + b"\r\nhello\r\n0\r\n\r\n",
        b"0\r\nno trailer\r\n\r\n",
    ],
)
async def test_a_body_in_bad_chunks_never_becomes_a_request(body: bytes) -> None:
    async with site() as (made, out):
        head = f"POST http://a.test:{made.port}/ HTTP/1.1\r\nHost: a.test:{made.port}\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = await out.say(head.encode() + body)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert made.requests == []


@loops.the_fast_one
async def test_requests_that_come_together_are_decided_one_by_one() -> None:
    async with site() as (made, out):
        port = made.port
        answer = await out.say(
            (
                f"POST http://a.test:{port}/1 HTTP/1.1\r\nHost: a.test:{port}\r\nContent-Length: 3\r\n\r\nabc"
                f"POST http://a.test:{port}/2 HTTP/1.1\r\nHost: a.test:{port}\r\nTransfer-Encoding: chunked\r\n\r\n"
                f"3\r\nabc\r\n0\r\n\r\nGET http://bad.test:{port}/3 HTTP/1.1\r\nHost: bad.test:{port}\r\n\r\n"
                f"GET http://a.test:{port}/4 HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n"
            ).encode()
        )
        assert [event_path(request) for request, _ in made.requests] == ["/1", "/2"]
        assert answer.count(b"HTTP/1.1 200 ") == 2
        assert answer.count(b"HTTP/1.1 403 ") == 1


@loops.the_fast_one
async def test_inside_a_tunnel_every_request_is_for_its_host() -> None:
    async with site() as (made, out):
        where = f"a.test:{made.port}"
        reader, writer = await out.tunnel(where)
        for host in (where, "A.test", f"a.test.:{made.port}"):
            writer.write(f"GET /ok HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            await reader.readuntil(b"}")
        writer.write(f"GET /no HTTP/1.1\r\nHost: b.test:{made.port}\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 421 ")
        writer.close()
        assert made.connections == 1
        assert [event_path(request) for request, _ in made.requests] == ["/ok"] * 3
        *inside, tunnel = await out.records.settled(3)
        assert (tunnel.protocol, tunnel.path, tunnel.verdict.verdict) == ("connect", "/ok", "deny")
        assert [(each.protocol, each.method, each.path, each.address) for each in inside] == [
            ("http", "GET", "/ok", OPEN)
        ] * 2


@loops.the_fast_one
async def test_client_that_resets_the_tunnel_between_requests_is_not_a_failure() -> None:
    async with site() as (made, out):
        reader, writer = await out.tunnel(f"a.test:{made.port}")
        writer.write(f"GET / HTTP/1.1\r\nHost: a.test:{made.port}\r\n\r\n".encode())
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        [access] = await out.records.settled(1)
        assert (access.result, access.path) == ("ok", "/")


@loops.the_fast_one
async def test_client_that_resets_the_tunnel_in_a_body_is_a_failure() -> None:
    async with site() as (made, out):
        _, writer = await out.tunnel(f"a.test:{made.port}")
        head = f"POST / HTTP/1.1\r\nHost: a.test:{made.port}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe"
        writer.write(head.encode())
        async with asyncio.timeout(20):
            while b"he" not in made.raw.partition(b"\r\n\r\n")[2]:
                await asyncio.sleep(0.005)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        [access] = await out.records.settled(1)
        assert access.result == "reset"
        assert made.requests == []


@loops.the_fast_one
async def test_a_host_that_gets_a_credential_is_not_asked_in_the_clear() -> None:
    web = {"credentials": [{"host": "a.test", "secret": "key"}]}
    async with site(web=web) as (made, out):
        where = f"a.test:{made.port}"
        answer = await out.say(f"GET http://{where}/ HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 403 ") and b"https only" in answer
        reader, writer = await out.tunnel(where)
        writer.write(f"GET / HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
        assert b"https only" in await reader.read()
        writer.close()
        assert made.requests == []


@loops.the_fast_one
async def test_a_server_that_answers_before_it_has_heard_everything() -> None:
    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbig!")
        await writer.drain()
        await reader.read(1000)

    async with server(hasty) as port, wayout(plan([f"a.test:{port}", OPEN]), NAMES) as out:
        reader, writer = await out.dial()
        writer.write(
            f"POST http://a.test:{port}/ HTTP/1.1\r\nHost: a.test:{port}\r\nContent-Length: 9999\r\n\r\nx".encode()
        )
        answer = await reader.readuntil(b"big!")
        assert answer.startswith(b"HTTP/1.1 413 ")
        writer.close()
        await out.records.settled(1)


@loops.the_fast_one
async def test_a_client_that_goes_away_in_its_body_takes_the_request_with_it() -> None:
    async with site() as (made, out):
        _, writer = await out.dial()
        head = f"POST http://a.test:{made.port}/ HTTP/1.1\r\nHost: a.test:{made.port}\r\nContent-Length: 9999\r\n\r\nx"
        writer.write(head.encode())
        async with asyncio.timeout(20):
            while not made.raw:
                await asyncio.sleep(0.005)
        writer.close()
        [access] = await out.records.settled(1)
        assert access.result != "ok"
        assert made.requests == []


@loops.the_fast_one
async def test_a_kept_connection_that_the_server_ended_is_made_anew() -> None:
    closing: list[asyncio.StreamWriter] = []

    async def forgetful(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        closing.append(writer)

    async with server(forgetful) as port, wayout(plan([f"a.test:{port}", OPEN]), NAMES) as out:
        async with httpx.AsyncClient(proxy=out.url) as client:
            for _ in range(5):
                assert (await client.get(f"http://a.test:{port}/")).text == "ok"
        assert len(closing) == 5


@loops.the_fast_one
async def test_limits_hold_for_plain_requests() -> None:
    big = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (2 << 20) + bytes(2 << 20)
    async with site(Site(big), web={"max_download_mb": 1, "max_upload_mb": 1}) as (made, out):
        head = (
            f"POST http://a.test:{made.port}/ HTTP/1.1\r\nHost: a.test:{made.port}\r\nContent-Length: {2 << 20}\r\n\r\n"
        )
        answer = await out.say(head.encode() + bytes(2 << 20))
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert made.requests == []
        answer = await out.say(f"GET http://a.test:{made.port}/ HTTP/1.0\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 429 ")
    async with site(Site(big), web={"max_download_mb": 1}) as (made, out):
        answer = await out.say(f"GET http://a.test:{made.port}/ HTTP/1.0\r\n\r\n".encode())
        assert len(answer) <= 1 << 20
        [access] = await out.records.settled(1)
        assert access.result == "limit_exceeded"


@loops.each
@pytest.mark.parametrize("scheme", ["connect", "absolute"])
async def test_websockets(scheme: str) -> None:
    async def echo(connection: websockets.ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    async with websockets.serve(echo, OPEN, 0) as serving:
        port = next(iter(serving.sockets)).getsockname()[1]
        async with wayout(plan([f"a.test:{port}", OPEN]), NAMES) as out:
            if scheme == "connect":
                async with websockets.connect(f"ws://a.test:{port}/", proxy=out.url) as connection:
                    await connection.send("x" * 100_000)
                    assert await connection.recv() == "x" * 100_000
            else:
                await _by_absolute_form(out, port)
            [access] = await out.records.settled(1)
            assert (access.result, access.method) == ("ok", "GET")


async def _by_absolute_form(out: Wayout, port: int) -> None:
    reader, writer = await out.dial()
    writer.write(
        f"GET http://a.test:{port}/ HTTP/1.1\r\nHost: a.test:{port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head
    writer.write(b"\x81\x82\x00\x00\x00\x00hi")
    assert await reader.readexactly(4) == b"\x81\x02hi"
    writer.write(b"\x88\x80\x00\x00\x00\x00")
    await reader.read()
    writer.close()


@loops.the_fast_one
async def test_origin_form_is_for_the_package_front(tmp_path: Any) -> None:
    front = Front(PackageCache(str(tmp_path), most_bytes=1 << 20), fetch=IndexClient())
    try:
        async with wayout(plan(), front=front) as out:
            answer = await out.say(
                b"GET /simple/ HTTP/1.1\r\nHost: x\r\n\r\nHEAD /simple/ HTTP/1.1\r\nHost: x\r\n\r\n"
                b"GET /nothing?secret=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            )
            assert answer.count(b"HTTP/1.1 200 ") == 2
            assert answer.count(b"HTTP/1.1 404 ") == 1
            done = await out.records.settled(3)
            assert [(each.protocol, each.path) for each in done] == [
                ("index", "/simple/"),
                ("index", "/simple/"),
                ("index", "/nothing"),
            ]
            answer = await out.say(b"POST /simple/ HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi")
            assert answer.startswith(b"HTTP/1.1 400 ")
    finally:
        await front.aclose()


WORDS = [
    "GET ",
    "http://a.test",
    "http://bad.test/",
    "/",
    " HTTP/1.1",
    "\r\n",
    "\n",
    "\r",
    "Host: ",
    "a.test",
    "bad.test",
    ":80",
]
WORDS += ["Content-Length: ", "Transfer-Encoding: chunked", "0", "5", "\r\n\r\n", "CONNECT "]
JUNK = st.lists(st.sampled_from(WORDS).map(str.encode) | st.binary(max_size=5), max_size=25).map(b"".join)


@settings(max_examples=60, deadline=None)
@given(JUNK)
def test_no_bytes_bring_it_down_or_lead_where_nobody_may_go(junk: bytes) -> None:
    async def run() -> None:
        dialled: list[str] = []

        async def dial(target: object, addresses: Sequence[object], access: object) -> Any:
            dialled.append(str(addresses[0]))
            raise ConnectionRefusedError

        async with wayout(plan(["a.test", OPEN]), NAMES, dial=dial) as out:
            reader, writer = await out.dial()
            writer.write(junk)
            writer.write_eof()
            try:
                async with asyncio.timeout(20):
                    await reader.read()
            except ConnectionResetError:
                pass
            writer.close()
            assert set(dialled) <= {OPEN}

    asyncio.run(run())
