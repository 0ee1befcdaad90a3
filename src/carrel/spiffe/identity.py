"""The identity of this server: current credentials, TLS contexts made of them, and renewal well before they expire.

Where they come from is a `Source`. Knows no other server.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Protocol

from carrel.errors import CarrelError, PlatformError
from carrel.primitives import tasks
from carrel.primitives.spiffe import SpiffeId, Svid, client_context, server_context
from carrel.spiffe.authority import CertificateAuthority

log = logging.getLogger("carrel.spiffe")

RENEWED_AFTER = 0.5
"""The part of its life after which an SVID is renewed: the other half is for attempts that fail."""
MOST_PAUSE_S, LEAST_PAUSE_S = 30.0, 0.2
_PARTS = 10
"""A failed renewal is tried again after this part of the life that is left."""


class Source(Protocol):
    """Gives this server credentials."""

    async def fetch(self) -> Svid:
        """Return credentials of the ID that this server has. Raises `CarrelError`."""

    def changed(self) -> Coroutine[None, None, None]:
        """Return when credentials other than the last ones should be fetched, before they are due: a source may have a
        new bundle.
        """

    async def close(self) -> None:
        """Release what it has."""


class OwnSource:
    """SVIDs from carrel's own authority."""

    def __init__(self, authority: CertificateAuthority, id: SpiffeId, lifetime_s: float):
        self._authority = authority
        self._id = id
        self._lifetime_s = lifetime_s

    async def fetch(self) -> Svid:
        """See `Source`."""
        return self._authority.issue(self._id, self._lifetime_s)

    async def changed(self) -> None:
        """See `Source`."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """See `Source`."""


class NodeIdentity:
    """The identity of this server. It is renewed until `keep` ends or `revoke` is called."""

    def __init__(self, id: SpiffeId, source: Source, first: Svid):
        self.id = id
        self._source = source
        self._revoked = False
        self.take(first)

    @classmethod
    async def open(cls, id: SpiffeId, source: Source) -> NodeIdentity:
        """Fetch the first credentials. Raises `CarrelError`: nothing goes on without."""
        return cls(id, source, await source.fetch())

    def take(self, credentials: Svid) -> None:
        """Use other credentials from now on. Raises `PlatformError` if they are not of this server."""
        if credentials.id != str(self.id):
            raise PlatformError(
                f"this server got the identity {credentials.id}, and should be {self.id}",
                field="identity",
                hint="correct the registration entry in SPIRE, CARREL_NODE or CARREL_IDENTITY_TRUST_DOMAIN",
            )
        try:
            self._client, self._server = client_context(credentials), server_context(credentials)
        except ValueError as error:
            raise PlatformError(str(error), field="identity") from None
        self.credentials = credentials

    def client_context(self) -> ssl.SSLContext:
        """Return the context for connections to others."""
        return self._client

    def server_context(self) -> ssl.SSLContext:
        """Return the context for connections from others."""
        return self._server

    def revoke(self) -> None:
        """Never renew it again."""
        self._revoked = True

    @property
    def revoked(self) -> bool:
        """Whether it is not renewed any more."""
        return self._revoked

    @property
    def expires_in_s(self) -> float:
        """The seconds until it expires; negative afterwards."""
        return self.credentials.expires_at - time.time()

    @asynccontextmanager
    async def keep(self) -> AsyncIterator[None]:
        """Renew it while the block runs."""
        task = asyncio.ensure_future(self._renew())
        try:
            yield
        finally:
            await tasks.cancel((task,))
            await self._source.close()

    async def _renew(self) -> None:
        while not self._revoked:
            life = self.credentials.expires_at - self.credentials.issued_at
            due = self.credentials.issued_at + life * RENEWED_AFTER - time.time()
            await _first(self._source.changed(), max(LEAST_PAUSE_S, due))
            while not self._revoked:
                try:
                    self.take(await self._source.fetch())
                    break
                except CarrelError as error:
                    log.warning("the identity of this server could not be renewed: %s", error)
                    pause = max(0.0, self.expires_in_s) / _PARTS
                    await asyncio.sleep(min(MOST_PAUSE_S, max(LEAST_PAUSE_S, pause)))


async def _first(changed: Coroutine[None, None, None], seconds: float) -> None:
    """Wait for a change, or for some seconds."""
    task = asyncio.ensure_future(changed)
    try:
        await asyncio.wait((task,), timeout=seconds)
    finally:
        await tasks.cancel((task,))
