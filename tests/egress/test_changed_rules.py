"""What runs while the policy changes: a connection that the new one would not have let out as it is does not go on."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.gateway_ground import Echo
from tests.support.inspected import (
    CREDENTIAL,
    OWN,
    PUBLIC,
    SECRET,
    Proxy,
    Seen,
    Site,
    running,
    said,
    spoken,
    trust,
    way_out,
)
from tests.support.wayout import OPEN, PATIENCE_S, Person, hello, plan, server, wayout

from carrel.egress.http.authority import bundle
from carrel.egress.plan import EgressPlan, Injected
from carrel.policy.documents import settings, sources
from carrel.policy.rules.layers import Layer
from carrel.policy.verdict import Verdict

CREDITED = {"credentials": [{"host": "api.test", "secret": "API_KEY"}]}


def given(site: Site, injected: tuple[Injected, ...] = (), **web: object) -> EgressPlan:
    """A plan that allows the site, and looks into its TLS only where `web` says so."""
    allowed = settings.load('{"permissions": {"allow": ["network(outbound:127.0.0.2)"]}}')
    told = {"allowed_domains": ["api.test"], "allowed_ports": [site.port], **web}
    layer = Layer("settings.json", allowed, sources.load(json.dumps({"web_access": told})))
    return EgressPlan("s1", "c1", (layer,), injected, authority=OWN)


@asynccontextmanager
async def trusting_both(first: EgressPlan) -> AsyncIterator[Proxy]:
    """A way out whose clients trust the site as well as who looks into its TLS."""
    async with way_out(first) as proxy:
        with trust(bundle(OWN, PUBLIC.certificate)) as proxy.roots:
            yield proxy


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What still comes, up to the end."""
    found = b""
    async with asyncio.timeout(PATIENCE_S):
        try:
            while data := await reader.read(65536):
                found += data
        except (ConnectionError, ssl.SSLError):
            pass
    return found


async def test_a_tunnel_that_nobody_looks_into_ends_when_its_host_gets_a_credential() -> None:
    """Else what the host remembers of the credential could be asked for through it."""
    kept: list[str] = []

    def remember(seen: Seen) -> list[bytes]:
        kept.extend(seen.header("authorization"))
        return said(" ".join(kept).encode())

    async with (
        running(Site(remember)) as site,
        trusting_both(given(site)) as proxy,
        proxy.raw(site) as (reader, writer),
    ):
        proxy.outbound.change(given(site, (CREDENTIAL,), **CREDITED))
        async with proxy.client() as client:
            assert not spoken((await client.get(f"https://api.test:{site.port}/")).content)
        assert kept == [f"Bearer {SECRET}"]
        writer.write(b"GET / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n")
        assert not spoken(await rest(reader))


async def test_an_answer_under_way_ends_when_its_host_gets_a_credential() -> None:
    told = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"GET /events" in head:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nbegins\r\n")
            await writer.drain()
            await told.wait()
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(SECRET), SECRET.encode()))
        else:
            assert SECRET.encode() in head
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    inspected = {"inspected_domains": ["api.test"]}
    async with (
        running(Site(handler=serve)) as site,
        trusting_both(given(site, **inspected)) as proxy,
        proxy.raw(site) as (reader, writer),
    ):
        writer.write(b"GET /events HTTP/1.1\r\nHost: api.test\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            await reader.readuntil(b"begins\r\n")
        proxy.outbound.change(given(site, (CREDENTIAL,), **inspected, **CREDITED))
        async with proxy.client() as client:
            assert (await client.get(f"https://api.test:{site.port}/")).status_code == 200
        told.set()
        assert not spoken(await rest(reader))


async def test_what_no_rule_allows_any_more_ends_unless_a_person_allowed_it() -> None:
    echo = Echo()
    async with server(echo) as port:
        person = Person(Verdict("allow", "a person allowed it", source="approvals", approval="a1"))
        rules = [f"a.test:{port}", OPEN]
        names = {"a.test": [OPEN], "b.test": [OPEN]}
        web = {"allowed_ports": [port]}
        async with wayout(plan(rules, web=web), names, person) as out:
            tunnels = []
            for name in names:
                reader, writer = await out.tunnel(f"{name}:{port}")
                writer.write(first := hello(name))
                async with asyncio.timeout(PATIENCE_S):
                    assert await reader.readexactly(len(first)) == first
                tunnels.append((reader, writer))
            assert [target.host for target in person.asked] == ["b.test"]
            out.outbound.change(plan([OPEN], web=web))
            assert await rest(tunnels[0][0]) == b""
            tunnels[1][1].write(b"goes on")
            async with asyncio.timeout(PATIENCE_S):
                assert await tunnels[1][0].readexactly(7) == b"goes on"
            for _, writer in tunnels:
                writer.close()
            ended = await out.records.settled(2)
            assert sorted((each.target.host, each.result) for each in ended if each.target) == [
                ("a.test", "denied_by_policy"),
                ("b.test", "ok"),
            ]
