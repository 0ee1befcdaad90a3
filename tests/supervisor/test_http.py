"""The HTTP server alone, on a socket pair, spoken to byte by byte."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carrel.errors import Conflict
from carrel.supervisor.http import MAX_HEADERS, HttpConnection, HttpRequest, HttpResponse, HttpRouter, json_response

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """A router whose handlers leave traces."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.gone = asyncio.Event()
        self.streaming = 0
        self.router = HttpRouter(lambda _run: None)
        for method, path, handler in (
            ("GET", "/ok", self.ok),
            ("POST", "/echo", self.echo),
            ("POST", "/size", self.size),
            ("POST", "/ignore", self.ok),
            ("GET", "/fail", self.fail),
            ("GET", "/conflict", self.conflict),
            ("GET", "/endless", self.endless),
            ("GET", "/broken", self.broken),
            ("GET", "/thing/{}/part/{}", self.args),
        ):
            self.router.add(method, path, handler)

    async def ok(self, request: HttpRequest) -> HttpResponse:
        return json_response({"query": request.query})

    async def echo(self, request: HttpRequest) -> HttpResponse:
        return json_response(await request.json())

    async def size(self, request: HttpRequest) -> HttpResponse:
        size = 0
        try:
            async for chunk in request.chunks():
                size += len(chunk)
        except (ConnectionError, asyncio.CancelledError):
            self.gone.set()
            raise
        return json_response({"size": size})

    async def fail(self, _request: HttpRequest) -> HttpResponse:
        raise RuntimeError("a bug")

    async def conflict(self, _request: HttpRequest) -> HttpResponse:
        raise Conflict("not now", hint="later")

    async def args(self, request: HttpRequest) -> HttpResponse:
        return json_response(list(request.args))

    async def endless(self, _request: HttpRequest) -> HttpResponse:
        return HttpResponse(stream=self._chunks())

    async def _chunks(self) -> AsyncIterator[bytes]:
        try:
            while True:
                self.streaming += 1
                yield b"x" * 65536
                await asyncio.sleep(0)
        finally:
            self.gone.set()

    async def broken(self, _request: HttpRequest) -> HttpResponse:
        async def stream() -> AsyncIterator[bytes]:
            yield b"some"
            raise RuntimeError("half way")

        return HttpResponse(stream=stream())


@asynccontextmanager
async def connected(served: Served) -> AsyncIterator[Pair]:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_accepted_socket(lambda: HttpConnection(served.router, served.tasks), theirs)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    try:
        yield reader, writer
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            pass
        transport.close()
        async with asyncio.timeout(5):
            await asyncio.gather(*served.tasks, return_exceptions=True)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    async with asyncio.timeout(5):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in head[1:-2])}
        body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split(" ")[1]), headers, body


async def closed(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(5):
        return await reader.read() == b""


async def test_keep_alive_and_pipelining() -> None:
    async with connected(Served()) as (reader, writer):
        for _ in range(2):
            writer.write(b"GET /ok?n=%d HTTP/1.1\r\n\r\n" * 3 % (1, 2, 3))
            got = [json.loads((await answer(reader))[2]) for _ in range(3)]
            assert got == [{"query": {"n": "1"}}, {"query": {"n": "2"}}, {"query": {"n": "3"}}]
        body = b'{"a":1}'
        writer.write(b"POST /echo HTTP/1.1\r\ncontent-length: 7\r\n\r\n" + body + b"GET /ok HTTP/1.1\r\n\r\n")
        assert (await answer(reader))[2] == body
        assert (await answer(reader))[2] == b'{"query":{}}'


async def test_a_chunked_body_in_single_bytes() -> None:
    async with connected(Served()) as (reader, writer):
        raw = b'POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\n{"a\r\n4\r\n":1}\r\n0\r\n\r\n'
        for byte in raw:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await answer(reader))[2] == b'{"a":1}'


