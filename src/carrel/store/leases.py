"""Who owns a session: leases that end by the clock of the database, with a fence that grows at every change of owner.

Decides nothing but who is first; what an owner may do with its fence is checked by `SessionStore.update`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, case, or_, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.sql.dml import ReturningUpdate

from carrel.store.clock import database_clock
from carrel.store.database import Database
from carrel.store.tables import sessions


@dataclass(frozen=True, slots=True)
class Lease:
    """That `owner` has a session until that moment; `fence` is what its writes must show."""

    session_id: str
    owner: str
    until: float
    fence: int


class LeaseStore:
    """Takes and keeps leases; `SessionStore.update` gives one back.

    `owner` names a server of which only one process can run at a time.
    """

    def __init__(self, database: Database, clock: Callable[[], ColumnElement[float]] = database_clock):
        self._database = database
        self._clock = clock

    async def acquire(self, session_id: str, owner: str, seconds: float, *, anew: bool = False) -> int | None:
        """Take the lease if it is free or has ended, and return its fence; None when another has it, or no session.

        For the owner that has it already it is extended and the fence stays; one that let it end gets a new fence, and
        so does one that asks for it `anew`, because the process that had the lease before it is dead.
        """
        now = self._clock()
        mine = and_(sessions.c.lease_owner == owner, sessions.c.lease_until > now)
        statement = (
            update(sessions)
            .where(sessions.c.id == session_id)
            .where(or_(sessions.c.lease_owner.is_(None), sessions.c.lease_until <= now, mine))
            .values(
                lease_owner=owner,
                lease_until=now + seconds,
                fence=sessions.c.fence + 1 if anew else case((mine, sessions.c.fence), else_=sessions.c.fence + 1),
            )
            .returning(sessions.c.fence)
        )
        return await self._fence(statement)

    async def renew_all(self, owner: str, seconds: float) -> dict[str, int]:
        """Extend every lease of an owner that has not ended; the sessions that it has, with their fences."""
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
        """Make a lease that has ended worthless to its owner, whose name stays on it; the new fence, or None."""
        statement = (
            update(sessions)
            .where(sessions.c.id == session_id, sessions.c.fence == fence, sessions.c.lease_until <= self._clock())
            .values(fence=sessions.c.fence + 1)
            .returning(sessions.c.fence)
        )
        return await self._fence(statement)

    async def hand_back(self, session_id: str, owner: str, fence: int, to: str) -> None:
        """Undo the taking of a lease that had ended: it shows its owner of before again, as ended."""
        statement = (
            update(sessions)
            .where(sessions.c.id == session_id, sessions.c.lease_owner == owner, sessions.c.fence == fence)
            .values(lease_owner=to, lease_until=0.0)
        )
        await self._database.execute(statement)

    async def get(self, session_id: str) -> Lease | None:
        """The lease on a session, ended or not; None when it was given back or never taken."""
        found = await self._select(sessions.c.id == session_id)
        return found[0] if found else None

    async def expired(self, now: float | None = None, *, grace: float = 0.0) -> list[Lease]:
        """The leases that had ended `grace` seconds before `now` (the database's clock), the longest ended first."""
        return await self._select(sessions.c.lease_until <= (self._clock() if now is None else now) - grace)

    async def _fence(self, statement: ReturningUpdate[int]) -> int | None:
        return await self._database.write(lambda connection: connection.execute(statement).scalar_one_or_none())

    async def _select(self, condition: ColumnElement[bool]) -> list[Lease]:
        columns = (sessions.c.id, sessions.c.lease_owner, sessions.c.lease_until, sessions.c.fence)
        query = select(*columns).where(condition, sessions.c.lease_owner.is_not(None))
        query = query.order_by(sessions.c.lease_until, sessions.c.id)

        def run(connection: Connection) -> list[Lease]:
            return [Lease(*row) for row in connection.execute(query)]

        return await self._database.read(run)
