"""Pages of lists that are ordered by time and id, and the opaque text that stands for a place in one."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from sqlalchemy import Select, Table, and_, or_
from sqlalchemy.engine import RowMapping

from carrel.errors import InvalidRequest
from carrel.store.database import Database


class Placed(Protocol):
    """A record with a place in a list."""

    @property
    def created_at(self) -> float:
        """When it was made."""
        ...

    @property
    def id(self) -> str:
        """Its id, which orders what was made at the same time."""
        ...


P = TypeVar("P", bound=Placed)


async def read_page(
    database: Database,
    table: Table,
    query: Select[Any],
    make: Callable[[RowMapping], P],
    limit: int,
    cursor: str | None,
) -> tuple[list[P], str | None]:
    """Newest first: at most `limit` records of a query on `table` after `cursor`, and the cursor of the next page."""
    query = query.order_by(table.c.created_at.desc(), table.c.id.desc()).limit(limit + 1)
    if cursor is not None:
        created, name = decode_cursor(cursor)
        same = and_(table.c.created_at == created, table.c.id < name)
        query = query.where(or_(table.c.created_at < created, same))
    records = await database.all(query, make)
    return records[:limit], encode_cursor(records[limit - 1]) if len(records) > limit else None


def encode_cursor(record: Placed) -> str:
    """The opaque text that stands for the place after `record` in a list."""
    return base64.urlsafe_b64encode(json.dumps([record.created_at, record.id]).encode()).decode().rstrip("=")


def decode_cursor(text: str) -> tuple[float, str]:
    """The place a cursor stands for; `InvalidRequest` when it is not one of ours."""
    try:
        value = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
        created, name = value
        if type(created) not in {float, int} or type(name) is not str:
            raise ValueError
        return float(created), name
    except (ValueError, TypeError, binascii.Error, RecursionError, OverflowError):
        raise InvalidRequest(
            "the cursor is not one this server gave", field="cursor", hint="take `next` of the page before"
        ) from None