async def test_a_large_body_flows_through() -> None:
    async with connected(Served()) as (reader, writer):
        size = 20 * 1024 * 1024
        writer.write(b"POST /size HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(20):
            writer.write(b"x" * (1024 * 1024))
            await writer.drain()
        assert json.loads((await answer(reader))[2]) == {"size": size}


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET /ok HTTP/9.9\r\n\r\n",
        b"GET /ok HTTP/1.1\r\nno colon here\r\n\r\n",
        b"POST /echo HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /echo HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /ok HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_refused_and_hung_up(garbage: bytes) -> None:
    async with connected(Served()) as (reader, writer):
        writer.write(garbage)
        status, headers, body = await answer(reader)
        assert (status, headers["content-type"]) == (400, "application/problem+json")
        assert json.loads(body)["code"] == "invalid_request"
        assert await closed(reader)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * (MAX_HEADERS + 1),
        b"GET /ok HTTP/1.1\r\n" + b"a: b\r\n" * MAX_HEADERS,
        b"GET /ok HTTP/1.1\r\na: " + b"b" * (5 * MAX_HEADERS),
        b"GET /ok HTTP/1.1\r\n" + b"a" * (5 * MAX_HEADERS),
    ],
)
async def test_heads_are_bounded_before_they_end(head: bytes) -> None:
    async with connected(Served()) as (reader, writer):
        writer.write(head)
        status, _, body = await answer(reader)
        assert (status, json.loads(body)["code"]) == (413, "too_large")


async def test_errors_are_problems_and_the_connection_goes_on() -> None:
    async with connected(Served()) as (reader, writer):
        for path, status, code in (
            (b"/conflict", 409, "conflict"),
            (b"/fail", 500, "platform_error"),
            (b"/nothing", 404, "not_found"),
            (b"/%ff%00", 404, "not_found"),
        ):
            writer.write(b"GET " + path + b" HTTP/1.1\r\n\r\n")
            got, headers, body = await answer(reader)
            assert (got, headers["content-type"]) == (status, "application/problem+json")
            assert json.loads(body)["code"] == code
        writer.write(b"GET /thing/a%20b/part/%2e HTTP/1.1\r\n\r\n")
        assert json.loads((await answer(reader))[2]) == ["a b", "."]


async def test_an_unread_body_ends_the_connection() -> None:
    async with connected(Served()) as (reader, writer):
        writer.write(b"POST /ignore HTTP/1.1\r\ncontent-length: 100\r\n\r\nhalf")
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await closed(reader)


async def test_a_caller_that_leaves_in_the_middle_of_a_body() -> None:
    served = Served()
    async with connected(served) as (_, writer):
        writer.write(b"POST /size HTTP/1.1\r\ncontent-length: 100\r\n\r\nhalf")
        await writer.drain()
        writer.close()
        async with asyncio.timeout(5):
            await served.gone.wait()


async def test_a_caller_that_leaves_in_the_middle_of_a_stream() -> None:
    served = Served()
    async with connected(served) as (reader, writer):
        writer.write(b"GET /endless HTTP/1.1\r\n\r\n")
        await reader.readexactly(1000)
        writer.close()
        async with asyncio.timeout(5):
            await served.gone.wait()


async def test_a_slow_reader_holds_the_stream_back() -> None:
    served = Served()
    async with connected(served) as (reader, writer):
        writer.write(b"GET /endless HTTP/1.1\r\n\r\n")
        await reader.readexactly(10)
        last = -1
        while last != served.streaming:  # still once nothing can be written any more
            last = served.streaming
            for _ in range(50):
                await asyncio.sleep(0)
        assert last < 100


async def test_a_stream_that_fails_is_cut_off() -> None:
    async with connected(Served()) as (reader, writer):
        writer.write(b"GET /broken HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(5):
            try:
                data = await reader.read(-1)
            except ConnectionError:
                data = b""
        assert not data.endswith(b"0\r\n\r\n")


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.binary(max_size=200), st.lists(st.integers(1, 50), max_size=5))
def test_any_bytes_are_survived(data: bytes, cuts: list[int]) -> None:
    async def go() -> None:
        async with connected(Served()) as (reader, writer):
            rest = b"GET /ok HTTP/1.1\r\n" + data
            for cut in cuts:
                writer.write(rest[:cut])
                rest = rest[cut:]
                await asyncio.sleep(0)
            writer.write(rest)
            writer.write_eof()
            # Whether the refusal is read or the connection is found broken depends on who was first.
            async with asyncio.timeout(5):
                with suppress(ConnectionError):
                    await reader.read()

    asyncio.run(go())


def _request(**query: str) -> HttpRequest:
    return HttpRequest("GET", "/", query)


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_flags(value: str, expected: bool) -> None:
    assert _request(f=value).flag("f") is expected
    assert _request().flag("f") is False
