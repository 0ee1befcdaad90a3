"""Identities of sandboxes that are reached over a network, for providers that start them on other machines.

They come from carrel's own authority, also where servers have theirs from SPIRE: a server cannot ask SPIRE for an SVID
of another workload. A server trusts the authority for sandboxes only as far as it expects one exact ID.
"""

from __future__ import annotations

import ssl
from dataclasses import replace

from carrel.primitives.spiffe import SpiffeId, Svid, client_context
from carrel.spiffe.authority import CertificateAuthority
from carrel.spiffe.identity import NodeIdentity

SLOT_LIFETIME_S = 7 * 86_400.0
"""How long the credentials of a slot are valid, unless the provider says otherwise: it may wait that long."""


class SandboxIdentities:
    """Makes credentials for supervisors, and contexts to connect to them."""

    def __init__(self, authority: CertificateAuthority, node: NodeIdentity, lifetime_s: float):
        self._authority = authority
        self._node = node
        self.lifetime_s = lifetime_s
        self._made_of: Svid | None = None
        self._context: ssl.SSLContext | None = None

    def id_of(self, sandbox: str) -> SpiffeId:
        """Return the ID of a sandbox. `ValueError` for an id that cannot be part of one."""
        return SpiffeId.sandbox(self._authority.trust_domain, sandbox)

    def id_of_slot(self, slot: str) -> SpiffeId:
        """Return the ID of a supervisor that has no owner yet. Several may share one."""
        return SpiffeId.slot(self._authority.trust_domain, slot)

    def for_sandbox(self, sandbox: str) -> Svid:
        """Return new credentials for the supervisor of a sandbox. It accepts servers by their own trust bundle."""
        return self._issue(self.id_of(sandbox), self.lifetime_s)

    def renewed(self, id: SpiffeId) -> Svid:
        """Return a new SVID for a supervisor that has this ID."""
        return self._issue(id, self.lifetime_s)

    def for_slot(self, slot: str, lifetime_s: float = SLOT_LIFETIME_S) -> Svid:
        """Return the credentials with which a supervisor waits for its owner. They are of no use afterwards."""
        return self._issue(self.id_of_slot(slot), lifetime_s)

    def _issue(self, id: SpiffeId, lifetime_s: float) -> Svid:
        # The peers of a supervisor are servers, whose certificates may come from elsewhere.
        return replace(self._authority.issue(id, lifetime_s), bundle=self._node.svid.bundle)

    def client_context(self) -> ssl.SSLContext:
        """Return the context for connections to supervisors: this server's SVID, and the authority of sandboxes."""
        svid = self._node.svid
        if self._context is None or self._made_of is not svid:
            self._context = client_context(replace(svid, bundle=self._authority.bundle))
            self._made_of = svid
        return self._context
