"""Requests inside opened tunnels: real clients, the real gateway, real TLS servers. No credential comes back."""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import random
import re
import ssl
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import httpx
import pytest
import uvloop
import websockets
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from carrel.egress.plan import Injected
from inspected import (
    CREDENTIAL,
    PLACEHOLDER,
    PUBLIC,
    SECRET,
    SPELLINGS,
    Seen,
    Site,
    plan,
    running,
    said,
    setting,
    spoken,
    way_out,
)

# credentials


async def test_the_server_gets_the_value_and_the_sandbox_does_not() -> None:
    async with setting() as (site, proxy), proxy.client() as client:
        answer = await client.post(
            f"https://api.test:{site.port}/v1/things?key=1",
            content=b"body",
            headers={"Authorization": f"Bearer {PLACEHOLDER}"},
        )
        assert answer.status_code == 200
        assert not spoken(answer.content)
        assert PLACEHOLDER in answer.text
        assert answer.content.endswith(b"body")
    (seen,) = site.seen
    assert seen.header("authorization") == [f"Bearer {SECRET}"]
    assert seen.header("accept-encoding") == ["identity"]
    assert seen.header("host") == [f"api.test:{site.port}"]
    tunnel, access = proxy.report.accesses
    assert (tunnel.protocol, tunnel.inspected) == ("connect", True)
    assert (access.method, access.path, access.inspected, access.credential) == ("POST", "/v1/things", True, "API_KEY")
    assert (access.said.verdict, access.address, access.result) == ("allow", "127.0.0.2", "ok")
    assert access.sent > 4
    assert access.received > len(answer.content)


async def test_curl_too() -> None:
    async with setting() as (site, proxy):
        code, output = await proxy.curl(f"https://api.test:{site.port}/", "-H", "Authorization: x", "-d", "a=b")
        assert (code, spoken(output)) == (0, False)
        assert output.startswith(b"HTTP/1.1 200 OK")
        assert output.endswith(b"a=b")
        big = os.urandom(3 << 20)
        with tempfile.NamedTemporaryFile() as file:
            file.write(big)
            file.flush()
            arguments = ("-T", file.name, "-H", "Expect: 100-continue")
            for more in ((), ("-H", "Transfer-Encoding: chunked")):
                code, output = await proxy.curl(f"https://api.test:{site.port}/put", *arguments, *more)
                assert code == 0
                assert output.endswith(big)
                assert site.seen[-1].body == big
    assert {seen.header("authorization")[0] for seen in site.seen} == {f"Bearer {SECRET}"}


async def test_only_the_named_method_and_path_get_it() -> None:
    one = Injected("api.test", "Authorization", f"Bearer {SECRET}", SECRET, "API_KEY", ("GET",), ("/v1",))
    async with setting(injected=[one]) as (site, proxy), proxy.client() as client:
        base = f"https://api.test:{site.port}"
        for method, path in (("GET", "/v1/a"), ("POST", "/v1/a"), ("GET", "/v2"), ("GET", "/v10")):
            await client.request(method, base + path, headers={"Authorization": PLACEHOLDER})
        assert [seen.header("authorization") for seen in site.seen] == [[f"Bearer {SECRET}"], *[[PLACEHOLDER]] * 3]
        assert [each.credential for each in proxy.report.requests] == ["API_KEY", None, None, None]
        code, output = await proxy.curl(f"{base}/v1/../admin", "--path-as-is")
        assert (code, output[:12]) == (0, b"HTTP/1.1 400")
        assert b"two ways" in output
        assert len(site.seen) == 4
        assert proxy.report.requests[-1].result == "bad_request"


