"""Servers that get their identities from a real SPIRE server and agent."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator

import httpx
import pytest
from tests.support.fleet import Fleet, eventually
from tests.support.postgres import Postgres
from tests.support.spire import Spire

from carrel.errors import PlatformError
from carrel.primitives.spiffe import SpiffeId
from carrel.spiffe.identity import NodeIdentity
from carrel.spiffe.spire import SpireSource

TRUST_DOMAIN = "spire.test"


@pytest.fixture(scope="module")
def spire() -> Iterator[Spire]:
    spire = Spire(TRUST_DOMAIN)
    yield spire
    spire.close()


async def test_an_identity_comes_from_the_agent_and_is_renewed(spire: Spire) -> None:
    spire.register("carrel/node/other", ttl_s=3600)  # the agent gives all; the right one is chosen
    spire.register("carrel/node/one", ttl_s=10)
    id = SpiffeId.node(TRUST_DOMAIN, "one")
    async with asyncio.timeout(60):
        while True:
            try:
                identity = await NodeIdentity.open(id, SpireSource(spire.agent_socket, id))
                break
            except PlatformError:  # the agent learns of entries every few seconds
                await asyncio.sleep(0.2)
    try:
        first, context = identity.svid, identity.server_context()
        assert first.id == str(id) and 0 < identity.expires_in_s <= 10
        async with asyncio.timeout(60):
            while identity.svid.chain == first.chain:
                await asyncio.sleep(0.1)
        assert identity.expires_in_s > 0 and identity.server_context() is not context
    finally:
        await identity.close()


async def test_a_server_that_is_not_registered_is_told_so(spire: Spire) -> None:
    id = SpiffeId.node(TRUST_DOMAIN, "nobody")
    source = SpireSource(spire.agent_socket, id)
    with pytest.raises(PlatformError, match="SPIRE agent") as caught:
        await NodeIdentity.open(id, source)
    assert caught.value.hint


async def test_an_agent_that_is_not_there_is_named(tmp_path: object) -> None:
    id = SpiffeId.node(TRUST_DOMAIN, "one")
    with pytest.raises(PlatformError, match=f"{tmp_path}/none gave no SVID"):
        await NodeIdentity.open(id, SpireSource(f"{tmp_path}/none", id))


async def test_two_servers_forward_with_identities_of_spire(
    spire: Spire, postgres: Postgres, carrel_forks: None
) -> None:
    for name in ("a", "b"):
        spire.register(f"carrel/node/{name}", ttl_s=12)
    id = SpiffeId.node(TRUST_DOMAIN, "b")
    async with asyncio.timeout(60):  # until the agent knows of both
        while True:
            source = SpireSource(spire.agent_socket, id)
            try:
                await source.fetch()
                break
            except PlatformError:
                await asyncio.sleep(0.2)
            finally:
                await source.close()
    schema = f"spire_{secrets.token_hex(4)}"
    await postgres.execute(f"CREATE SCHEMA {schema}")
    fleet = Fleet(
        postgres.url(search_path=schema),
        CARREL_SPIFFE_SOURCE="spire",
        CARREL_SPIFFE_TRUST_DOMAIN=TRUST_DOMAIN,
        CARREL_SPIFFE_AGENT_SOCKET=spire.agent_socket,
    )
    try:
        for name in ("a", "b"):
            fleet.start(name)
            await asyncio.to_thread(fleet.ready, name)
        async with fleet.http("a") as a, fleet.http("b") as b:
            at: dict[str, httpx.AsyncClient] = {"a": a, "b": b}
            answer = await eventually(a, "POST", "/v1/sandboxes", json={"context_id": "c", "trust": "high"})
            wrong = "b" if answer.json()["node"] == "a" else "a"
            before = (await expiries(a))["a"]
            async with asyncio.timeout(60):
                while (await expiries(a))["a"] == before:  # an SVID is renewed meanwhile
                    answer = await at[wrong].post("/v1/sandboxes/c/commands", json={"command": "echo hi"})
                    assert (answer.status_code, answer.json().get("stdout")) == (200, "hi\n"), answer.text
            answer = await at[wrong].post("/v1/sandboxes/c/commands", json={"command": "echo hi"})
            assert answer.status_code == 200, answer.text
            assert (await a.delete("/v1/contexts/c")).status_code == 204
            lines = (await a.get("/metrics")).text.splitlines()
            [expiry] = [line.split()[1] for line in lines if line.startswith("carrel_svid_expiry_timestamp_seconds ")]
            assert 0 < float(expiry) - time.time() <= 12
    finally:
        await asyncio.to_thread(fleet.close)


async def expiries(client: httpx.AsyncClient) -> dict[str, str]:
    return {each["name"]: each["svid_expires_at"] for each in (await client.get("/v1/nodes")).json()["items"]}
