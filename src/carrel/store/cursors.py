"""The opaque text that stands for a place in a list ordered by time and id. Knows no table."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Protocol

from carrel.errors import InvalidRequest


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
