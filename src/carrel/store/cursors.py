"""Pages of lists ordered by time and id, and the opaque cursor that marks a position in such a list."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from sqlalchemy import Select, Table, and_, or_
from sqlalchemy.engine import RowMapping

from carrel.errors import InvalidRequest
from carrel.store.database import Database


class Positioned(Protocol):
    """A record with a position in a list; the id orders records of the same time."""

    @property
    def created_at(self) -> float: ...  # noqa: D102
    @property
    def id(self) -> str: ...  # noqa: D102


P = TypeVar("P", bound=Positioned)


async def read_page(
    database: Database,
    table: Table,
    query: Select[Any],
    make: Callable[[RowMapping], P],
    limit: int,
    cursor: str | None,
) -> tuple[list[P], str | None]:
    """Return at most `limit` records after `cursor`, newest first, and the cursor of the next page."""
    query = query.order_by(table.c.created_at.desc(), table.c.id.desc()).limit(limit + 1)
    if cursor is not None:
        created, name = decode_cursor(cursor)
        same = and_(table.c.created_at == created, table.c.id < name)
        query = query.where(or_(table.c.created_at < created, same))
    records = await database.all(query, make)
    last = records[limit - 1] if len(records) > limit else None
    return records[:limit], None if last is None else encode_cursor(last.created_at, last.id)


def encode_cursor(created_at: float, id: str) -> str:
    """Encode the position after the record with this time and id."""
    return encode_bytes(json.dumps([created_at, id]).encode())


def decode_cursor(text: str) -> tuple[float, str]:
    """Return the position in a cursor; `InvalidRequest` when this server did not make the cursor."""
    try:
        created, name = json.loads(decode_bytes(text))
        if type(created) not in {float, int} or type(name) is not str:
            raise ValueError
        return float(created), name
    except (ValueError, TypeError, RecursionError, OverflowError):
        raise _not_a_cursor() from None


def encode_bytes(raw: bytes) -> str:
    """Encode bytes as a cursor."""
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def decode_bytes(text: str) -> bytes:
    """Return the bytes in a cursor; `InvalidRequest` when there are none."""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise _not_a_cursor() from None


def _not_a_cursor() -> InvalidRequest:
    return InvalidRequest(
        "this server did not make this cursor", field="cursor", hint="use `next` of the previous page"
    )