async def test_another_host_gets_nothing_and_is_not_looked_at() -> None:
    def redirect(seen: Seen) -> Sequence[bytes]:
        if seen.header("host")[0].startswith("api."):
            return said(b"", b"Location: https://other.test:%d/x" % site.port, status=b"302 Found")
        return said(gzip.compress(b"hello"), b"Content-Encoding: gzip")

    both = Site(redirect)
    context = PUBLIC.context("api.test")
    context.sni_callback = lambda tls, name, _: setattr(tls, "context", PUBLIC.context(name))  # type: ignore[assignment]
    try:
        async with running(both, context) as site, way_out(plan(site)) as proxy, proxy.client() as client:
            client.follow_redirects = True
            answer = await client.get(f"https://api.test:{site.port}/")
            assert (answer.text, answer.headers["content-encoding"]) == ("hello", "gzip")
            assert answer.headers["content-length"] == str(len(gzip.compress(b"hello")))
            first, second = both.seen
            assert first.header("authorization")
            assert not second.header("authorization")
            assert "gzip" in second.header("accept-encoding")[0]
            assert [each.credential for each in proxy.report.requests] == ["API_KEY", None]
    finally:
        context.sni_callback = None


async def test_what_is_compressed_nevertheless_is_refused() -> None:
    def compressed(seen: Seen) -> Sequence[bytes]:
        return said(gzip.compress(seen.header("authorization")[0].encode()), b"Content-Encoding: gzip")

    async with setting(compressed) as (site, proxy), proxy.client() as client:
        answer = await client.get(f"https://api.test:{site.port}/")
        assert answer.status_code == 502
        assert "compressed" in answer.json()["reason"]
        assert proxy.report.requests[0].result == "bad_response"


async def test_parts_cannot_be_asked_for() -> None:
    async with setting() as (site, proxy), proxy.client() as client:
        await client.get(f"https://api.test:{site.port}/", headers={"Range": "bytes=0-5", "If-Range": "x"})
        assert not site.seen[0].header("range")
        assert not site.seen[0].header("if-range")


async def test_a_value_that_the_server_kept_does_not_come_back_later() -> None:
    one = Injected("api.test", "Authorization", f"Bearer {SECRET}", SECRET, "API_KEY", ("POST",))
    kept: list[bytes] = []

    def keep(seen: Seen) -> Sequence[bytes]:
        kept.extend(each.encode() for each in seen.header("authorization"))
        return said(b" ".join(kept), b"X-Kept: " + b"".join(kept), status=b"200 " + b"".join(kept))

    async with setting(keep, injected=[one]) as (site, proxy), proxy.client() as client:
        await client.post(f"https://api.test:{site.port}/")
        answer = await client.get(f"https://api.test:{site.port}/")
        assert kept
        assert not spoken(answer.content + repr(answer.headers).encode() + answer.extensions["reason_phrase"])
        assert answer.headers["x-kept"] == f"Bearer {PLACEHOLDER}"


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    spelling=st.sampled_from(SPELLINGS),
    before=st.binary(max_size=40),
    after=st.binary(max_size=40),
    cuts=st.lists(st.integers(0, 140), max_size=12),
    way=st.sampled_from(["length", "chunks", "close"]),
    seed=st.integers(0, 99),
)
def test_however_it_is_sent_it_does_not_arrive(
    world: World, spelling: bytes, before: bytes, after: bytes, cuts: list[int], way: str, seed: int
) -> None:
    data = before + spelling + after
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[start:end] for start, end in pairwise(edges)]

    def answer(_seen: Seen) -> Sequence[bytes | None]:
        if way == "length":
            return [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data), *pieces]
        if way == "close":
            return [b"HTTP/1.1 200 OK\r\n\r\n", *pieces, None]
        wire = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        wire += b"0\r\nX-Trailer: %s\r\n\r\n" % (b"" if b"\n" in spelling else spelling)
        places = sorted(random.Random(seed).choices(range(len(wire)), k=6))
        return [
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Echo: %s\r\n\r\n" % spelling,
            *(wire[start:end] for start, end in zip([0, *places], [*places, len(wire)], strict=True)),
        ]

    content, headers = world.get(answer)
    assert not spoken(content)
    assert not spoken(headers)
    if not spoken(before + after):
        assert PLACEHOLDER.encode() in content or b"***" in content


