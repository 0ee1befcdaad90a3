"""The servers on this database: this one gives signs of life, and knows which others do, where they are and what room
they have. Forwards nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from carrel.control.nodes.placement import Candidate
from carrel.control.nodes.workers import Worker, server_of
from carrel.control.sessions.live import LiveSandboxes
from carrel.errors import CarrelError, InvalidRequest, NotFound, Unauthorized, Unsupported
from carrel.models import NodeInfo
from carrel.primitives.spiffe import SpiffeId
from carrel.providers.base import Provider
from carrel.store.nodes import NodeFacts, NodeRecord, NodeStore

if TYPE_CHECKING:
    from carrel.spiffe.identity import NodeIdentity

log = logging.getLogger("carrel.nodes")

BEAT_S = 2.0
"""The time between two signs of life; a third of the lease if that is shorter."""
FORGET_S = 86_400.0
"""How long a silent server is still shown."""
SPIFFE_SCHEME = "https+spiffe"
"""Of the address of a server that is verified by its SPIFFE ID, not by the name of its host."""
REFRESH_S = 0.2
"""The least time between two looks into the database for a server that is not known here."""


UNIX = "unix:"
"""How the address of a worker that listens on a Unix socket begins."""


def beat_every(lease_s: float) -> float:
    """Return the seconds between two signs of life of a server."""
    return min(BEAT_S, lease_s / 3)


def default_url(host: str, port: int, scheme: str = "http") -> str:
    """Return where other servers reach a server that listens there. For a wildcard it is the address from which this
    machine reaches others; a machine without one gets a loopback address.
    """
    if host in {"0.0.0.0", "::"}:
        host = _own_address(socket.AF_INET if host == "0.0.0.0" else socket.AF_INET6)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _own_address(family: socket.AddressFamily) -> str:
    # Connecting a UDP socket sends nothing; the kernel only looks for the route. The addresses are for documentation.
    far = "192.0.2.1" if family == socket.AF_INET else "2001:db8::1"
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((far, 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1" if family == socket.AF_INET else "::1"


def machine_id() -> str:
    """Identify the machine and the network namespace: a loopback address means the same only within both."""
    known = []
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        known.append(file.read().strip())
    with suppress(OSError):
        known.append(os.readlink("/proc/self/ns/net"))
    if len(known) < 2:  # unknown: it equals no other
        known.append(secrets.token_hex(16))
    return hashlib.sha256(" ".join(known).encode()).hexdigest()[:32]


def _only_on_its_machine(url: str) -> bool:
    if url.startswith(UNIX):
        return True
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class Nodes:
    """This server among the servers on its database. `join` when it takes requests, `leave` before it ends.

    `worker` is this process. `shared`: the database may have other servers. Else nothing is written, and there is only
    this one.
    """

    def __init__(
        self,
        store: NodeStore,
        live: LiveSandboxes,
        providers: Mapping[str, Provider],
        *,
        worker: Worker,
        key_id: str,
        capacity: int,
        lease_s: float,
        shared: bool,
        identity: NodeIdentity | None,
    ):
        """`identity` None: servers have no SPIFFE IDs."""
        self.worker = worker
        self._store = store
        self._identity = identity
        self._revoked: frozenset[str] = frozenset()
        self.expelled = asyncio.Event()
        """Set when this server's own SPIFFE ID is revoked: it has to end."""
        self._revocation = asyncio.Event()
        """Set with the next change of the revoked servers, and replaced."""
        self._live = live
        self._providers = providers
        self.shared = shared
        self.me = NodeFacts(worker.name, secrets.token_hex(8), None, machine_id(), key_id, "", (), 0, capacity, lease_s)
        self._began = time.time()
        self._known: dict[str, NodeRecord] = {}
        self._placed: dict[str, list[float]] = {}
        """When this server placed sandboxes on others whose signs of life do not count them yet."""
        self._starting = 0
        self._suspected: dict[str, float] = {}
        """Servers that could not be reached, by their last sign of life: they answer again after a later one."""
        self._joined = False
        self._offset = time.time() - time.monotonic()
        """The database's time minus the monotonic time of this process."""
        self._beaten = -math.inf
        self._beating = asyncio.Lock()

    @property
    def name(self) -> str:
        return self.me.name

    def now(self) -> float:
        """Return the database's time, as far as this server knows it. Clocks of machines do not matter."""
        return time.monotonic() + self._offset

    async def join(self, url: str, version: str) -> None:
        """Tell the others where this server is."""
        verified = url.startswith(f"{SPIFFE_SCHEME}://")
        if self.shared and not url.startswith(UNIX) and (self._identity is not None) != verified:
            has, scheme = ("has", SPIFFE_SCHEME) if self._identity else ("has no", "http or https")
            raise InvalidRequest(
                f"other servers cannot reach this one at {url}: it {has} SPIFFE ID",
                field="node_url",
                hint=f"let CARREL_NODE_URL begin with {scheme}, or leave it out",
            )
        usable = await asyncio.to_thread(self._usable)
        self.me = replace(self.me, url=url, version=version, providers=tuple(usable))
        self._joined = self.shared
        await self.beat()
        if self.expelled.is_set():
            raise Unauthorized(
                f"the SPIFFE ID of server '{self.worker.server}' is revoked",
                field="node",
                hint="start it with another CARREL_NODE, or have another server say `carrel nodes readmit`",
            )

    async def leave(self) -> None:
        """Tell the others that this server ends: they send nothing more."""
        if self._joined:
            self._joined = False
            async with self._beating:  # a sign of life on its way would come after this
                try:
                    await self._store.remove(self.me.name, self.me.boot)
                except CarrelError as error:
                    log.warning("this server could not sign off: %s", error)

    async def beat(self, *, unless_within: float = 0.0) -> None:
        """Give a sign of life, and see those of the others, unless that was done within the last seconds."""
        async with self._beating:
            if not self._joined or time.monotonic() - self._beaten < unless_within:
                return
            self.me = replace(self.me, sandboxes=self._sandboxes)
            began = time.monotonic()
            now, found = await self._store.beat(self.me, forget_s=FORGET_S)
            self._beaten = ended = time.monotonic()
            self._offset = now - (began + ended) / 2
            if self._identity is not None:
                self._learn(await self._store.revoked())
            self._known = {each.name: each for each in found if each.name != self.me.name}
            self._placed = {
                name: [at for at in placed if at >= self._known[name].seen_at]
                for name, placed in self._placed.items()
                if name in self._known
            }
            self.tell()
            self._suspected = {name: seen for name, seen in self._suspected.items() if name in self._known}

    def _learn(self, revoked: frozenset[str]) -> None:
        if revoked != self._revoked:
            self._revoked = revoked
            self._revocation.set()
            self._revocation = asyncio.Event()
        if self.worker.server in revoked and self._identity is not None and not self.expelled.is_set():
            log.error("the SPIFFE ID of this server, %s, was revoked: it ends", self._identity.id)
            self._identity.revoke()
            self.expelled.set()

    @property
    def revoked(self) -> frozenset[str]:
        """The names of the servers whose SPIFFE ID is revoked."""
        return self._revoked

    async def next_revocation(self) -> frozenset[str]:
        """Wait until the revoked servers change, and return their names."""
        await self._revocation.wait()
        return self._revoked

    def accepts(self, peer: SpiffeId) -> bool:
        """Whether a connection of this peer is accepted: it is a server of this trust domain that is not revoked."""
        return (
            self._identity is not None
            and peer.trust_domain == self._identity.id.trust_domain
            and peer.node_name is not None
            and peer.node_name not in self._revoked
        )

    def is_revoked(self, name: str) -> bool:
        """Whether the SPIFFE ID of a node is revoked. The workers of a server have one together."""
        return server_of(name) in self._revoked

    async def require_member(self, name: str) -> None:
        """Raise `Unauthorized` unless a server is on this database and not revoked."""
        if name not in self._known:
            await self.beat(unless_within=REFRESH_S)
        if name not in self._known or self.is_revoked(name):
            raise Unauthorized(
                f"server '{name[:128]}' is not among the servers of this database, or is revoked",
                field="Carrel-Forwarded",
                hint="`carrel nodes` lists them",
            )

    async def revoke(self, name: str) -> None:
        """Revoke the SPIFFE ID of a server. Every other server refuses it at its next sign of life."""
        self._require_identity()
        await self.beat()
        if name not in {server_of(each) for each in (self.me.name, *self._known, *self._revoked)}:
            raise NotFound(f"there is no server '{name[:128]}'", field="name", hint="`carrel nodes` lists them")
        await self._store.revoke(name)
        await self.beat()

    async def readmit(self, name: str) -> None:
        """Undo a revocation."""
        self._require_identity()
        if not await self._store.readmit(name):
            raise NotFound(f"server '{name[:128]}' is not revoked", field="name", hint="`carrel nodes` lists them")
        await self.beat()

    def _require_identity(self) -> None:
        if self._identity is None:
            raise Unsupported(
                "these servers have no SPIFFE IDs",
                field="spiffe.source",
                hint="set CARREL_SPIFFE_SOURCE on all of them; without it, change CARREL_SECRET_KEY to exclude one",
            )

    async def find(self, name: str) -> NodeRecord | None:
        """Return another server that answers and that requests can be forwarded to."""
        record = self._known.get(name)
        if (record is None or not self._answers(record)) and time.monotonic() - self._beaten > REFRESH_S:
            await self.beat(unless_within=REFRESH_S)
            record = self._known.get(name)
        return record if record is not None and self._answers(record) and self.obstacle(record) is None else None

    def of_server(self, server: str) -> list[str]:
        """Return the names of a server, or of its workers. One that was never seen is asked for in the database."""
        names = [name for name in self._known if server_of(name) == server]
        return names or [server]

    def why_not(self, name: str) -> str | None:
        """Return why requests cannot be forwarded to a server that answers; None if it does not answer."""
        record = self._known.get(name)
        return self.obstacle(record) if record is not None and self._answers(record) else None

    def suspect(self, name: str) -> None:
        """Record that a server could not be reached. It counts as silent until its next sign of life."""
        if (record := self._known.get(name)) is not None:
            self._suspected[name] = record.seen_at

    def is_silent(self, record: NodeRecord) -> bool:
        """Whether a server gave no sign of life for its lease, or a new process has its name. One that signed off is
        not: it still answers what it was asked.
        """
        if self.is_revoked(record.name):
            return True
        now = self._known.get(record.name)
        return now is not None and (now.boot != record.boot or self.now() - now.seen_at >= now.lease_s)

    def obstacle(self, record: NodeRecord) -> str | None:
        """Return why nothing can be forwarded to a server, or None."""
        if record.url is None:
            return "it has no address; set CARREL_NODE_URL there"
        if self.is_revoked(record.name):
            return "its SPIFFE ID is revoked"
        verified = record.url.startswith(f"{SPIFFE_SCHEME}://")
        if not record.url.startswith(UNIX) and verified != (self._identity is not None):
            return "only one of the two servers has a SPIFFE ID; give all the same CARREL_SPIFFE_SOURCE"
        if record.key_id != self.me.key_id:
            return "it has another secret; give all servers of the database the same CARREL_SECRET_KEY"
        if record.machine != self.me.machine and _only_on_its_machine(record.url):
            return f"its address {record.url} is only for its own machine; set CARREL_NODE_URL there"
        return None

    def candidates(self) -> dict[str, Candidate]:
        """Return this server and the others that requests can be forwarded to."""
        here = self.me
        found = {here.name: Candidate(here.name, self._sandboxes, here.capacity, here.providers)}
        for each in self._known.values():
            if self._answers(each) and self.obstacle(each) is None:
                index = self.worker.index_of(each.name)
                if index is not None and self.worker.table is not None:
                    sandboxes = self.worker.table.sandboxes(index)
                else:
                    sandboxes = each.sandboxes + len(self._placed.get(each.name, ()))
                found[each.name] = Candidate(each.name, sandboxes, each.capacity, each.providers)
        return found

    def placed(self, name: str) -> None:
        """Count a sandbox that is about to start on another server."""
        self._placed.setdefault(name, []).append(self.now())

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Count a sandbox that is about to start here."""
        self._starting += 1
        self.tell()
        try:
            yield
        finally:
            self._starting -= 1
            self.tell()

    def tell(self) -> None:
        """Tell the other workers how many sandboxes there are here."""
        if self.worker.table is not None:
            self.worker.table.set_sandboxes(self.worker.index, self._sandboxes)

    @property
    def _sandboxes(self) -> int:
        return len(self._live) + self._starting

    async def page(self) -> list[NodeInfo]:
        """Return every server, by name; silent ones for a day."""
        await self.beat()
        here = replace(self.me, sandboxes=self._sandboxes)
        mine = NodeInfo(
            name=here.name,
            url=here.url,
            version=here.version,
            state="running",
            here=True,
            sandboxes=here.sandboxes,
            capacity=here.capacity,
            providers=list(here.providers),
            spiffe_id=self._id_of(here.name, here.url),
            svid_expires_at=None
            if self._identity is None
            else datetime.fromtimestamp(self._identity.svid.expires_at, UTC),
            started_at=datetime.fromtimestamp(self._began, UTC),
            seen_at=datetime.fromtimestamp(self.now(), UTC),
        )
        return sorted([mine, *map(self._info, self._known.values())], key=lambda each: each.name)

    def _info(self, record: NodeRecord) -> NodeInfo:
        obstacle = self.obstacle(record)
        state: Literal["running", "unreachable", "gone", "revoked"] = "running" if obstacle is None else "unreachable"
        if not self._answers(record):
            state = "gone"
        if self.is_revoked(record.name):
            state = "revoked"
        return NodeInfo(
            name=record.name,
            url=record.url,
            version=record.version,
            state=state,
            here=False,
            sandboxes=record.sandboxes,
            capacity=record.capacity,
            providers=list(record.providers),
            spiffe_id=self._id_of(record.name, record.url),
            started_at=datetime.fromtimestamp(record.started_at, UTC),
            seen_at=datetime.fromtimestamp(record.seen_at, UTC),
            notice=None if state == "gone" else obstacle,
        )

    def _id_of(self, name: str, url: str | None) -> str | None:
        if self._identity is None or not (url or "").startswith(f"{SPIFFE_SCHEME}://"):
            return None
        return str(SpiffeId.node(self._identity.id.trust_domain, server_of(name)))

    def _answers(self, record: NodeRecord) -> bool:
        if self.worker.answers(record.name) is False:
            return False
        if record.seen_at <= self._suspected.get(record.name, -math.inf):
            return False
        return self.now() - record.seen_at < record.lease_s

    def _usable(self) -> list[str]:
        return sorted(name for name, provider in self._providers.items() if provider.missing() is None)
