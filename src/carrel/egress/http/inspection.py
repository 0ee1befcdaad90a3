"""Opens the TLS of a tunnel to an inspected host, so that each request inside can be decided.

The client sees a certificate of the sandbox's own authority; the certificate of the host is verified here. The relay
serves the requests inside.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from functools import cached_property, partial
from weakref import WeakKeyDictionary

from carrel.egress.access import Access, AccessRefused, Target
from carrel.egress.http import answers
from carrel.egress.http.authority import Authority, host_roots
from carrel.egress.http.credentials import Credentials
from carrel.egress.http.relay import Relay, Tunnel
from carrel.egress.http.streams import TlsStream, accept_tls, begin_tls
from carrel.egress.outbound.connections import Outbound
from carrel.egress.plan import Injected
from carrel.egress.sockets import IDLE_S, close_after_delivery, send
from carrel.errors import InvalidRequest

_MOST_FORMER = 32


class Inspection:
    """An `outbound.Inspect`; one for the whole process."""

    def __init__(self, *, roots: str | None = None, idle_s: float = IDLE_S):
        """`roots`: certificate authorities, as PEM, that are trusted beside those of this host. Raises `InvalidRequest`
        when they cannot be read.
        """
        if roots is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=roots)
            except (ssl.SSLError, ValueError):
                raise InvalidRequest(
                    "the roots to trust cannot be read", field="roots", hint="give certificates in PEM"
                ) from None
        self._roots = roots
        self._idle_s = idle_s
        self._authorities: WeakKeyDictionary[Outbound, tuple[str, Authority]] = WeakKeyDictionary()
        self._credentials: WeakKeyDictionary[Outbound, tuple[tuple[Injected, ...], Credentials]] = WeakKeyDictionary()

    async def __call__(
        self, client: socket.socket, upstream: socket.socket, target: Target, outbound: Outbound, tunnel: Access
    ) -> None:
        """Serve a tunnel to its end. Raises `AccessRefused` when TLS cannot begin, `OSError` and `TimeoutError`."""
        try:
            context = self.authority(outbound).context(target.host)
        except AccessRefused as refusal:
            await send(client, answers.alert(refusal))
            await close_after_delivery(client)
            raise
        loop = asyncio.get_running_loop()
        ours: TlsStream | None = None
        theirs: TlsStream | None = None
        try:
            async with asyncio.timeout(self._idle_s) as limit:

                def moved() -> None:
                    if not limit.expired():
                        limit.reschedule(loop.time() + self._idle_s)

                try:
                    ours = await accept_tls(client, context, moved)
                except OSError as error:
                    raise _not_trusted(target, error) from None
                server: TlsStream | AccessRefused
                try:
                    server = theirs = await begin_tls(upstream, self._outward, target.host, moved)
                except OSError as error:  # the relay answers with it inside the TLS, where the client can read it
                    server = _no_tls(target, error)
                credentials = partial(self.credentials, outbound)
                await Relay(ours, outbound, Tunnel(target, tunnel, server, credentials)).serve()
                await close_after_delivery(client)
        finally:
            for stream in (ours, theirs):
                if stream is not None:
                    stream.abort()

    def authority(self, outbound: Outbound) -> Authority:
        """Return the authority of a sandbox. Raises `AccessRefused` when it has none."""
        pem = outbound.plan.authority
        if pem is None:
            raise AccessRefused(
                "the host is to be inspected, and this sandbox was made without a certificate authority"
            )
        known = self._authorities.get(outbound)
        if known is None or known[0] != pem:
            known = self._authorities[outbound] = (pem, Authority(pem))
        return known[1]

    def credentials(self, outbound: Outbound) -> Credentials:
        """Return the credentials of a sandbox. Those that a new plan removed are still redacted."""
        injected = outbound.plan.injected
        known, credentials = self._credentials.get(outbound, ((), None))
        if credentials is None or known != injected:
            former = () if credentials is None else credentials.known[-_MOST_FORMER:]
            credentials = Credentials(injected, former)
            self._credentials[outbound] = injected, credentials
        return credentials

    @cached_property
    def _outward(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=host_roots())
        if self._roots is not None:
            context.load_verify_locations(cadata=self._roots)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        return context


def _not_trusted(target: Target, error: OSError) -> AccessRefused:
    reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else "the connection ended"
    return AccessRefused(
        f"the TLS for {target} was not accepted by the client: {reason.lower().replace('_', ' ')}",
        code="tls_failed",
        status=502,
        hint="programs must trust the certificates in the file that SSL_CERT_FILE names",
    )


def _no_tls(target: Target, error: OSError) -> AccessRefused:
    if isinstance(error, ssl.SSLCertVerificationError):
        reason, hint = f"its certificate is not valid: {error.verify_message}", "the operator can add roots to trust"
    elif isinstance(error, ssl.SSLError):
        reason, hint = (error.reason or "it does not answer in TLS").lower().replace("_", " "), None
    else:
        reason, hint = "the connection ended", None
    return AccessRefused(f"no TLS with {target}: {reason}", code="tls_failed", status=502, hint=hint)
