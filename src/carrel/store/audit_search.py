"""Finding audit records among millions: every page looks at a bounded number of records. Changes nothing.

The records of the best index come in the order of time; other conditions are tried on at most `WINDOW` of them, and the
cursor says how far that went. So a page takes no longer with a million records than with a hundred thousand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, or_, select

from carrel.store.cursors import decode_cursor, encode_cursor
from carrel.store.database import Database
from carrel.store.tables import audit_records as records

WINDOW = 2000
# The best index first: what few records have. Nearly everything is allowed and ends well.
_INDEXED = ("chain", "result", "decision", "actor", "name", "kind")
_COMMON = {("result", "ok"), ("decision", "allow")}


AuditFound = tuple[str, int, int | None, str, str | None]
"""chain, seq, ref, body of a record, and the body of the operation's other half; `ref` is set on an end"""


@dataclass(frozen=True, slots=True)
class _Place:
    created_at: float
    id: str


_FOUND = (records.c.chain, records.c.seq, records.c.ref, records.c.body)
_ORDER = (records.c.at.desc(), records.c.id.desc())


class AuditSearch:
    """Looks for operations: by their ends when a result is wanted, else by their begins."""

    def __init__(self, database: Database):
        self._database = database

    async def search(
        self,
        equal: Mapping[str, str],
        *,
        since: float | None = None,
        until: float | None = None,
        text: str | None = None,
        limit: int,
        cursor: str | None = None,
    ) -> tuple[list[AuditFound], str | None]:
        """At most `limit` records, newest first, and the cursor of what was not looked at yet.

        `equal` are the values of some of the columns chain, actor, kind, name, decision and result.
        """
        indexed, others = _conditions(dict(equal), text)
        if since is not None:
            indexed.append(records.c.at >= since)
        if until is not None:
            indexed.append(records.c.at <= until)
        if cursor is not None:
            at, name = decode_cursor(cursor)
            number = int(name) if name.isascii() and name.isdigit() and len(name) < 19 else 0
            indexed.append(or_(records.c.at < at, and_(records.c.at == at, records.c.id < number)))
            indexed.append(records.c.at <= at)  # says less, but an index can begin there
        near = select(records.c.at, records.c.id).where(*indexed).order_by(*_ORDER)
        fitting = near
        if others:
            window = near.limit(WINDOW).subquery()
            fitting = select(records.c.at, records.c.id).join(window, records.c.id == window.c.id)
            fitting = fitting.where(*others).order_by(*_ORDER)
        page = fitting.limit(limit + 1).subquery()
        query = select(records.c.at, records.c.id, *_FOUND, _other_half(ends="result" in equal and text is None))
        query = query.join(page, records.c.id == page.c.id).order_by(*_ORDER)
        rows = await self._rows(query)
        found: list[AuditFound] = [tuple(row[2:]) for row in rows[:limit]]
        if len(rows) > limit:
            return found, _cursor(rows[limit - 1])
        last = await self._rows(near.offset(WINDOW - 1).limit(1)) if others else []
        return found, _cursor(last[0]) if last else None

    async def _rows(self, query: Select[Any]) -> list[Any]:
        return await self._database.read(lambda connection: list(connection.execute(query)))


def _other_half(*, ends: bool) -> ColumnElement[str | None]:
    """The bytes of the begin of an end, or of the end of a begin; None where there is none."""
    other = records.alias("other")
    place = and_(
        other.c.chain == records.c.chain, (other.c.seq == records.c.ref if ends else other.c.ref == records.c.seq)
    )
    # Without an order, which would have a whole chain read instead of the one record the index leads to.
    return select(other.c.body).where(place).limit(1).correlate(records).scalar_subquery()


def _cursor(row: Any) -> str:
    return encode_cursor(_Place(row.at, str(row.id)))


def _conditions(equal: dict[str, str], text: str | None) -> tuple[list[ColumnElement[bool]], list[ColumnElement[bool]]]:
    """The conditions that one index answers, and the others. Half of the records are ends, which is no matter."""
    # Arguments stand in the begin of an operation, its result in the end.
    result = equal.pop("result", None) if text is not None else None
    names = [name for name in _INDEXED if name in equal]
    rare = [name for name in names if (name, equal[name]) not in _COMMON]
    best = next(iter(rare or names), None)
    others = [records.c[name] == equal[name] for name in names if name != best]
    # Alone the type needs no window: every operation has a begin.
    indexed: list[ColumnElement[bool]] = [] if "result" in equal else [records.c.type != "end"]
    if best is not None:
        indexed.append(records.c[best] == equal[best])
    if text is not None:
        others.append(_says(text))
    if result is not None:
        ends = records.alias("ends")
        same = and_(ends.c.chain == records.c.chain, ends.c.ref == records.c.seq, ends.c.result == result)
        others.append(or_(records.c.result == result, select(ends.c.id).where(same).exists()))
    return indexed, others


def _says(text: str) -> ColumnElement[bool]:
    """That the arguments hold a text; they stand last in a record, as ASCII JSON."""
    written = json.dumps(text.encode("utf-8", "replace").decode())[1:-1]
    escaped = written.replace("/", "//").replace("%", "/%").replace("_", "/_")
    return records.c.body.ilike(f'%"arguments":%{escaped}%', escape="/")
