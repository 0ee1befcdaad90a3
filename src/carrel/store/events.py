"""The queries on events. Ids grow in the order in which events become visible, without gaps.

A reader that has seen an id must never find a smaller one later. On SQLite one transaction writes at a time, and it
gives the ids. On PostgreSQL transactions overlap, so what happened is staged in its own transaction, which waits for
nobody; `number` then moves staged events to the log, one transaction at a time, and only that gives ids.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, insert, or_, select, text, update
from sqlalchemy.engine import Connection

from carrel.models.base import DEFAULT_NAMESPACE
from carrel.models.events import EventDraft, EventFilter, StoredEvent
from carrel.store.clock import database_clock
from carrel.store.database import Database, mark_staged
from carrel.store.tables import event_deliveries as deliveries
from carrel.store.tables import event_state as state
from carrel.store.tables import events
from carrel.store.tables import staged_events as staged

_FACTS = EventDraft._fields
_INSERT = f"INSERT INTO {events.name} ({', '.join(_FACTS)}) VALUES ({', '.join('?' * len(_FACTS))})"  # noqa: S608
_MOST_AT_ONCE = 5000
"""Events that one transaction removes or numbers: others wait for it."""
_SUMMED = 20_000
"""Events whose sizes are summed by one query."""
ROW = 100
"""Bytes of an event beside its body, about."""
_LAST, _REMOVED, _IDENTITY = "last", "removed", "identity"

_NUMBER = text(
    f"""
    WITH chosen AS (
        DELETE FROM {staged.name} WHERE key IN (SELECT key FROM {staged.name} ORDER BY key LIMIT :most) RETURNING *
    ), grown AS (
        UPDATE {state.name} SET id = id + (SELECT count(*) FROM chosen) WHERE name = '{_LAST}'
    )
    INSERT INTO {events.name} (id, {", ".join(_FACTS)})
    SELECT :last + row_number() OVER (ORDER BY key), {", ".join(_FACTS)} FROM chosen
    """  # noqa: S608
)


def stage(connection: Connection, drafts: Sequence[EventDraft]) -> None:
    """Add events in the transaction of what happened: both are written, or neither."""
    if not drafts:
        return
    driver = connection.connection.driver_connection
    if isinstance(driver, sqlite3.Connection):
        driver.executemany(_INSERT, drafts)  # SQLAlchemy alone would take three times as long
    else:
        connection.execute(insert(staged), [draft._asdict() for draft in drafts])
    mark_staged(connection)


class EventStore:
    """Reads and removes events, and gives staged ones their ids."""

    def __init__(self, database: Database):
        self._database = database
        self.staged = database.staged
        """Is set when a transaction of this process that staged events is committed."""
        self.shared = database.shared
        """Whether transactions overlap, so that events are staged first."""
        self.polled = database.polled
        """Whether other processes write events too, which this one has to look for."""

    async def open(self) -> None:
        """Make the rows that say where the log begins and ends."""

        def run(connection: Connection) -> None:
            dialect = import_module(f"sqlalchemy.dialects.{connection.dialect.name}")
            ids = {_LAST: 0, _REMOVED: 0, _IDENTITY: secrets.randbits(53)}
            rows = [{"name": name, "id": id} for name, id in ids.items()]
            connection.execute(dialect.insert(state).values(rows).on_conflict_do_nothing())

        await self._database.write(run)

    async def append(self, drafts: Sequence[EventDraft]) -> None:
        """Add events that are not part of another change."""
        await self._database.write(lambda connection: stage(connection, drafts))

    async def number(self) -> bool:
        """Give staged events their ids, some thousand at most; return whether more may be waiting."""
        if not self.shared:
            return False

        def run(connection: Connection) -> int:
            # The lock on this row is held until the commit, so ids become visible in their order.
            query = select(state.c.id).where(state.c.name == _LAST).with_for_update()
            last = connection.execute(query).scalar_one()
            return connection.execute(_NUMBER, {"last": last, "most": _MOST_AT_ONCE}).rowcount

        return await self._database.write(run) == _MOST_AT_ONCE

    async def last(self) -> int:
        """Return the newest id that can be read; 0 if there never was an event."""

        def run(connection: Connection) -> int:
            if connection.dialect.name == "sqlite":
                query: Any = select(func.max(events.c.id))
            else:
                query = select(state.c.id).where(state.c.name == _LAST)
            return connection.execute(query).scalar() or 0

        return await self._database.read(run)

    async def removed(self) -> int:
        """Return the id up to which retention has removed events."""
        found = await self._database.scalars(select(state.c.id).where(state.c.name == _REMOVED))
        return int(found[0]) if found else 0

    async def page(self, wanted: EventFilter, after: int, limit: int, upto: int | None = None) -> list[StoredEvent]:
        """Return the first events after an id, in order; with `upto` none beyond that id."""
        query = select(events).where(events.c.id > after, *_conditions(wanted))
        if upto is not None:
            query = query.where(events.c.id <= upto)
        rows = await self._database.rows(query.order_by(events.c.id).limit(limit))
        return [StoredEvent(*row) for row in rows]

    async def forget(self, context_id: str, forgotten: EventDraft) -> None:
        """Remove every event of a deleted context, and write that this was done."""

        def run(connection: Connection) -> None:
            stage(connection, [forgotten])  # before: the newest event must stay
            for table in (staged, events):
                connection.execute(delete(table).where(table.c.context_id == context_id))

        await self._database.write(run)

    # retention

    async def older_than(self, at: float) -> int:
        """Return the newest id such that it and all before it are older than a time; 0 if none is."""
        newer = select(func.min(events.c.id)).where(events.c.at >= at)
        first = (await self._database.scalars(newer))[0]
        return await self.last() if first is None else int(first) - 1

    async def beyond(self, size: int) -> int:
        """Return the id after which the events have no more than this size together; 0 if all have less."""
        upto, total, step = await self.last(), 0, _SUMMED
        oldest = await self.removed()
        while upto > oldest:
            start = max(oldest, upto - step)
            within = and_(events.c.id > start, events.c.id <= upto)
            query = select(func.coalesce(func.sum(func.length(events.c.body) + ROW), 0)).where(within)
            found = int((await self._database.scalars(query))[0])
            if total + found <= size:
                total, upto = total + found, start
            elif step == 1:
                return upto
            else:
                step = max(1, step // 8)
        return 0

    async def remove(self, upto: int) -> int:
        """Remove the events up to an id, but not the newest, and return how many. Readers are told."""
        count, upto = 0, min(upto, await self.last() - 1)
        while (start := await self.removed()) < upto:
            end = min(upto, start + _MOST_AT_ONCE)

            def run(connection: Connection, end: int = end) -> int:
                moved = update(state).where(state.c.name == _REMOVED, state.c.id < end).values(id=end)
                connection.execute(moved)
                return connection.execute(delete(events).where(events.c.id <= end)).rowcount

            count += await self._database.write(run)
        return count

    # delivery to a bus

    async def identity(self) -> int:
        """Return the number of this log: the ids of another one begin again."""
        found = await self._database.scalars(select(state.c.id).where(state.c.name == _IDENTITY))
        return int(found[0])

    async def delivered(self, bus: str) -> int:
        """Return the newest id that a bus has; 0 if it has none."""
        found = await self._database.scalars(select(deliveries.c.position).where(deliveries.c.bus == bus))
        return int(found[0]) if found else 0

    async def deliver(self, bus: str, owner: str, seconds: float) -> bool:
        """Become, or stay, the one server that delivers to a bus; False while another one does."""

        def run(connection: Connection) -> bool:
            dialect = import_module(f"sqlalchemy.dialects.{connection.dialect.name}")
            connection.execute(dialect.insert(deliveries).values(bus=bus, position=0).on_conflict_do_nothing())
            free = or_(deliveries.c.owner.is_(None), deliveries.c.owner == owner, deliveries.c.until < database_clock())
            taken = update(deliveries).where(deliveries.c.bus == bus, free)
            return connection.execute(taken.values(owner=owner, until=database_clock() + seconds)).rowcount == 1

        return await self._database.write(run)

    async def set_delivered(self, bus: str, position: int, owner: str) -> bool:
        """Record what a bus has; False when another server delivers by now."""
        statement = update(deliveries).where(deliveries.c.bus == bus, deliveries.c.owner == owner)
        return await self._database.execute(statement.values(position=position)) == 1

    async def stop_delivering(self, bus: str, owner: str) -> None:
        """Let another server deliver to a bus at once."""
        statement = update(deliveries).where(deliveries.c.bus == bus, deliveries.c.owner == owner)
        await self._database.execute(statement.values(owner=None, until=None))


def _conditions(wanted: EventFilter) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if wanted.context_id is not None:
        found.append(events.c.context_id == wanted.context_id)
    if wanted.session_id is not None:
        found.append(events.c.session_id == wanted.session_id)
    if wanted.job_id is not None:
        found.append(events.c.job_id == wanted.job_id)
    if wanted.kinds is not None:
        found.append(events.c.kind.in_([kind.value for kind in wanted.kinds]))
    if wanted.contexts is not None:
        found.append(events.c.context_id.in_(wanted.contexts))
    if wanted.namespace is not None:
        inside = events.c.context_id.startswith(f"{wanted.namespace}:", autoescape=True)
        if wanted.namespace == DEFAULT_NAMESPACE:
            inside = or_(inside, events.c.context_id.not_like("%:%"))
        found.append(inside)
    return found
