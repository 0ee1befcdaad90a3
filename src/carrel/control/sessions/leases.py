"""Leases: they say which server owns a session. Takes and renews leases, notices when one is lost, and ends the
sessions of servers that no longer answer.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from carrel.control.nodes.workers import Worker
from carrel.control.sessions.attachments import Attachments
from carrel.control.sessions.lifecycle import LIVE, Event, next_state
from carrel.control.sessions.live import LiveSandbox, LiveSandboxes
from carrel.errors import RunsElsewhere
from carrel.models import State
from carrel.store import SessionRecord, SessionStore
from carrel.store.leases import LeaseStore

log = logging.getLogger("carrel.leases")


class Leases:
    """The leases of one server, or of one of its workers.

    After a time without the database, a server cannot tell a dead server from one that had no database either. So for
    one lease it takes over no sandbox whose lease ended in that time: its owner may be back, with newer files. The same
    holds after its own start, as all servers may have lost power. `shared`: the database may have other servers.
    """

    def __init__(self, leases: LeaseStore, worker: Worker, seconds: float, *, shared: bool):
        self._leases = leases
        self._worker = worker
        self.node = worker.name
        self.server = worker.server
        """The name under which sessions have their files: all workers of a server share them."""
        self.seconds = seconds
        self._shared = shared
        self._renewed = self._connected = time.monotonic()
        """When the leases were last renewed, and since when that has never taken too long."""

    @property
    def lease(self) -> tuple[str, float]:
        """The owner and duration for a new session."""
        return self.node, self.seconds

    def deadline(self, asked_at: float) -> float:
        """Return until when (monotonic) a lease that was requested at that moment is surely valid."""
        return asked_at + self.seconds

    async def take(self, record: SessionRecord, *, anew: bool = False, own: bool = False) -> SessionRecord:
        """Take the lease of a session; `RunsElsewhere` when another server has it. `own`: this server ran it last, and
        goes on only if no other took it over since, even if that one is gone too.
        """
        dead = record.lease_owner if anew and self._worker.recovers(record.lease_owner) else None
        waits = self._waits and record.lease_owner not in self._worker.names
        within = self._connected_s if waits else None
        fence = await self._leases.acquire(
            record.id,
            self.node,
            self.seconds,
            anew=anew,
            dead=dead,
            ended_within=within,
            files_on=self.server if own else None,
        )
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

    async def owner(self, record: SessionRecord) -> str | None:
        """Return the server that has the lease of a session now, by the clock of the database."""
        return await self._leases.owner(record.id)

    async def renew(self) -> tuple[dict[str, int], float]:
        """Renew every lease of this server. Return its sessions with their fences, and until when (monotonic)."""
        began = time.monotonic()
        held = await self._leases.renew_all(self.node, self.seconds)
        now = time.monotonic()
        if self._is_late(now):
            self._connected = now
        self._renewed = now
        return held, self.deadline(began)

    def _is_late(self, now: float) -> bool:
        """Whether the leases were not renewed for so long that those of other servers may have ended meanwhile: they
        had two thirds of their time left at least.
        """
        return now - self._renewed > self.seconds / 2

    @property
    def _connected_s(self) -> float:
        now = time.monotonic()
        return 0.0 if self._is_late(now) else now - self._connected

    @property
    def _waits(self) -> bool:
        """Whether this server waits for others that may be back."""
        return self._shared and self._connected_s < self.seconds

    async def hand_back(self, record: SessionRecord, to: str) -> None:
        """Give a lease back to the silent server from which it was taken."""
        await self._leases.hand_back(record.id, self.node, record.fence, to)

    async def abandoned(self) -> list[str]:
        """Return the sessions of silent servers: their lease ended, and nobody took it for the same time again."""
        if self._waits:
            return []
        here = self._worker.names  # a worker that hangs is replaced, and its sandboxes run on
        found = await self._leases.expired(grace=self.seconds)
        return [lease.session_id for lease in found if lease.owner not in here]

    async def revoke(self, record: SessionRecord) -> SessionRecord | None:
        """Fence a silent server off from a session, without taking the session; None when it is back, or another server
        was quicker.
        """
        fence = await self._leases.revoke(record.id, record.fence)
        return None if fence is None else replace(record, fence=fence)


class LeaseUpkeep:
    """The upkeep of the leases of one server."""

    def __init__(self, live: LiveSandboxes, store: SessionStore, leases: Leases, attachments: Attachments):
        self._live = live
        self._store = store
        self._leases = leases
        self._attachments = attachments

    async def renew(self) -> None:
        """Renew the leases of running sandboxes; give up those that another server took."""
        held, deadline = await self._leases.renew()
        for box in self._live.all():
            if held.get(box.record.id) == box.record.fence:
                box.leased_until = deadline
            elif self._live.has(box):
                await self._renew_late(box)

    async def _renew_late(self, box: LiveSandbox) -> None:
        """Take an expired lease again, unless another server has the session or ended it for good."""
        began = time.monotonic()
        try:
            taken = await self._leases.take(box.record, own=True)
        except RunsElsewhere as error:
            log.warning("sandbox %s is given up: %s", box.record.id, error)
            await self._live.end(box, self._attachments)
            return
        now = await self._store.get(box.record.id)
        if now is None or now.node != self._leases.server or now.state not in {State.RUNNING, State.STOPPED}:
            if self._live.has(box) and (now is None or now.state not in LIVE):
                await self._live.end(box, self._attachments)
                await self._store.update(box.record.id, fence=taken.fence, release=True)
            return
        # Another server thought this one dead and recorded a stop; nobody resumed it: it never stopped.
        if now.state is State.STOPPED:
            running = {"state": State.RUNNING, "handle": box.handle, "end_reason": None, "notice": None}
            await self._store.update(box.record.id, running, fence=taken.fence)
        box.record = replace(box.record, fence=taken.fence)
        box.leased_until = self._leases.deadline(began)

    async def end_abandoned(self) -> None:
        """End the sessions of servers that no longer renew their leases. A resume restores the
        files from the archive.
        """
        for session_id in await self._leases.abandoned():
            record = await self._store.get(session_id)
            if record is None or record.state not in LIVE:
                continue
            revoked = await self._leases.revoke(record)
            if revoked is None:
                continue
            words = f"server '{record.node}' no longer answers"
            log.warning("session %s: %s", record.id, words)
            await self._store.update(
                record.id,
                fence=revoked.fence,
                state=next_state(record.state, Event.TERMINATE if record.ephemeral else Event.STOP),
                handle=None,
                end_reason=words,
                notice=None if record.ephemeral else words,
            )
