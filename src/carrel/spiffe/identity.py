"""The identity of this server: its current SVID, TLS contexts made of them, and renewal well before they expire.

Where they come from is a `Source`. Knows no other server.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from typing import Protocol

from carrel.errors import CarrelError, PlatformError
from carrel.primitives import tasks
from carrel.primitives.spiffe import SpiffeId, Svid, client_context, server_context
from carrel.spiffe.authority import CertificateAuthority

log = logging.getLogger("carrel.spiffe")

RENEWED_AFTER = 0.5
"""The part of its life after which an SVID is renewed: the other half is for attempts that fail."""
MOST_PAUSE_S, LEAST_PAUSE_S = 30.0, 0.2
"""The bounds of the pause after a renewal that failed."""
_PARTS = 10
"""A failed renewal is tried again after this part of the life that is left."""


class Source(Protocol):
    """Gives this server its SVIDs."""

    async def fetch(self) -> Svid:
        """Return the SVID that this server has now. Raises `CarrelError`."""

    async def later(self, svid: Svid) -> Svid:
        """Wait until there is another one than this, well before it expires, and return it. Raises `CarrelError`."""

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

    async def later(self, svid: Svid) -> Svid:
        """See `Source`."""
        due = svid.issued_at + (svid.expires_at - svid.issued_at) * RENEWED_AFTER - time.time()
        await asyncio.sleep(max(LEAST_PAUSE_S, due))
        return self._authority.issue(self._id, self._lifetime_s)

    async def close(self) -> None:
        """See `Source`."""


class NodeIdentity:
    """The identity of this server. It is renewed until it is closed or revoked."""

    def __init__(self, id: SpiffeId, source: Source, first: Svid):
        self.id = id
        self._source = source
        self._revoked = False
        self._renewing: asyncio.Future[None] | None = None
        self.take(first)

    @classmethod
    async def open(cls, id: SpiffeId, source: Source) -> NodeIdentity:
        """Fetch the first SVID, and renew it from now on. Raises `CarrelError`: nothing goes on without."""
        try:
            opened = cls(id, source, await source.fetch())
        except BaseException:
            await source.close()
            raise
        opened._renewing = asyncio.ensure_future(opened._renew())
        return opened

    def take(self, svid: Svid) -> None:
        """Use another SVID for new connections. Raises `PlatformError` if they are not of this server."""
        if svid.id != str(self.id):
            raise PlatformError(
                f"this server got the identity {svid.id}, and should be {self.id}",
                field="spiffe.source",
                hint="correct the registration entry in SPIRE, CARREL_NODE or CARREL_SPIFFE_TRUST_DOMAIN",
            )
        try:
            self._client, self._server = client_context(svid), server_context(svid)
        except ValueError as error:
            raise PlatformError(str(error), field="spiffe.source") from None
        self.svid = svid

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
        return self.svid.expires_at - time.time()

    async def close(self) -> None:
        """Renew it no more."""
        await tasks.cancel((self._renewing,))
        await self._source.close()

    async def _renew(self) -> None:
        while not self._revoked:
            try:
                svid = await self._source.later(self.svid)
                if not self._revoked:
                    self.take(svid)
            except CarrelError as error:
                log.warning("the SVID of this server could not be renewed: %s", error)
                pause = max(0.0, self.expires_in_s) / _PARTS
                await asyncio.sleep(min(MOST_PAUSE_S, max(LEAST_PAUSE_S, pause)))
