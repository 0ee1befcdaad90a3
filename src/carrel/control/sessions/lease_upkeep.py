"""What follows from leases: those on running sandboxes are kept, lost sandboxes are given up, and the sessions of
servers that fell silent are settled.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from carrel.control.sessions.attachments import Attachments
from carrel.control.sessions.leases import Ownership
from carrel.control.sessions.lifecycle import LIVE, Event, next_state
from carrel.control.sessions.live import LiveSandbox, LiveSandboxes
from carrel.errors import RunsElsewhere
from carrel.models import State
from carrel.store import SessionStore

log = logging.getLogger("carrel.leasing")


class Leasing:
    """The upkeep of the leases of one server."""

    def __init__(self, live: LiveSandboxes, store: SessionStore, ownership: Ownership, attachments: Attachments):
        self._live = live
        self._store = store
        self._ownership = ownership
        self._attachments = attachments

    async def renew(self) -> None:
        """Keep the leases on what runs here; what another server took is given up."""
        held, deadline = await self._ownership.renew()
        for box in self._live.all():
            if held.get(box.record.id) == box.record.fence:
                box.leased_until = deadline
            elif self._live.has(box):
                await self._renew_late(box)

    async def _renew_late(self, box: LiveSandbox) -> None:
        """The lease has ended: it may be had again, unless another server has the session or ended it for good."""
        began = time.monotonic()
        try:
            taken = await self._ownership.take(box.record)
        except RunsElsewhere as error:
            log.warning("sandbox %s is given up: %s", box.record.id, error)
            await self._live.end(box, self._attachments)
            return
        now = await self._store.get(box.record.id)
        if now is None or now.node != self._ownership.node or now.state not in {State.RUNNING, State.STOPPED}:
            if self._live.has(box) and (now is None or now.state not in LIVE):
                await self._live.end(box, self._attachments)
                await self._store.update(box.record.id, fence=taken.fence, release=True)
            return
        # Stopped by another server that thought this one dead, and resumed by none: it never stopped.
        if now.state is State.STOPPED:
            running = {"state": State.RUNNING, "handle": box.handle, "end_reason": None, "notice": None}
            await self._store.update(box.record.id, running, fence=taken.fence)
        box.record = replace(box.record, fence=taken.fence)
        box.leased_until = self._ownership.deadline(began)

    async def settle_abandoned(self) -> None:
        """End the sessions of servers that fell silent; their files come from the archive when they are resumed."""
        for session_id in await self._ownership.abandoned():
            record = await self._store.get(session_id)
            if record is None or record.state not in LIVE:
                continue
            revoked = await self._ownership.revoke(record)
            if revoked is None:
                continue
            words = f"server '{record.node}' fell silent"
            log.warning("session %s: %s", record.id, words)
            await self._store.update(
                record.id,
                fence=revoked.fence,
                state=next_state(record.state, Event.TERMINATE if record.ephemeral else Event.STOP),
                handle=None,
                end_reason=words,
                notice=None if record.ephemeral else words,
            )
