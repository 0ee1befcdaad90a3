"""Puts the parts of a server's SPIFFE identities together, as its settings say. Reads no setting itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from carrel.errors import InvalidRequest
from carrel.primitives.spiffe import SpiffeId
from carrel.spiffe.authority import CertificateAuthority
from carrel.spiffe.identity import NodeIdentity, OwnSource, Source
from carrel.spiffe.sandboxes import SandboxIdentities


@dataclass(frozen=True)
class Identities:
    """The identity of this server, and what it needs to give sandboxes theirs."""

    authority: CertificateAuthority
    node: NodeIdentity
    sandboxes: SandboxIdentities

    @classmethod
    async def open(
        cls,
        kind: Literal["carrel", "spire"],
        *,
        seed: bytes,
        node: str,
        trust_domain: str,
        lifetime_s: float,
        agent_socket: str,
    ) -> Identities:
        """Get the first SVID of this server, and renew it from now on. `seed` is secret, and the same on all servers of
        a database. Raises `CarrelError`.
        """
        try:
            id = SpiffeId.node(trust_domain, node)
        except ValueError as error:
            raise InvalidRequest(
                f"this server cannot have a SPIFFE ID: {error}",
                field="node",
                hint="set CARREL_NODE to letters, digits and ._-",
            ) from None
        authority = CertificateAuthority(seed, trust_domain)
        source: Source
        if kind == "spire":
            from carrel.spiffe.spire import SpireSource

            source = SpireSource(agent_socket, id)
        else:
            source = OwnSource(authority, id, lifetime_s)
        identity = await NodeIdentity.open(id, source)
        return cls(authority, identity, SandboxIdentities(authority, identity, lifetime_s))

    async def close(self) -> None:
        """Renew nothing more."""
        await self.node.close()
