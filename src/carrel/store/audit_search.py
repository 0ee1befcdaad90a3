"""Searches millions of audit records: every page examines a bounded number of them.

The most selective index gives records in the order of time. Other conditions are checked on at most `WINDOW` of these,
and the cursor marks where that ended. So a page takes as long with a million records as with a hundred thousand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from sqlalchemy import ColumnElement, and_, or_, select

from carrel.store.cursors import decode_cursor, encode_cursor
from carrel.store.database import Database
from carrel.store.tables import audit_records as records

WINDOW = 2000
# The most selective index first. Nearly every operation is allowed and succeeds.
_INDEXED = ("chain", "result", "decision", "actor", "name", "kind")
_COMMON = {("result", "ok"), ("decision", "allow")}


AuditFound = tuple[str, int, int | None, str, str | None]
"""chain, seq, ref, body of a record, and the body of the operation's other record; `ref` is set on an end record"""


_FOUND = (records.c.chain, records.c.seq, records.c.ref, records.c.body)
_ORDER = (records.c.at.desc(), records.c.id.desc())


class AuditSearch:
    """Searches operations: by their end records when a result is given, else by their begin records."""

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
        """Return at most `limit` records, newest first, and the cursor of the records not yet examined.

        `equal` gives values for some of the columns chain, actor, kind, name, decision and result.
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
            indexed.append(records.c.at <= at)  # redundant, but lets an index scan start there
        near = select(records.c.at, records.c.id).where(*indexed).order_by(*_ORDER)
        fitting = near
        if others:
            window = near.limit(WINDOW).subquery()
            fitting = select(records.c.at, records.c.id).join(window, records.c.id == window.c.id)
            fitting = fitting.where(*others).order_by(*_ORDER)
        page = fitting.limit(limit + 1).subquery()
        query = select(records.c.at, records.c.id, *_FOUND, _other_half(ends="result" in equal and text is None))
        query = query.join(page, records.c.id == page.c.id).order_by(*_ORDER)
        rows = await self._database.rows(query)
        found: list[AuditFound] = [tuple(row[2:]) for row in rows[:limit]]
        if len(rows) > limit:
            return found, encode_cursor(rows[limit - 1].at, str(rows[limit - 1].id))
        last = await self._database.rows(near.offset(WINDOW - 1).limit(1)) if others else []
        return found, encode_cursor(last[0].at, str(last[0].id)) if last else None


def _other_half(*, ends: bool) -> ColumnElement[str | None]:
    """Select the body of the begin record of an end record, or the other way round."""
    other = records.alias("other")
    place = and_(
        other.c.chain == records.c.chain, (other.c.seq == records.c.ref if ends else other.c.ref == records.c.seq)
    )
    # Without an order, which would read a whole chain instead of the one record that the index finds.
    return select(other.c.body).where(place).limit(1).correlate(records).scalar_subquery()


def _conditions(equal: dict[str, str], text: str | None) -> tuple[list[ColumnElement[bool]], list[ColumnElement[bool]]]:
    """Return the conditions for one index, and the others."""
    # The begin record of an operation has its arguments, the end record its result.
    result = equal.pop("result", None) if text is not None else None
    names = [name for name in _INDEXED if name in equal]
    rare = [name for name in names if (name, equal[name]) not in _COMMON]
    best = next(iter(rare or names), None)
    others = [records.c[name] == equal[name] for name in names if name != best]
    # The type alone needs no window: half of all records are begin records.
    indexed: list[ColumnElement[bool]] = [] if "result" in equal else [records.c.type != "end"]
    if best is not None:
        indexed.append(records.c[best] == equal[best])
    if text is not None:
        others.append(_arguments_contain(text))
    if result is not None:
        ends = records.alias("ends")
        same = and_(ends.c.chain == records.c.chain, ends.c.ref == records.c.seq, ends.c.result == result)
        others.append(or_(records.c.result == result, select(ends.c.id).where(same).exists()))
    return indexed, others


def _arguments_contain(text: str) -> ColumnElement[bool]:
    """Match a text in the arguments, which are the last field of a record, in ASCII JSON."""
    written = json.dumps(text.encode("utf-8", "replace").decode())[1:-1]
    escaped = written.replace("/", "//").replace("%", "/%").replace("_", "/_")
    return records.c.body.ilike(f'%"arguments":%{escaped}%', escape="/")