class World:
    """A site and a proxy that stay for many requests; on the proxy's own event loop."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._held = setting()
        self._site, self._proxy = self._runner.run(self._held.__aenter__())

    def get(self, reply: Callable[[Seen], Sequence[bytes | None]]) -> tuple[bytes, bytes]:
        """The body and the head as the client got them, undecoded."""
        self._site.reply = reply

        async def ask() -> tuple[bytes, bytes]:
            before = len(os.listdir("/proc/self/fd"))
            async with self._proxy.raw(self._site) as (reader, writer):
                writer.write(b"GET / HTTP/1.0\r\nConnection: close\r\n\r\n")
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            async with asyncio.timeout(10):
                while len(os.listdir("/proc/self/fd")) > before:  # the loop stands still between two requests
                    await asyncio.sleep(0.001)
            return body, head

        return self._runner.run(ask())

    def close(self) -> None:
        self._runner.run(self._held.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    found = World()
    yield found
    found.close()


async def test_a_few_bytes_that_could_begin_a_value_do_not_wait_for_more() -> None:
    go_on = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\ndata: " + SECRET[:1].encode())
        await go_on.wait()
        writer.write(SECRET[1:14].encode())

    async with running(Site(handler=slow)) as site, way_out(plan(site)) as proxy, proxy.raw(site) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: api.test:%d\r\n\r\n" % site.port)
        await reader.readuntil(b"\r\n\r\n")
        heard = b""
        while SECRET[:1].encode() not in heard:
            heard += await reader.read(100)
        go_on.set()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_a_value_that_comes_slowly_does_not_go_through(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("carrel.egress.conversation._QUIET_S", 0.001)
    echoed = f"<{SECRET}>".encode()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(echoed))
        for at in range(0, len(echoed), size):
            writer.write(echoed[at : at + size])
            await asyncio.sleep(0.01)

    async with running(Site(handler=drip)) as site, way_out(plan(site)) as proxy, proxy.client() as client:
        answer = await client.get(f"https://api.test:{site.port}/")
        assert re.fullmatch(rf"<t?O?p?{PLACEHOLDER}>", answer.text)


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
        assert access.said.verdict == "deny"
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

    monkeypatch.setattr("carrel.egress.conversation.write_request", fail)
    with caplog.at_level(logging.DEBUG):
        async with setting() as (site, proxy), proxy.client() as client:
            answer = await client.get(f"https://api.test:{site.port}/")
            assert (answer.status_code, answer.json()["code"]) == (500, "platform_error")
            assert proxy.report.requests[0].result == "platform_error"
    assert "RuntimeError" in caplog.text
    assert not spoken(caplog.text.encode() + answer.content)


async def test_a_credential_that_was_taken_away_while_a_person_was_asked_is_not_used() -> None:
    async with running(Site()) as site, way_out(plan(site)) as proxy, proxy.client() as client:
        url = f"https://api.test:{site.port}/"
        await client.get(url)

        def withdraw() -> None:
            proxy.passage.change(plan(site, []))

        proxy.on_ask = withdraw
        proxy.passage.change(plan(site, allowed_domains=None))
        answer = await client.get(url)
        assert (answer.status_code, answer.json()["reason"]) == (503, "the policy has changed meanwhile")
        assert len(site.seen) == 1
        assert (await client.get(url)).status_code == 200
        assert not site.seen[-1].header("authorization")


async def test_credentials_that_cannot_be_used_are_told_by_name() -> None:
    odd = Injected("api.test", "Authorization", "Bearer a\r\nb-secret", "a\r\nb-secret", "API_KEY")
    async with setting(injected=[odd]) as (site, proxy), proxy.client() as client:
        answer = await client.get(f"https://api.test:{site.port}/")
        assert (answer.status_code, answer.json()["code"]) == (502, "credential_unusable")
        assert "API_KEY" in answer.text
        assert "b-secret" not in answer.text
    assert not site.seen
