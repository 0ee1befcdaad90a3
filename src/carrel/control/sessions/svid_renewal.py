"""Renews the SVIDs of running sandboxes on other machines, and tells their supervisors which servers are revoked.

A sandbox gets its first SVID from its provider, before anything can connect to it; so this is no attachment. Each start
gives a new one, also of a fork or from a snapshot, because each is another supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from carrel.control.nodes.registry import Nodes
from carrel.control.sessions.live import LiveSandbox, LiveSandboxes
from carrel.errors import CarrelError
from carrel.primitives.spiffe import SpiffeId
from carrel.providers.links import RemoteLink

if TYPE_CHECKING:
    from carrel.spiffe.identities import Identities

log = logging.getLogger("carrel.spiffe")

LOOK_EVERY_S = 20.0
_AT_ONCE = 8


def look_every(lifetime_s: float) -> float:
    """Return the seconds between two looks for SVIDs that are due."""
    return min(LOOK_EVERY_S, lifetime_s / 8)


class SvidRenewal:
    """Renews what is due: half of its life is over, or this server does not know, or another server was revoked."""

    def __init__(self, live: LiveSandboxes, nodes: Nodes, identities: Identities | None):
        self._live = live
        self._nodes = nodes
        self._identities = identities
        self._done: dict[str, tuple[float, frozenset[str]]] = {}
        """When each instance got its SVID (monotonic), and the servers that it refuses."""

    async def renew(self) -> None:
        """Renew every SVID that is due. A failure is logged, and tried again the next time."""
        if self._identities is None:
            return
        boxes = [(box, link) for box in self._live.all() if isinstance(link := box.link, RemoteLink)]
        self._done = {box.instance: self._done[box.instance] for box, _ in boxes if box.instance in self._done}
        due = time.monotonic() - self._identities.sandboxes.lifetime_s / 2
        revoked = self._nodes.revoked
        slots = asyncio.Semaphore(_AT_ONCE)

        async def one(box: LiveSandbox, id: SpiffeId) -> None:
            async with slots:
                await self._renew(box, id, revoked)

        await asyncio.gather(
            *(
                one(box, link.address.id)
                for box, link in boxes
                if (known := self._done.get(box.instance)) is None or known[0] < due or known[1] != revoked
            )
        )

    async def _renew(self, box: LiveSandbox, id: SpiffeId, revoked: frozenset[str]) -> None:
        assert self._identities is not None
        began = time.monotonic()
        domain = self._identities.node.id.trust_domain
        try:
            svid = await asyncio.to_thread(self._identities.sandboxes.renewed, id)
            await box.connection.put_identity(svid, [str(SpiffeId.node(domain, name)) for name in sorted(revoked)])
        except CarrelError as error:
            log.warning("the SVID of sandbox %s could not be renewed: %s", box.record.id, error)
        else:
            self._done[box.instance] = began, revoked
