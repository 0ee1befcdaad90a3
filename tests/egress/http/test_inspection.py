"""Tunnels whose TLS is opened: who is trusted, how long it lasts, and what a new policy does to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import pytest
from tests.support.inspected import (
    PLACEHOLDER,
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

from carrel.egress.access import AccessRefused
from carrel.egress.http.inspection import Inspection
from carrel.egress.plan import Injected
from carrel.errors import InvalidRequest

# trust


async def test_a_server_nobody_vouches_for_is_told_of_in_words() -> None:
    for roots, context in ((None, None), (PUBLIC.certificate, PUBLIC.context("other.test"))):
        async with (
            running(Site(), context) as site,
            way_out(plan(site), roots=roots) as proxy,
            proxy.client() as client,
        ):
            answer = await client.get(f"https://api.test:{site.port}/")
            assert answer.status_code == 502
            assert "its certificate is not valid" in answer.json()["reason"]
            assert not site.seen
            assert proxy.report.requests[0].result == "tls_failed"


async def test_a_server_without_tls_is_told_of_too() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad\r\n\r\n")

    async with running(Site(handler=plain, plain=True)) as site, way_out(plan(site)) as proxy, proxy.client() as client:
        answer = await client.get(f"https://api.test:{site.port}/")
        assert (answer.status_code, answer.json()["code"]) == (502, "tls_failed")


async def test_a_client_that_does_not_trust_gets_nothing() -> None:
    async with setting() as (site, proxy):
        async with httpx.AsyncClient(proxy=proxy.url, trust_env=False) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get(f"https://api.test:{site.port}/")
        while not proxy.report.ended:
            await asyncio.sleep(0.01)
        assert not proxy.report.requests
    assert not site.seen


async def test_a_sandbox_without_an_authority_is_refused() -> None:
    async with running(Site()) as site, way_out(plan(site, authority=None)) as proxy, proxy.client() as client:
        with pytest.raises(httpx.TransportError, match="ACCESS_DENIED"):
            await client.get(f"https://api.test:{site.port}/")
        while not proxy.report.ended:
            await asyncio.sleep(0.01)
        assert proxy.report.accesses[0].result == "denied_by_policy"
        with pytest.raises(AccessRefused, match="certificate authority"):
            Inspection().authority(proxy.outbound)


async def test_an_idle_connection_ends() -> None:
    async with running(Site()) as site, way_out(plan(site), idle_s=2) as proxy, proxy.raw(site) as (reader, _writer):
        assert await reader.read() == b""


async def test_a_server_that_leaves_takes_the_client_along() -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with running(Site(handler=leave)) as site, way_out(plan(site)) as proxy, proxy.raw(site) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: api.test:%d\r\n\r\n" % site.port)
        answer = await reader.read()
        assert b"200 OK" in answer
        assert b"connection: close" not in answer.lower()


# a policy that changes


async def test_a_new_plan_holds_for_the_next_request_and_cuts_what_it_denies() -> None:
    async with setting() as (site, proxy), proxy.client() as client:
        url = f"https://api.test:{site.port}/"
        await client.get(url)
        other = Injected("api.test", "X-Key", "another-value", "another-value", "OTHER")
        proxy.outbound.change(plan(site, [other]))
        answer = await client.get(url)
        assert "another-value" not in answer.text
        assert site.seen[1].header("x-key") == ["another-value"]
        assert not site.seen[1].header("authorization")
        assert site.connections == 1
        proxy.outbound.change(plan(site, blocked_domains=["api.test"]))
        with pytest.raises(httpx.TransportError):
            await client.get(url)
    assert len(site.seen) == 2


async def test_a_credential_that_is_taken_away_does_not_come_back_either() -> None:
    kept: list[bytes] = []

    def keep(seen: Seen) -> Sequence[bytes]:
        kept.extend(each.encode() for each in seen.header("authorization"))
        return said(b" ".join(kept))

    async with setting(keep) as (site, proxy), proxy.client() as client:
        url = f"https://api.test:{site.port}/"
        await client.get(url)
        for injected in ([Injected("api.test", "X-Key", "abc", "abc", "SHORT")], []):
            proxy.outbound.change(plan(site, injected))
            answer = await client.get(url)
            assert answer.status_code == (502 if injected else 200)
        assert SECRET.encode() in kept[0]
        assert not spoken(answer.content)
        assert PLACEHOLDER in answer.text


async def test_a_person_is_asked_once_for_a_tunnel() -> None:
    async with setting() as (site, proxy), proxy.client() as client:
        url = f"https://api.test:{site.port}/"
        await client.get(url)
        assert not proxy.asked
        proxy.outbound.change(plan(site, allowed_domains=None))  # nobody says anything of the host any more
        for _ in range(3):
            assert (await client.get(url)).status_code == 200
        assert len(proxy.asked) == 1
        assert [each.verdict.approval for each in proxy.report.requests] == [None, *["apr-1"] * 3]
    async with running(Site()) as site, way_out(plan(site, allowed_domains=None)) as proxy, proxy.client() as client:
        for _ in range(3):
            assert (await client.get(f"https://api.test:{site.port}/")).status_code == 200
        assert len(proxy.asked) == 1
        assert {each.verdict.approval for each in proxy.report.accesses} == {"apr-1"}


async def test_an_address_can_be_inspected() -> None:
    site = Site(host="127.0.0.2")
    async with (
        running(site),
        way_out(plan(site, allowed_domains=["127.0.0.2"], inspected_domains=["127.0.0.2"])) as proxy,
        proxy.client() as client,
    ):
        answer = await client.get(f"https://127.0.0.2:{site.port}/")
        assert answer.status_code == 200
        assert not site.seen[0].header("authorization")
        async with proxy.raw(site) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nHost: api.test:%d\r\n\r\n" % site.port)
            assert (await reader.read()).startswith(b"HTTP/1.1 421 ")


def test_roots_that_cannot_be_read_are_refused_at_once() -> None:
    for text in ("", "nonsense"):
        with pytest.raises(InvalidRequest, match="roots"):
            Inspection(roots=text)
    Inspection(roots=PUBLIC.certificate)
