from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from carrel.errors import InvalidRequest, PlatformError
from carrel.primitives.spiffe import SpiffeId, Svid
from carrel.spiffe.authority import CertificateAuthority
from carrel.spiffe.identities import Identities
from carrel.spiffe.identity import NodeIdentity, OwnSource

AUTHORITY = CertificateAuthority(b"k" * 32, "a.test")
ME = SpiffeId.node("a.test", "me")


async def until(identity: NodeIdentity, former: Svid) -> None:
    async with asyncio.timeout(20):
        while identity.svid is former:
            await asyncio.sleep(0.02)


async def test_it_is_renewed_at_half_of_its_life_until_it_is_revoked() -> None:
    identity = await NodeIdentity.open(ME, OwnSource(AUTHORITY, ME, 2))
    try:
        first = identity.svid
        await until(identity, first)
        assert first.expires_at > identity.svid.issued_at, "it was renewed before it expired"
        identity.revoke()
        last = identity.svid
        await asyncio.wait_for(asyncio.shield(identity._renewing), 20)  # type: ignore[arg-type]
        assert identity.svid is last and identity.revoked
    finally:
        await identity.close()


class Failing(OwnSource):
    """Fails some times, then gives the SVID of somebody else, then works."""

    answers = 0

    async def later(self, svid: Svid) -> Svid:
        self.answers += 1
        if self.answers <= 2:
            raise PlatformError("not now")
        if self.answers == 3:
            return AUTHORITY.issue(SpiffeId.node("a.test", "other"), 60)
        return await super().later(svid)


async def test_a_renewal_that_fails_is_tried_again_and_the_former_one_stays() -> None:
    source = Failing(AUTHORITY, ME, 2)
    identity = await NodeIdentity.open(ME, source)
    try:
        await until(identity, identity.svid)
        assert source.answers >= 4 and identity.svid.id == str(ME)
    finally:
        await identity.close()


async def test_an_identity_of_somebody_else_is_refused() -> None:
    other = SpiffeId.node("a.test", "other")
    with pytest.raises(PlatformError, match=r"should be spiffe://a\.test/carrel/node/me"):
        await NodeIdentity.open(ME, OwnSource(AUTHORITY, other, 60))
    with pytest.raises(PlatformError, match="cannot be used"):
        NodeIdentity(ME, OwnSource(AUTHORITY, ME, 60), replace(AUTHORITY.issue(ME, 60), bundle="x"))


async def test_a_name_that_cannot_be_part_of_an_id_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot have a SPIFFE ID") as caught:
        await Identities.open(
            "carrel", seed=b"k" * 32, node="a b", trust_domain="a.test", lifetime_s=60, agent_socket=""
        )
    assert caught.value.field == "node"
