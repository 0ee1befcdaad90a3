"""Which server has a session: takes leases, keeps them, and finds out when one is lost.

Decides nothing about sandboxes: what follows from a lost lease is done by `sessions`.
"""

from __future__ import annotations

import time
from dataclasses import replace

from carrel.errors import RunsElsewhere
from carrel.store import SessionRecord
from carrel.store.leases import LeaseStore


class Ownership:
    """The leases of one server."""

    def __init__(self, leases: LeaseStore, node: str, seconds: float):
        self._leases = leases
        self.node = node
        self.seconds = seconds

    @property
    def lease(self) -> tuple[str, float]:
        """What a new session is inserted with."""
        return self.node, self.seconds

    def deadline(self, asked_at: float) -> float:
        """Until when a lease asked for at that moment (monotonic) surely holds."""
        return asked_at + self.seconds

    async def take(self, record: SessionRecord, *, anew: bool = False) -> SessionRecord:
        """Take the lease on a session; `RunsElsewhere` when another server has it."""
        fence = await self._leases.acquire(record.id, self.node, self.seconds, anew=anew)
        if fence is None:
            lease = await self._leases.get(record.id)
            owner = lease.owner if lease else "another server"
            raise RunsElsewhere(
                f"session '{record.owner}' is on server '{owner}'",
                field="id",
                hint=f"ask server '{owner}', or wait until it has stopped the session",
                node=owner,
            )
        return replace(record, fence=fence, lease_owner=self.node)

    async def renew(self) -> tuple[dict[str, int], float]:
        """Extend every lease of this server; the sessions it has with their fences, and until when (monotonic)."""
        began = time.monotonic()
        return await self._leases.renew_all(self.node, self.seconds), self.deadline(began)

    async def hand_back(self, record: SessionRecord, to: str) -> None:
        """Undo the taking of a lease from a server that fell silent."""
        await self._leases.hand_back(record.id, self.node, record.fence, to)

    async def abandoned(self) -> list[str]:
        """Sessions whose server fell silent: their lease ended, and nobody took it for as long again."""
        return [
            lease.session_id for lease in await self._leases.expired(grace=self.seconds) if lease.owner != self.node
        ]

    async def revoke(self, record: SessionRecord) -> SessionRecord | None:
        """Shut a silent server out of a session, without taking the session; None when it is back or another was
        quicker.
        """
        fence = await self._leases.revoke(record.id, record.fence)
        return None if fence is None else replace(record, fence=fence)
