"""Supervisors that are reached over TCP with mutual TLS: they keep every promise, and refuse everybody but servers of
their trust domain; a server refuses every supervisor but the one that it expects.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support import loops
from tests.support.remote_provider import POOL, TRUST_DOMAIN, RemoteProvider, identities
from tests.support.servers import ROOT as AS_ROOT

from carrel.control.supervisor.connection import SupervisorConnection
from carrel.errors import InvalidRequest, PlatformError, SandboxLost, TooLarge
from carrel.models import Network
from carrel.primitives import spiffe
from carrel.primitives.spiffe import SpiffeId, Svid, client_context
from carrel.primitives.trees import remove_tree
from carrel.providers import Handle, Launch
from carrel.providers.links import RemoteAddress, RemoteLink
from carrel.providers.remote import give_facts
from carrel.spiffe.authority import CertificateAuthority
from carrel.spiffe.identities import Identities
from carrel.testing import CHECKS, Check, Harness, Running, run_check, workspaces_in

pytestmark = pytest.mark.skipif(not AS_ROOT, reason="the provider of this test needs root")

NOW = time.time()


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="carrel-t-"))
    path.chmod(0o755)
    (path / "run").mkdir()
    (path / "ws").mkdir()
    yield path
    remove_tree(str(path))


@pytest.fixture
def known() -> Identities:
    return identities()


@pytest.fixture
async def harness(place: Path, bundles: Path, known: Identities) -> AsyncIterator[Harness]:
    def provider() -> RemoteProvider:
        return RemoteProvider(str(place / "run"), str(bundles), known.sandboxes)

    harness = Harness(provider, workspaces_in(str(place / "ws")))
    if (missing := harness.provider.missing()) is not None:
        pytest.skip(missing)
    yield harness
    await harness.close()
    assert not list((place / "run").iterdir())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_promise(check: Check, harness: Harness) -> None:
    outcome = await run_check(check, harness)
    assert outcome.kept, f"{check.promise}\n{outcome.failure}"


@loops.the_fast_one
async def test_on_the_event_loop_of_a_server(place: Path, bundles: Path, known: Identities) -> None:
    harness = Harness(
        lambda: RemoteProvider(str(place / "run"), str(bundles), known.sandboxes), workspaces_in(str(place / "ws"))
    )
    if (missing := harness.provider.missing()) is not None:
        pytest.skip(missing)
    try:
        async with harness.sandbox() as box:
            assert (await box.run("echo fine")).stdout == "fine\n"
            with pytest.raises(TooLarge):
                await box.connection.request("POST", "/commands", b"x" * (40 << 20))
            await box.write("file", b"x" * (8 << 20))
            assert len(await box.read("file")) == 8 << 20
    finally:
        await harness.close()


# which peers a supervisor accepts


class Talk(asyncio.Protocol):
    """Sends a request as soon as it is connected, and keeps what comes until the connection ends."""

    def __init__(self, request: bytes = b"GET /health HTTP/1.1\r\n\r\n"):
        self.request = request
        self.got = bytearray()
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.got += data
        if b"\r\n\r\n" in self.got:
            self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


async def answer(address: RemoteAddress, context: ssl.SSLContext, talk: Talk | None = None) -> bytes:
    """What a supervisor says to somebody: nothing, if it refuses the connection."""
    talk = talk or Talk()
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.create_connection(
            lambda: talk, address.host, address.port, ssl=context, server_hostname="carrel"
        )
    except (OSError, TimeoutError):
        return b""
    async with asyncio.timeout(20):
        await talk.ended.wait()
    transport.abort()
    return bytes(talk.got)


def without_certificate(known: Identities) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=known.authority.bundle)
    context.check_hostname = False
    return context


def only_old_tls(known: Identities) -> ssl.SSLContext:
    context = client_context(known.node.svid)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def as_peer(credentials: Svid, known: Identities) -> ssl.SSLContext:
    """Trusts the supervisor, so that only the supervisor can refuse."""
    return client_context(replace(credentials, bundle=known.authority.bundle))


def node(name: str) -> SpiffeId:
    return SpiffeId.node(TRUST_DOMAIN, name)


STRANGERS: dict[str, Callable[[Identities], ssl.SSLContext]] = {
    "no certificate": without_certificate,
    "an older TLS": only_old_tls,
    "another authority": lambda known: as_peer(
        CertificateAuthority(b"x" * 32, TRUST_DOMAIN).issue(node("one"), 60), known
    ),
    "another trust domain": lambda known: as_peer(
        CertificateAuthority(b"s" * 32, "else.test").issue(SpiffeId.node("else.test", "one"), 60), known
    ),
    "expired": lambda known: as_peer(known.authority.issue(node("one"), 60, now=NOW - 120), known),
    "another sandbox": lambda known: as_peer(known.authority.issue(SpiffeId.sandbox(TRUST_DOMAIN, "other"), 60), known),
    "the sandbox itself": lambda known: as_peer(known.sandboxes.for_sandbox("mine"), known),
    "a slot": lambda known: as_peer(known.sandboxes.for_slot(POOL), known),
    "an ID below that of a server": lambda known: as_peer(
        known.authority.issue(SpiffeId.of(TRUST_DOMAIN, "/carrel/node/one/more"), 60), known
    ),
}


async def never() -> str:
    await asyncio.Event().wait()
    return ""


def launch(harness: Harness, id: str = "mine") -> Launch:
    return Launch(id=id, workspace=harness.workspace(), network=Network.HOST)


async def test_a_supervisor_refuses_strangers(harness: Harness, known: Identities) -> None:
    wanted = launch(harness)
    slot = await harness.provider.start_slot(wanted)
    handle = slot
    try:
        waiting = RemoteAddress.parse(str(slot["socket"]))
        await until_it_listens(waiting)
        for name, make in STRANGERS.items():
            facts = json.dumps({"facts": {}, "credentials": {}}).encode()
            talk = Talk(len(facts).to_bytes(4, "big") + facts)
            assert await answer(waiting, make(known), talk) == b"", f"a slot spoke with {name}"
        handle = await harness.provider.claim(slot, wanted)
        address = RemoteAddress.parse(str(handle["socket"]))
        for name, make in STRANGERS.items():
            assert await answer(address, make(known)) == b"", f"a sandbox spoke with {name}"
        assert (await answer(address, known.sandboxes.client_context())).startswith(b"HTTP/1.1 200 OK")
        other = identities(name="two")
        assert (await answer(address, other.sandboxes.client_context())).startswith(b"HTTP/1.1 200 OK")
        plain = await asyncio.to_thread(in_plain_text, address)
        assert b"HTTP" not in plain
    finally:
        await harness.provider.remove(handle)


async def until_it_listens(address: RemoteAddress) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection(address.host, address.port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return


def in_plain_text(address: RemoteAddress) -> bytes:
    with socket.create_connection((address.host, address.port), 10) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        return plain.recv(4096)


# which supervisors a server accepts


class Impostor:
    """A TLS server at an address that a supervisor should have."""

    def __init__(self, credentials: Svid):
        self._context = spiffe.server_context(credentials)
        self.asked = 0

    async def __aenter__(self) -> Impostor:
        def connected(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

        self._server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=self._context)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    def address(self, id: SpiffeId) -> RemoteAddress:
        return RemoteAddress("127.0.0.1", self._server.sockets[0].getsockname()[1], id)


IMPOSTORS: dict[str, Callable[[Identities], Svid]] = {
    "another authority": lambda known: replace(
        CertificateAuthority(b"x" * 32, TRUST_DOMAIN).issue(SpiffeId.sandbox(TRUST_DOMAIN, "mine"), 60),
        bundle=known.authority.bundle,
    ),
    "expired": lambda known: known.authority.issue(SpiffeId.sandbox(TRUST_DOMAIN, "mine"), 60, now=NOW - 120),
    "another sandbox": lambda known: known.sandboxes.for_sandbox("other"),
    "a server": lambda known: known.node.svid,
    "a slot": lambda known: known.sandboxes.for_slot(POOL),
}


@pytest.mark.parametrize("kind", IMPOSTORS)
async def test_a_server_refuses_impostors(kind: str, known: Identities) -> None:
    async with Impostor(IMPOSTORS[kind](known)) as impostor:
        address = impostor.address(known.sandboxes.id_of("mine"))
        connection = SupervisorConnection(RemoteLink(address, known.sandboxes.client_context))
        with pytest.raises(SandboxLost, match="does not answer"):
            await connection.request_json("GET", "/health")
        connection.close()
        if kind != "a slot":
            with pytest.raises(PlatformError, match="did not start: no connection"):
                await give_facts(
                    impostor.address(known.sandboxes.id_of_slot(POOL)), known.sandboxes, "mine", {}, never()
                )


async def test_a_server_accepts_the_right_one(known: Identities) -> None:
    async with Impostor(known.sandboxes.for_sandbox("mine")) as impostor:
        address = impostor.address(known.sandboxes.id_of("mine"))
        connection = SupervisorConnection(RemoteLink(address, known.sandboxes.client_context))
        assert await connection.request_json("GET", "/health") == {}
        connection.close()


# hostile peers and hostile supervisors


async def test_slow_handshakes_keep_nobody_out(harness: Harness, known: Identities) -> None:
    handle = await harness.provider.start(launch(harness))
    silent = []
    try:
        address = RemoteAddress.parse(str(handle["socket"]))
        for _ in range(300):  # more than may wait at once
            reader, writer = await asyncio.open_connection(address.host, address.port)
            silent.append((reader, writer))
        began = time.monotonic()
        assert (await answer(address, known.sandboxes.client_context())).startswith(b"HTTP/1.1 200 OK")
        assert time.monotonic() - began < 5
        async with asyncio.timeout(30):
            for reader, _ in silent:
                assert await reader.read() == b""  # each is closed
    finally:
        for _, writer in silent:
            writer.close()
        await harness.provider.remove(handle)


async def test_too_many_facts_are_refused(harness: Harness, known: Identities) -> None:
    wanted = launch(harness)
    slot = await harness.provider.start_slot(wanted)
    try:
        address = RemoteAddress.parse(str(slot["socket"]))
        await until_it_listens(address)
        for message, words in (
            ((1 << 31).to_bytes(4, "big"), b"more than"),
            ((2).to_bytes(4, "big") + b"{}", b"facts and credentials"),
            ((3).to_bytes(4, "big") + b"abc", b"JSONDecodeError"),
        ):
            assert words in (await until_the_end(address, known.sandboxes.client_context(), message))
        handle = await harness.provider.claim(slot, wanted)
        box = Running(handle, wanted.workspace, harness.provider.link(handle))
        assert (await box.run("echo fine")).stdout == "fine\n"
        box.connection.close()
    finally:
        await harness.provider.remove(slot)


async def until_the_end(address: RemoteAddress, context: ssl.SSLContext, message: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context, server_hostname="carrel")
    writer.write(message)
    async with asyncio.timeout(20):
        said = await reader.read()
    writer.close()
    return said


async def test_a_huge_body_is_refused_with_its_reason(harness: Harness) -> None:
    async with harness.sandbox() as box:
        with pytest.raises(TooLarge):
            await box.connection.request("POST", "/commands", b"x" * (40 << 20))
        assert (await box.run("echo fine")).stdout == "fine\n"


async def test_a_huge_head_is_refused(harness: Harness, known: Identities) -> None:
    async with harness.sandbox() as box:
        address = RemoteAddress.parse(str(box.handle["socket"]))
        talk = Talk(b"GET /health HTTP/1.1\r\nx: " + b"y" * (1 << 20))
        assert b" 413 " in await answer(address, known.sandboxes.client_context(), talk)


async def test_the_agent_cannot_use_the_port_of_its_supervisor(harness: Harness) -> None:
    async with harness.sandbox() as box:
        port = RemoteAddress.parse(str(box.handle["socket"])).port
        tried = await box.run(f"curl -sk --max-time 10 https://127.0.0.1:{port}/health; echo $?; ls /run/carrel")
        assert tried.stdout.strip() not in {"", "0"} and "memory" not in tried.stdout, tried
        found = await box.run("cat /proc/1/environ /proc/1/mem /run/carrel/credentials; ls -l /proc/1/fd")
        assert "PRIVATE KEY" not in found.stdout, found


# identities change


async def test_slots_of_a_pool_become_sandboxes_with_identities_of_their_own(
    harness: Harness, known: Identities
) -> None:
    slots = [await harness.provider.start_slot(launch(harness, f"slot-{number}")) for number in range(2)]
    handles: list[Handle] = []
    try:
        for number, slot in enumerate(slots):
            handles.append(await harness.provider.claim(slot, launch(harness, f"owner-{number}")))
        first, second = (RemoteAddress.parse(str(handle["socket"])) for handle in handles)
        assert (first.id, second.id) == (known.sandboxes.id_of("owner-0"), known.sandboxes.id_of("owner-1"))
        swapped = SupervisorConnection(RemoteLink(replace(first, id=second.id), known.sandboxes.client_context))
        with pytest.raises(SandboxLost):
            await swapped.request_json("GET", "/health")
        swapped.close()
        with pytest.raises(PlatformError):  # the credentials of the slot are of no use any more
            await give_facts(replace(first, id=known.sandboxes.id_of_slot(POOL)), known.sandboxes, "thief", {}, never())
    finally:
        for slot in slots:
            await harness.provider.remove(slot)


async def renew(box: Running, credentials: Svid, refused: list[str]) -> dict[str, Any]:
    body = {"credentials": json.loads(credentials.to_json()), "refused": refused}
    return await box.connection.request_json("PUT", "/identity", body)


async def test_an_identity_is_renewed_without_a_failed_request(harness: Harness, known: Identities) -> None:
    async with harness.sandbox() as box:
        id = str(box.handle["id"])
        long = asyncio.ensure_future(box.run("sleep 1; echo slept"))
        serials = set()
        for _ in range(5):
            await renew(box, known.authority.issue(known.sandboxes.id_of(id), 30), [])
            serials.add(await serial(box, known))
            assert (await box.run("echo fine")).stdout == "fine\n"
        assert len(serials) == 5
        assert (await long).stdout == "slept\n"


async def serial(box: Running, known: Identities) -> str:
    address = RemoteAddress.parse(str(box.handle["socket"]))
    _, writer = await asyncio.open_connection(
        address.host, address.port, ssl=known.sandboxes.client_context(), server_hostname="carrel"
    )
    certificate = writer.get_extra_info("ssl_object").getpeercert()
    writer.transport.abort()
    return str(certificate["serialNumber"])


async def test_the_identity_of_another_sandbox_is_not_taken(harness: Harness, known: Identities) -> None:
    async with harness.sandbox() as box:
        with pytest.raises(InvalidRequest, match="of another sandbox"):
            await renew(box, known.sandboxes.for_sandbox("other"), [])
        with pytest.raises(InvalidRequest, match="refused"):
            await box.connection.request_json("PUT", "/identity", {"credentials": {}, "refused": []})
        assert (await box.run("echo fine")).stdout == "fine\n"


async def test_an_expired_supervisor_is_refused(harness: Harness, known: Identities) -> None:
    async with harness.sandbox() as box:
        id = known.sandboxes.id_of(str(box.handle["id"]))
        await renew(box, known.authority.issue(id, 60, now=time.time() - 120), [])
        fresh = SupervisorConnection(harness.provider.link(box.handle))
        with pytest.raises(SandboxLost, match="does not answer"):
            await fresh.request_json("GET", "/health")
        fresh.close()


async def test_a_revoked_server_is_refused_and_disconnected(harness: Harness, known: Identities) -> None:
    revoked = identities(name="revoked")
    async with harness.sandbox() as box:
        address = RemoteAddress.parse(str(box.handle["socket"]))
        theirs = SupervisorConnection(RemoteLink(address, revoked.sandboxes.client_context))
        waiting = asyncio.ensure_future(
            theirs.request("POST", "/commands?wait=1", json.dumps({"command": "touch begun; sleep 60"}).encode())
        )
        async with asyncio.timeout(20):
            while not (Path(box.workspace) / "begun").exists():
                await asyncio.sleep(0.02)
        await renew(box, known.sandboxes.for_sandbox(str(box.handle["id"])), [str(revoked.node.id)])
        with pytest.raises(SandboxLost):
            await waiting
        with pytest.raises(SandboxLost):
            await theirs.request_json("GET", "/health")
        theirs.close()
        assert (await box.run("echo fine")).stdout == "fine\n"


def test_addresses() -> None:
    id = SpiffeId.sandbox("a.test", "b")
    for host in ("10.0.0.1", "::1", "pod.example"):
        address = RemoteAddress(host, 7070, id)
        assert RemoteAddress.parse(str(address)) == address
    for wrong in (
        "/run/x.sock",
        "tcp+tls://h:1",
        "tcp+tls://h#spiffe://a.test/b",
        "http://h:1#spiffe://a.test/b",
        "tcp+tls://h:99999#spiffe://a.test/b",
        "",
    ):
        with pytest.raises(PlatformError, match="not the address"):
            RemoteAddress.parse(wrong)
