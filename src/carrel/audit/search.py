"""Searches operations in the audit log and joins their begin and end records.

Results are read from the hashed bytes, never from the columns that the search used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from carrel.audit.records import context_of
from carrel.errors import InvalidRequest, PlatformError
from carrel.models import AuditPage, AuditRecord
from carrel.models.base import namespace_of

MAX_LIMIT = 1000
MAX_TEXT = 200
_EQUAL = ("chain", "actor", "kind", "name", "decision", "result")
_OF_END = ("result", "reason", "duration_ms", "bytes_in", "bytes_out")


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions on operations; None matches all. `text` is searched in the arguments, ignoring case."""

    chain: str | None = None
    actor: str | None = None
    kind: str | None = None
    name: str | None = None
    decision: str | None = None
    result: str | None = None
    since: float | None = None
    until: float | None = None
    text: str | None = None


Found = tuple[str, int, int | None, str, str | None]
"""chain, seq, ref and body of a found record, and the body of the operation's other record"""


class SearchStore(Protocol):
    """The method of a store that a search needs; `store.audit_search.AuditSearch` has it."""

    async def search(
        self,
        equal: Mapping[str, str],
        *,
        since: float | None = None,
        until: float | None = None,
        text: str | None = None,
        limit: int,
        cursor: str | None = None,
    ) -> tuple[Sequence[Found], str | None]:
        """Return begin records (end records if a result is given), each with its other record."""


async def search(store: SearchStore, wanted: Filter, *, limit: int, cursor: str | None) -> AuditPage:
    """Return a page of operations, newest first; `InvalidRequest` for an invalid filter."""
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequest(f"a page has 1 to {MAX_LIMIT} operations", field="limit")
    if wanted.text is not None and not 0 < len(wanted.text) <= MAX_TEXT:
        raise InvalidRequest(f"a search text has 1 to {MAX_TEXT} characters", field="text")
    equal = {name: value for name in _EQUAL if (value := getattr(wanted, name)) is not None}
    found, after = await store.search(
        equal, since=wanted.since, until=wanted.until, text=wanted.text, limit=limit, cursor=cursor
    )
    items = []
    for chain, seq, ref, body, other in found:
        # If the begin record was pruned, only the end record is left.
        begin, end = (body, other) if ref is None else (other or body, body)
        try:
            items.append(_record(chain, begin, end))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise PlatformError(
                f"record {seq} of the audit chain {chain} is damaged",
                hint="`carrel audit export` and `carrel audit verify` show where a chain is broken",
            ) from None
    return AuditPage(items=items, next=after)


def _record(chain: str, begin: str, end: str | None) -> AuditRecord:
    values = json.loads(begin)
    if end is not None:
        ended = json.loads(end)
        values |= {key: value for key, value in ended.items() if key in _OF_END}
        if "arguments" in ended:
            values["arguments"] = {**values.get("arguments", {}), **ended["arguments"]}
    values["at"] = datetime.fromtimestamp(values["at"], UTC)
    context = context_of(chain)
    namespace = None if context is None else namespace_of(context)
    return AuditRecord.model_validate({**values, "context_id": context, "namespace": namespace})
