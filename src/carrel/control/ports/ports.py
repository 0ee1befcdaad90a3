"""The operations on ports of sandboxes: list them, make URLs, reach the server behind one.

Every request to a port passes admission, whoever sends it. A visitor acts with the rights of the token that made its
URL, on that one port. Knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from carrel.config import PortSettings
from carrel.control.operations.call import Traffic
from carrel.control.operations.caller import Caller
from carrel.control.operations.operations import Operations
from carrel.control.ports import access as accesses
from carrel.control.ports.access import PortAccess
from carrel.control.sessions.live import LiveSandbox
from carrel.control.sessions.sessions import Sessions
from carrel.control.supervisor.connection import SupervisorStream
from carrel.errors import Denied, InvalidRequest, LimitExceeded, NotFound, NotRunning, Unauthorized, Unsupported
from carrel.identity import ROOT, Identity, Tokens
from carrel.models import Network, PortList, PortUrl, SandboxRequest, ShareRequest
from carrel.models import operations as op
from carrel.models.operations import Operation
from carrel.models.ports import MAX_PORT_WAIT_S
from carrel.primitives.cache import Cache
from carrel.providers.base import Capability
from carrel.store.ports import PublicPort, PublicPortStore

DEFAULT_URL_S = 3600.0
MOST_AT_ONCE = 256
"""Connections to the ports of one sandbox at once: its other operations need some too."""
KNOWN_S, MOST_KNOWN = 1.0, 4096
"""How long it is remembered whether a port is public."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who reaches a port: the identity that it acts for, until when, and whether it may start the sandbox again.
    `by` is `token`, `url` or `public`.
    """

    identity: Identity
    by: str
    expires_at: float | None = None
    wake: bool = False


class Ports:
    """Reaches the ports of sandboxes."""

    def __init__(
        self,
        settings: PortSettings,
        store: PublicPortStore,
        sessions: Sessions,
        operations: Operations,
        tokens: Tokens,
        key: bytes,
    ):
        self._settings = settings
        self._store = store
        self._sessions = sessions
        self._operations = operations
        self._tokens = tokens
        self._key = key
        self._open: dict[str, int] = {}
        self._own_networks: dict[str, bool] = {}
        self._public: Cache[tuple[str, int], tuple[PublicPort | None]] = Cache(MOST_KNOWN, KNOWN_S)

    # for callers

    async def list(self, caller: Caller, name: str, *, port: int | None = None, wait_s: float = 0.0) -> PortList:
        """Return the open ports; with `port`, once that one is open or the time is over."""
        async with self._operations.enter(caller, name, op.LIST_PORTS, {}) as (box, _):
            _require_own_network(box, self._own_networks)
            return await box.connection.list_ports(port, min(wait_s, MAX_PORT_WAIT_S))

    async def share(self, caller: Caller, name: str, request: ShareRequest) -> PortUrl:
        """Make a URL of a port, which need not be open yet."""
        record = await self._sessions.lasting(name)
        arguments: dict[str, object] = {"port": request.port} | request.model_dump(
            include={"expires_s", "public", "wake"}, exclude_defaults=True
        )
        if request.public:
            self._require_public(request)
        async with self._operations.admit(caller, op.SHARE_PORT, arguments, record.id, record.context_id):
            token_id = caller.identity.token_id
            if request.public:
                made = PublicPort(record.id, request.port, token_id, request.wake, time.time())
                await self._store.put(made)
                self._public.pop((record.id, request.port))
                return self._url(record.id, request.port, None, request.wake)
            now, ends = time.time(), request.expires_s or DEFAULT_URL_S
            if ends > self._settings.longest_url_s:
                raise InvalidRequest(
                    f"a URL is valid for at most {self._settings.longest_url_s:.0f} seconds here",
                    field="expires_s",
                    hint="ask for less, or let the operator raise CARREL_PORTS_LONGEST_URL_S",
                )
            until = now + ends
            if caller.identity.expires_at is not None:
                until = min(until, caller.identity.expires_at)
            made_for = PortAccess(record.id, request.port, int(until + 0.999), token_id or "", request.wake)
            return self._url(record.id, request.port, made_for, request.wake)

    def _require_public(self, request: ShareRequest) -> None:
        if not self._settings.allow_public:
            raise Denied(
                "this server has no public ports",
                field="public",
                hint="make a URL that expires, or let the operator set CARREL_PORTS_ALLOW_PUBLIC",
                operation="share_port",
                rule="ports.allow_public",
                source="settings of the server",
                reason="this server has no public ports",
                retry=False,
                approval=None,
            )
        if request.expires_s is not None:
            raise InvalidRequest(
                "a public port does not expire", field="expires_s", hint="leave it out, and close the port later"
            )

    async def close(self, caller: Caller, name: str, port: int) -> None:
        """Make a public port private again. URLs that expire stay valid: revoke the token that made them."""
        record = await self._sessions.lasting(name)
        async with self._operations.admit(caller, op.CLOSE_PORT, {"port": port}, record.id, record.context_id):
            await self._store.remove(record.id, port)
            self._public.pop((record.id, port))

    def _url(self, sandbox: str, port: int, made: PortAccess | None, wake: bool) -> PortUrl:
        text = None if made is None else made.signed(self._key)
        path = f"/v1/sandboxes/{quote(sandbox, safe='')}/ports/{port}/" + ("" if text is None else f"~{text}/")
        host = self.host_of(sandbox, port)
        url = None
        if host is not None:
            url = f"{self._settings.scheme}://{host}/" + ("" if text is None else f"?carrel-access={text}")
        ends = None if made is None else datetime.fromtimestamp(made.expires_at, UTC)
        return PortUrl(
            port=port, path=path, host=host, url=url, access=text, expires_at=ends, public=made is None, wake=wake
        )

    def host_of(self, sandbox: str, port: int) -> str | None:
        """Return the host of a port, with the port of the domain; None without a domain for ports."""
        return None if self._settings.domain is None else f"{port}-{sandbox}.{self._settings.authority}"

    # visitors

    async def admits(self, sandbox: str, port: int, text: str) -> Visitor:
        """Return who shows an access; `Unauthorized`."""
        found = accesses.read(text, self._key)
        if found is None or (found.sandbox, found.port) != (sandbox, port):
            raise _refused("is not for this port, or another server made it")
        if found.expires_at <= time.time():
            raise _refused("has expired")
        return Visitor(await self._made_by(found.token_id), "url", float(found.expires_at), found.wake)

    async def admits_anyone(self, sandbox: str, port: int) -> Visitor:
        """Return a visitor without an access; `Unauthorized` unless the port is public."""
        found = await self._made_public(sandbox, port) if self._settings.allow_public else None
        if found is None:
            raise Unauthorized(
                "this port is private",
                field="Carrel-Access",
                hint="ask for a URL of it, or send `Authorization: Bearer TOKEN` with a token that may use the sandbox",
            )
        return Visitor(await self._made_by(found.token_id or ""), "public", None, found.wake)

    async def _made_public(self, sandbox: str, port: int) -> PublicPort | None:
        known = self._public.get((sandbox, port))
        if known is None:
            known = (await self._store.get(sandbox, port),)
            self._public.put((sandbox, port), known)
        return known[0]

    async def _made_by(self, token_id: str) -> Identity:
        return await self._tokens.of_id(token_id) if token_id else ROOT

    # reaching

    @asynccontextmanager
    async def reach(
        self, caller: Caller, name: str, port: int, operation: Operation, *, protocol: str, wake: bool = False
    ) -> AsyncIterator[tuple[SupervisorStream, Traffic]]:
        """Admit a connection to a port, and open it for the length of the block. With `wake`, a stopped sandbox is
        started first.
        """
        if wake and self._sessions.find_live(name) is None:
            await self._start(caller, name)
        arguments: Mapping[str, object] = {"port": port, "protocol": protocol}
        async with self._operations.enter(caller, name, operation, arguments) as (box, traffic):
            _require_own_network(box, self._own_networks)
            with self._counted(box):
                stream = await box.connection.open_port(port)
                try:
                    yield stream, traffic
                finally:
                    stream.close()

    async def _start(self, caller: Caller, name: str) -> None:
        try:
            record = await self._sessions.record(name)
            if record.context_id is not None:
                await self._operations.deploy_or_resume(caller, SandboxRequest(context_id=record.context_id))
        except NotFound:
            raise NotRunning("this sandbox has ended", field="id") from None

    def _counted(self, box: LiveSandbox) -> _PortPlace:
        return _PortPlace(self._open, box.instance)


class _PortPlace:
    """One of the connections that a sandbox may have."""

    def __init__(self, open_: dict[str, int], instance: str):
        self._open = open_
        self._instance = instance

    def __enter__(self) -> None:
        if self._open.get(self._instance, 0) >= MOST_AT_ONCE:
            raise LimitExceeded(
                f"more than {MOST_AT_ONCE} connections to the ports of this sandbox at once",
                hint="wait until some of them end",
            )
        self._open[self._instance] = self._open.get(self._instance, 0) + 1

    def __exit__(self, *_: object) -> None:
        left = self._open[self._instance] - 1
        if left:
            self._open[self._instance] = left
        else:
            del self._open[self._instance]


def _require_own_network(box: LiveSandbox, known: dict[str, bool]) -> None:
    """Refuse a sandbox whose loopback is the host's: its ports are those of other programs. `known` says which
    providers give sandboxes a network of their own; to ask one takes a while.
    """
    if (own := known.get(box.record.provider)) is None:
        own = known[box.record.provider] = Capability.NETWORK_NONE in box.provider.capabilities()
    if box.record.network is Network.HOST or not own:
        raise Unsupported(
            "this sandbox has the network of the host, so its ports are the host's",
            field="port",
            hint="use a sandbox with a network of its own",
        )


def _refused(why: str) -> Unauthorized:
    return Unauthorized(f"this URL of a port {why}", field="Carrel-Access", hint="ask for a new one")
