"""Servers with SPIFFE IDs: requests are forwarded with mutual TLS, SVIDs are renewed under load, and a server with a
foreign, expired or revoked identity is refused both ways.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import httpx
import pytest
from tests.support.fleet import TOKEN, Fleet, eventually
from tests.support.postgres import Postgres
from websockets.asyncio.client import connect

from carrel.control.nodes.passes import Forwardable, Passes
from carrel.primitives.spiffe import SpiffeId, client_context
from carrel.secrets import Vault, decoded_key
from carrel.spiffe.authority import CertificateAuthority

TRUST_DOMAIN, LIFETIME_S = "fleet.test", 4


@pytest.fixture(scope="module")
def fleet(postgres: Postgres, carrel_forks: None) -> Iterator[Fleet]:
    schema = f"fleet_{secrets.token_hex(4)}"
    asyncio.run(postgres.execute(f"CREATE SCHEMA {schema}"))
    fleet = Fleet(
        postgres.url(search_path=schema),
        CARREL_SPIFFE_SOURCE="carrel",
        CARREL_SPIFFE_TRUST_DOMAIN=TRUST_DOMAIN,
        CARREL_SPIFFE_LIFETIME_S=str(LIFETIME_S),
    )
    for name in ("a", "b"):
        fleet.start(name)
        fleet.ready(name)
    yield fleet
    fleet.close()


@pytest.fixture
async def at(fleet: Fleet) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
    found = {name: fleet.http(name) for name in ("a", "b")}
    yield found
    for each in found.values():
        await each.aclose()


async def started(client: httpx.AsyncClient, context: str) -> tuple[str, str]:
    answer = await eventually(client, "POST", "/v1/sandboxes", json={"context_id": context, "trust": "high"})
    assert answer.status_code in {200, 201}, answer.text
    return answer.json()["node"], f"/v1/sandboxes/{context}"


def authority(fleet: Fleet) -> CertificateAuthority:
    vault = Vault(decoded_key(fleet.setting("CARREL_SECRET_KEY"), "secret_key"))
    return CertificateAuthority(vault.derived("certificate authority"), TRUST_DOMAIN)


async def nodes(client: httpx.AsyncClient) -> dict[str, dict[str, str]]:
    return {each["name"]: each for each in (await client.get("/v1/nodes")).json()["items"]}


async def serial_of(client: httpx.AsyncClient, fleet: Fleet, name: str) -> str:
    """The serial number of the certificate that a server shows now."""
    url = httpx.URL((await nodes(client))[name]["url"])
    own = authority(fleet).issue(SpiffeId.node(TRUST_DOMAIN, "a"), 60)
    _, writer = await asyncio.open_connection(url.host, url.port, ssl=client_context(own), server_hostname="carrel")
    certificate = writer.get_extra_info("ssl_object").getpeercert()
    writer.transport.abort()
    return str(certificate["serialNumber"])


async def test_requests_and_terminals_are_forwarded_with_mutual_tls(
    fleet: Fleet, at: dict[str, httpx.AsyncClient]
) -> None:
    owner, box = await started(at["a"], "forwarded")
    wrong = "b" if owner == "a" else "a"
    answer = await at[wrong].post(f"{box}/commands", json={"command": "echo hi"})
    assert (answer.status_code, answer.json().get("stdout")) == (200, "hi\n"), answer.text
    content = secrets.token_bytes(3_000_000)
    assert (await at[wrong].put(f"{box}/files/content?path=f", content=content)).status_code == 200
    assert (await at[wrong].get(f"{box}/files/content?path=f")).content == content
    found = await nodes(at[wrong])
    assert {each["state"] for each in found.values()} == {"running"}
    assert all(each["url"].startswith("https+spiffe://") for each in found.values())
    assert found[owner]["spiffe_id"] == f"spiffe://{TRUST_DOMAIN}/carrel/node/{owner}"
    assert found[wrong]["svid_expires_at"]
    url = fleet.url(wrong).replace("http", "ws") + f"{box}/terminals?command=cat"
    async with connect(url, additional_headers={"authorization": f"Bearer {TOKEN}"}, proxy=None) as terminal:
        await terminal.send(b"typed\n")
        seen = b""
        async with asyncio.timeout(30):
            while b"typed" not in seen:
                message = await terminal.recv()
                seen += message if isinstance(message, bytes) else b""
    assert (await at[wrong].delete("/v1/contexts/forwarded")).status_code == 204


async def test_svids_are_renewed_under_load_without_a_failed_request(
    fleet: Fleet, at: dict[str, httpx.AsyncClient]
) -> None:
    owner, box = await started(at["a"], "renewed")
    wrong = "b" if owner == "a" else "a"
    stop = asyncio.Event()
    done = 0

    async def load() -> None:
        nonlocal done
        while not stop.is_set():
            answer = await at[wrong].post(f"{box}/commands", json={"command": ["true"]})
            assert answer.status_code == 200, answer.text
            done += 1

    async def reopening() -> None:
        """Opens connections all the time: more requests at once than connections are kept."""
        while not stop.is_set():
            answers = await asyncio.gather(*(at[wrong].get(f"{box}/files/stat?path=.") for _ in range(80)))
            assert {each.status_code for each in answers} == {200}

    long = asyncio.ensure_future(
        at[wrong].post(f"{box}/commands", json={"command": f"sleep {2 * LIFETIME_S}; echo slept"})
    )
    tasks = [asyncio.ensure_future(load()) for _ in range(4)] + [asyncio.ensure_future(reopening())]
    seen = {await serial_of(at["a"], fleet, owner)}
    async with asyncio.timeout(60):
        while len(seen) < 4:
            seen.add(await serial_of(at["a"], fleet, owner))
            await asyncio.sleep(0.1)
    assert (await long).json()["stdout"] == "slept\n"
    stop.set()
    await asyncio.gather(*tasks)
    assert done > 20
    assert (await at[wrong].delete("/v1/contexts/renewed")).status_code == 204


async def status_of(url: httpx.URL, context: ssl.SSLContext, headers: dict[bytes, bytes]) -> int | None:
    """The status of the answer to a request with mutual TLS; None if the connection is refused."""
    try:
        reader, writer = await asyncio.open_connection(url.host, url.port, ssl=context, server_hostname="carrel")
        lines = b"".join(b"%s: %s\r\n" % pair for pair in headers.items())
        writer.write(b"GET /v1/sandboxes/none HTTP/1.1\r\nhost: %s\r\n%s\r\n" % (url.host.encode(), lines))
        async with asyncio.timeout(20):
            line = await reader.readline()
        writer.transport.abort()
    except OSError:
        return None
    return int(line.split()[1]) if line else None


async def test_only_servers_of_the_database_are_accepted(fleet: Fleet, at: dict[str, httpx.AsyncClient]) -> None:
    url = httpx.URL((await nodes(at["a"]))["b"]["url"])
    own = authority(fleet)
    foreign = CertificateAuthority(b"x" * 32, TRUST_DOMAIN)
    b = SpiffeId.node(TRUST_DOMAIN, "b")
    assert b.node_name == "b"
    token = {b"authorization": f"Bearer {TOKEN}".encode()}

    def like(source: CertificateAuthority, path: str, **given: float) -> ssl.SSLContext:
        svid = source.issue(SpiffeId.of(TRUST_DOMAIN, path), 60, **given)
        return client_context(replace(svid, bundle=own.bundle))

    nobody = ssl.create_default_context(cadata=own.bundle)
    nobody.check_hostname = False
    old = like(own, "/carrel/node/a")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    refused = {
        "foreign": like(foreign, "/carrel/node/a"),
        "expired": like(own, "/carrel/node/a", now=time.time() - 120),
        "sandbox": like(own, "/carrel/sandbox/a"),
        "no certificate": nobody,
        "old TLS": old,
    }
    for kind, context in refused.items():
        assert await status_of(url, context, token) is None, kind
    # a member without a pass, even with a token; one that signs for another; one that never joined
    assert await status_of(url, like(own, "/carrel/node/a"), token) == 401
    vault = Vault(decoded_key(fleet.setting("CARREL_SECRET_KEY"), "secret_key"))
    boot = await fleet.boot("b")
    for sender, peer in (("a", "c"), ("c", "c")):
        passes = Passes(vault.derived("forwarding"), sender, "boot", time.time)
        asked = Forwardable("GET", b"/v1/sandboxes/none", [], "none")
        header = {b"carrel-forwarded": passes.make(asked, "administrator", "b", boot)}
        assert await status_of(url, like(own, f"/carrel/node/{peer}"), header) == 401, (sender, peer)
    good = Passes(vault.derived("forwarding"), "a", "boot", time.time)
    asked = Forwardable("GET", b"/v1/sandboxes/none", [], "none")
    header = {b"carrel-forwarded": good.make(asked, "administrator", "b", boot)}
    assert await status_of(url, like(own, "/carrel/node/a"), header) == 404
    # the port for clients takes no pass any more
    asked = Forwardable("GET", b"/v1/sandboxes/none", [(b"accept", b"*/*")], "none")
    header = {b"carrel-forwarded": good.make(asked, "administrator", "b", boot)}
    answer = await at["b"].get("/v1/sandboxes/none", headers={"carrel-forwarded": header[b"carrel-forwarded"].decode()})
    assert answer.status_code == 401 and "mutual TLS" in answer.text


async def test_slow_handshakes_keep_no_server_out(fleet: Fleet, at: dict[str, httpx.AsyncClient]) -> None:
    owner, box = await started(at["a"], "slow")
    wrong = "b" if owner == "a" else "a"
    url = httpx.URL((await nodes(at["a"]))[owner]["url"])
    silent = [await asyncio.open_connection(url.host, url.port) for _ in range(300)]
    try:
        answers = await asyncio.gather(*(at[wrong].get(f"{box}/files/stat?path=.") for _ in range(80)))
        assert {each.status_code for each in answers} == {200}
        async with asyncio.timeout(30):
            assert {await reader.read() for reader, _ in silent} == {b""}  # each is closed
    finally:
        for _, writer in silent:
            writer.close()
    assert (await at[wrong].delete("/v1/contexts/slow")).status_code == 204


async def test_servers_with_and_without_an_identity_do_not_mix(fleet: Fleet, at: dict[str, httpx.AsyncClient]) -> None:
    fleet.start("plain", CARREL_SPIFFE_SOURCE="none")
    fleet.ready("plain")
    try:
        async with fleet.http("plain") as plain:
            assert (await nodes(plain))["a"]["state"] == "unreachable"
            assert "SPIFFE ID" in (await nodes(at["a"]))["plain"]["notice"]
            owner, box = await started(at["a"], "mixed")
            answer = await plain.post(f"{box}/commands", json={"command": "true"})
            assert answer.status_code == 503, answer.text
            assert (await at[owner].delete("/v1/contexts/mixed")).status_code == 204
            assert (await plain.post("/v1/nodes/a/revoke")).json()["field"] == "spiffe.source"
    finally:
        fleet.stop("plain")


async def test_a_foreign_server_is_refused_both_ways(fleet: Fleet, at: dict[str, httpx.AsyncClient]) -> None:
    """It has the database, and another secret: its certificates are of another authority."""
    fleet.start("foreign", CARREL_SECRET_KEY=base64.b64encode(secrets.token_bytes(32)).decode())
    fleet.ready("foreign")
    try:
        async with fleet.http("foreign") as foreign:
            owner, box = await started(at["a"], "not-for-it")
            assert (await foreign.post(f"{box}/commands", json={"command": "true"})).status_code == 503
            url = httpx.URL((await nodes(at["a"]))["foreign"]["url"])
            member = authority(fleet).issue(SpiffeId.node(TRUST_DOMAIN, "a"), 60)
            assert await status_of(url, client_context(member), {}) is None
            assert (await at[owner].delete("/v1/contexts/not-for-it")).status_code == 204
    finally:
        fleet.stop("foreign")


async def test_a_revoked_server_is_out(fleet: Fleet, at: dict[str, httpx.AsyncClient]) -> None:
    fleet.start("c")
    fleet.ready("c")
    assert (await at["a"].post("/v1/nodes/none/revoke")).status_code == 404
    url = httpx.URL((await nodes(at["a"]))["b"]["url"])
    member = client_context(authority(fleet).issue(SpiffeId.node(TRUST_DOMAIN, "c"), 3600))
    reader, writer = await asyncio.open_connection(url.host, url.port, ssl=member, server_hostname="carrel")
    assert await status_of(url, member, {}) == 401  # accepted as a server, refused without a pass
    began = time.monotonic()
    answer = await at["a"].post("/v1/nodes/c/revoke")
    assert answer.status_code == 200, answer.text
    assert {each["name"]: each["state"] for each in answer.json()["items"]}["c"] == "revoked"
    async with asyncio.timeout(60):
        assert await reader.read() == b""  # its open connection is closed
        while await status_of(url, member, {}) is not None:
            await asyncio.sleep(0.1)
        while fleet.running("c"):  # and it ends by itself
            await asyncio.sleep(0.1)
    writer.close()
    assert time.monotonic() - began < 60
    assert "was revoked" in fleet.log("c")
    fleet.start("c")
    async with asyncio.timeout(60):
        while fleet.running("c"):
            await asyncio.sleep(0.1)
    assert "is revoked" in fleet.log("c") and "Traceback" not in fleet.log("c")
    assert (await at["b"].post("/v1/nodes/c/readmit")).status_code == 200
    assert (await at["b"].post("/v1/nodes/c/readmit")).status_code == 404
    fleet.start("c")
    fleet.ready("c")
    fleet.stop("c")


async def test_the_workers_of_a_server_have_one_identity(fleet: Fleet, at: dict[str, httpx.AsyncClient]) -> None:
    fleet.start("w", CARREL_WORKERS="2")
    fleet.ready("w")
    found = await nodes(at["a"])
    assert {name: each["spiffe_id"] for name, each in found.items() if name.startswith("w")} == dict.fromkeys(
        ("w:0", "w:1"), f"spiffe://{TRUST_DOMAIN}/carrel/node/w"
    )
    async with fleet.http("w") as w:
        for number in range(4):
            for client, name in ((w, f"worker-{number}"), (at["a"], f"far-{number}")):
                _, box = await started(client, name)
                for asked in (w, *at.values()):
                    answer = await asked.post(f"{box}/commands", json={"command": "echo hi"})
                    assert (answer.status_code, answer.json().get("stdout")) == (200, "hi\n"), answer.text
                assert (await client.delete(f"/v1/contexts/{name}")).status_code == 204
    assert (await at["a"].post("/v1/nodes/w:0/revoke")).status_code == 404, "a worker has none of its own"
    assert (await at["a"].post("/v1/nodes/w/revoke")).status_code == 200
    async with asyncio.timeout(60):
        while fleet.running("w"):
            await asyncio.sleep(0.1)
    assert (await at["a"].post("/v1/nodes/w/readmit")).status_code == 200
    fleet.start("w")  # what it left is ended
    fleet.ready("w")
    fleet.stop("w")
