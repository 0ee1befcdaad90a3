"""Leases on sessions: they end by the database's clock, and their fence grows with every change of owner.

`SessionStore.update` checks the fence of a write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, case, false, or_, select, true, update
from sqlalchemy.engine import Connection
from sqlalchemy.sql.dml import ReturningUpdate

from carrel.models import State
from carrel.store.clock import database_clock
from carrel.store.database import Database
from carrel.store.tables import sessions

_AT_REST = (State.STOPPED, State.ERROR, State.TERMINATED)


@dataclass(frozen=True, slots=True)
class Lease:
    """`owner` owns the session `until` then; its writes must carry `fence`."""

    session_id: str
    owner: str
    until: float
    fence: int


class LeaseStore:
    """Acquires and renews leases; `SessionStore.update` releases one.

    `owner` names a server; only one process of that name can run at a time.
    """

    def __init__(self, database: Database, clock: Callable[[], ColumnElement[float]] = database_clock):
        self._database = database
        self._clock = clock

    async def acquire(
        self,
        session_id: str,
        owner: str,
        seconds: float,
        *,
        anew: bool = False,
        dead: str | None = None,
        ended_within: float | None = None,
        files_on: str | None = None,
    ) -> int | None:
        """Acquire the lease if it is free or has ended, and return its fence; None when another server has it or the
        session does not exist.

        An owner that already has the lease extends it and keeps the fence. It gets a new fence when its lease had ended
        or with `anew`, which a new process passes because the process that had the lease is dead. `dead` is an owner
        that the caller knows to be dead: its lease counts as ended. With `ended_within` the lease of another server on
        a sandbox that ran is taken only if it ended within so many seconds. With `files_on` the lease is taken only if
        the files of the session are still on that server: else another one took the session over since.
        """
        now = self._clock()
        mine = and_(sessions.c.lease_owner == owner, sessions.c.lease_until > now)
        gone = sessions.c.lease_owner == dead if dead is not None else false()
        ended = sessions.c.lease_until <= now
        if ended_within is not None:
            rests = sessions.c.state.in_([state.value for state in _AT_REST])
            recently = sessions.c.lease_until > now - ended_within
            ended = and_(ended, or_(sessions.c.lease_owner == owner, rests, recently))
        statement = (
            update(sessions)
            .where(sessions.c.id == session_id)
            .where(or_(sessions.c.lease_owner.is_(None), ended, mine, gone))
            .where(true() if files_on is None else or_(sessions.c.node.is_(None), sessions.c.node == files_on))
            .values(
                lease_owner=owner,
                lease_until=now + seconds,
                fence=sessions.c.fence + 1 if anew else case((mine, sessions.c.fence), else_=sessions.c.fence + 1),
            )
            .returning(sessions.c.fence)
        )
        return await self._fence(statement)

    async def renew_all(self, owner: str, seconds: float) -> dict[str, int]:
        """Extend every lease of an owner that has not ended, and return the fence of each session."""
        now = self._clock()
        statement = (
            update(sessions)
            .where(sessions.c.lease_owner == owner, sessions.c.lease_until > now)
            .values(lease_until=now + seconds)
            .returning(sessions.c.id, sessions.c.fence)
        )

        def run(connection: Connection) -> dict[str, int]:
            return {row.id: int(row.fence) for row in connection.execute(statement)}

        return await self._database.write(run)

    async def revoke(self, session_id: str, fence: int) -> int | None:
        """Invalidate the fence of a lease that has ended, and return the new one; the owner's name stays on it.

        None when the lease has changed.
        """
        statement = (
            update(sessions)
            .where(sessions.c.id == session_id, sessions.c.fence == fence, sessions.c.lease_until <= self._clock())
            .values(fence=sessions.c.fence + 1)
            .returning(sessions.c.fence)
        )
        return await self._fence(statement)

    async def hand_back(self, session_id: str, owner: str, fence: int, to: str) -> None:
        """Undo the takeover of an ended lease: it names its former owner again, as ended."""
        statement = (
            update(sessions)
            .where(sessions.c.id == session_id, sessions.c.lease_owner == owner, sessions.c.fence == fence)
            .values(lease_owner=to, lease_until=0.0)
        )
        await self._database.execute(statement)

    async def get(self, session_id: str) -> Lease | None:
        """Return the lease on a session, ended or not; None when it was released or never acquired."""
        found = await self._select(sessions.c.id == session_id)
        return found[0] if found else None

    async def owner(self, session_id: str) -> str | None:
        """Return who has the lease on a session, if it has not ended."""
        held = and_(sessions.c.id == session_id, sessions.c.lease_until > self._clock())
        found = await self._database.scalars(select(sessions.c.lease_owner).where(held))
        return found[0] if found else None

    async def expired(self, now: float | None = None, *, grace: float = 0.0) -> list[Lease]:
        """Return the leases that ended at least `grace` seconds before `now` (default: the database's clock), oldest
        first.
        """
        return await self._select(sessions.c.lease_until <= (self._clock() if now is None else now) - grace)

    async def _fence(self, statement: ReturningUpdate[int]) -> int | None:
        return await self._database.write(lambda connection: connection.execute(statement).scalar_one_or_none())

    async def _select(self, condition: ColumnElement[bool]) -> list[Lease]:
        columns = (sessions.c.id, sessions.c.lease_owner, sessions.c.lease_until, sessions.c.fence)
        query = select(*columns).where(condition, sessions.c.lease_owner.is_not(None))
        rows = await self._database.rows(query.order_by(sessions.c.lease_until, sessions.c.id))
        return [Lease(*row) for row in rows]
