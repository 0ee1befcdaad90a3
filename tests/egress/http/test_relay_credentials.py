"""Credentials inside opened tunnels: the server gets the value, and the sandbox never does, however it is sent back."""

from __future__ import annotations

import asyncio
import gzip
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest
import uvloop
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.support.inspected import (
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

from carrel.egress.plan import Injected


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
    assert (access.verdict.verdict, access.address, access.result) == ("allow", "127.0.0.2", "ok")
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
    monkeypatch.setattr("carrel.egress.http.streams.QUIET_S", 0.001)
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


async def test_a_credential_that_was_taken_away_while_a_person_was_asked_is_not_used() -> None:
    async with running(Site()) as site, way_out(plan(site)) as proxy, proxy.client() as client:
        url = f"https://api.test:{site.port}/"
        await client.get(url)

        def withdraw() -> None:
            proxy.outbound.change(plan(site, []))

        proxy.on_ask = withdraw
        proxy.outbound.change(plan(site, allowed_domains=None))
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


async def test_interim_responses_are_passed_on_without_secrets() -> None:
    hint = b"HTTP/1.1 103 Early Hints\r\nLink: <%s>\r\nX-Other: yes\r\n\r\n" % SECRET.encode()
    async with setting(lambda _seen: [hint, *said(b"done")]) as (site, proxy), proxy.raw(site) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: api.test:%d\r\nConnection: close\r\n\r\n" % site.port)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 103 Early Hints\r\n")
    assert b"X-Other: yes" in answer and b"HTTP/1.1 200 OK" in answer and b"done" in answer
    assert not spoken(answer)
    assert PLACEHOLDER.encode() in answer
