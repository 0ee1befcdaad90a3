"""Finding audit records among millions: every page looks at a bounded number of records. Changes nothing.

The records of the best index come in the order of time; other conditions are tried on at most `WINDOW` of them, and the
cursor says how far that went. So a page takes no longer with a million records than with a hundred thousand.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, or_, select, tuple_

from carrel.store.cursors import decode_cursor, encode_cursor
from carrel.store.database import Database
from carrel.store.tables import audit_records as records

WINDOW = 10_000
# The best index first: what few records have. Nearly everything is allowed and ends well.
_INDEXED = ("chain", "result", "decision", "actor", "name", "kind")
_COMMON = {("result", "ok"), ("decision", "allow")}
_BATCH = 200


AuditFound = tuple[str, int, int | None, str]
"""chain, seq, ref, body; `ref` is set on the end of an operation"""


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
        query = select(records.c.at, records.c.id, *_FOUND).where(*indexed, *others)
        if others:
            window = near.limit(WINDOW).subquery()
            query = select(records.c.at, records.c.id, *_FOUND)
            query = query.join(window, records.c.id == window.c.id).where(*others)
        rows = await self._rows(query.order_by(*_ORDER).limit(limit + 1))
        found: list[AuditFound] = [tuple(row[2:]) for row in rows[:limit]]
        if len(rows) > limit:
            return found, _cursor(rows[limit - 1])
        last = await self._rows(near.offset(WINDOW - 1).limit(1)) if others else []
        return found, _cursor(last[0]) if last else None

    async def counterparts(
        self, begins: Collection[tuple[str, int]], ends: Collection[tuple[str, int]]
    ) -> list[AuditFound]:
        """The ends of these begins and the begins of these ends, both given by the place of the begin."""
        found: list[AuditFound] = []
        for places, seq in ((begins, records.c.ref), (ends, records.c.seq)):
            names = list(places)
            for start in range(0, len(names), _BATCH):
                some = select(*_FOUND).where(tuple_(records.c.chain, seq).in_(names[start : start + _BATCH]))
                found += [tuple(row) for row in await self._rows(some)]
        return found

    async def _rows(self, query: Select[Any]) -> list[Any]:
        return await self._database.read(lambda connection: list(connection.execute(query)))


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
