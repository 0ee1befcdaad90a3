"""SVIDs from SPIRE: its agent on this machine sends them over the Workload API, and again whenever they change."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from carrel.errors import PlatformError
from carrel.extras import ExtraMissing, using
from carrel.primitives.spiffe import SpiffeId, Svid

if TYPE_CHECKING:
    from spiffe import WorkloadApiClient
    from spiffe.workloadapi.workload_api_client import StreamCancelHandler
    from spiffe.workloadapi.x509_context import X509Context

FETCH_S = 15.0


class SpireSource:
    """The SVID of one ID from the agent behind a socket. Its library works in threads of its own."""

    def __init__(self, agent_socket: str, id: SpiffeId):
        try:
            with using("spiffe"):
                from spiffe import WorkloadApiClient
        except ExtraMissing as missing:
            raise PlatformError(missing.detail, field="spiffe.source", hint=missing.hint) from None
        self._socket = agent_socket
        self._id = id
        try:
            self._client: WorkloadApiClient = WorkloadApiClient(f"unix://{agent_socket}")
        except Exception as error:
            raise self._refused(error) from error
        self._stream: StreamCancelHandler | None = None
        self._told: asyncio.Queue[X509Context | Exception] = asyncio.Queue()

    async def fetch(self) -> Svid:
        """See `Source`."""
        try:
            return self._svid(await asyncio.to_thread(self._client.fetch_x509_context, FETCH_S))
        except PlatformError:
            raise
        except Exception as error:  # the library has many kinds of errors, and those of gRPC
            raise self._refused(error) from error

    async def later(self, svid: Svid) -> Svid:
        """See `Source`."""
        while True:
            if self._stream is None:
                tell = partial(self._tell, asyncio.get_running_loop())
                self._stream = self._client.stream_x509_contexts(tell, tell)
            told = await self._told.get()
            if isinstance(told, Exception):
                self._stream = None  # it has ended
                raise self._refused(told) from told
            found = self._svid(told)
            if (found.chain, found.bundle) != (svid.chain, svid.bundle):
                return found

    def _tell(self, loop: asyncio.AbstractEventLoop, told: X509Context | Exception) -> None:
        """Called in a thread of the library."""
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._told.put_nowait, told)

    async def close(self) -> None:
        """See `Source`."""
        if self._stream is not None:
            self._stream.cancel()
        await asyncio.to_thread(self._client.close)

    def _refused(self, error: Exception) -> PlatformError:
        return PlatformError(
            f"the SPIRE agent at {self._socket} gave no SVID: {str(error)[:300]}",
            field="spiffe.agent_socket",
            hint=f"start the agent, and create a registration entry for {self._id}",
        )

    def _svid(self, context: X509Context) -> Svid:
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
        from spiffe import TrustDomain

        svid = next((each for each in context.x509_svids if str(each.spiffe_id) == str(self._id)), None)
        bundle = context.x509_bundle_set.get_bundle_for_trust_domain(TrustDomain(self._id.trust_domain))
        if svid is None or bundle is None:
            got = ", ".join(str(each.spiffe_id) for each in context.x509_svids)
            raise PlatformError(
                f"the SPIRE agent gave the SVIDs of {got[:300] or 'nobody'}, and this server should be {self._id}",
                field="spiffe.source",
                hint="correct the registration entry, CARREL_NODE or CARREL_SPIFFE_TRUST_DOMAIN",
            )
        key = svid.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Svid(
            id=str(self._id),
            chain="".join(each.public_bytes(Encoding.PEM).decode() for each in svid.cert_chain),
            key=key.decode(),
            bundle="".join(sorted(each.public_bytes(Encoding.PEM).decode() for each in bundle.x509_authorities)),
            issued_at=svid.leaf.not_valid_before_utc.timestamp(),
            expires_at=svid.leaf.not_valid_after_utc.timestamp(),
        )
