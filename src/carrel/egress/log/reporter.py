"""The access log on the proxy's side: numbered, told, and kept until the control plane has written it down.

What opens is in the journal before anything goes out, so that a proxy that is killed has let nothing out unseen; the
control plane is told soon after. When nobody takes what is told, new connections are refused rather than go unrecorded.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from carrel.egress.access import Access, Refused
from carrel.egress.log.journal import Item, Journal

Tell = Callable[[int, list[Item]], bool]
"""Takes items and the number they go up to; says whether they could be sent."""

BATCH = 10
FLUSH_S = 0.05
_MANY = 200
MOST_UNTOLD = 10_000
_MOST_TEXT = 200
"""A batch of the longest items fits into one message of the channel."""


def item_of(access: Access) -> Item:
    """An access as it is told."""
    target, verdict, method, path = access.target, access.verdict, access.method, access.path
    rule, source = verdict.rule, verdict.source
    return {
        "number": access.number,
        "sandbox": access.sandbox,
        "protocol": access.protocol,
        "host": None if target is None else target.host[:_MOST_TEXT],
        "port": None if target is None else target.port,
        "method": method and method[:_MOST_TEXT],
        "path": path and path[:_MOST_TEXT],
        "verdict": verdict.verdict,
        "rule": rule and rule[:_MOST_TEXT],
        "source": source and source[:_MOST_TEXT],
        "reason": verdict.reason[:_MOST_TEXT],
        "approval": verdict.approval,
        "address": access.address,
        "upstream": access.upstream,
        "inspected": access.inspected,
        "credential": access.credential,
        "sent": access.sent,
        "received": access.received,
        "result": access.result[:100],
        "began": access.began,
        "ended": access.ended,
    }


def _unwritable() -> Refused:
    return Refused(
        "the access log cannot be written at the moment",
        code="platform_error",
        status=503,
        hint="try again in a moment",
        retry=True,
    )


class Reporter:
    """All accesses of one proxy; a `access.Report`."""

    def __init__(self, journal: Journal, *, flush_s: float = FLUSH_S, most: int = MOST_UNTOLD):
        self._journal = journal
        self._numbers = itertools.count(journal.last + 1)
        # Beyond those of the process before: what that told may be acknowledged only now.
        self._places = itertools.count(time.monotonic_ns())
        self._flush_s = flush_s
        self._most = most
        self._new: OrderedDict[int, Item] = OrderedDict()
        self._told: OrderedDict[int, list[Item]] = OrderedDict()
        self._unwritten = 0
        self._timer: asyncio.TimerHandle | None = None
        self.tell: Tell | None = None
        """Set while somebody listens."""
        for item in journal.left:
            number = item["number"]
            assert isinstance(number, int)
            lost = {"ended": time.time(), "result": "unknown", "reason": "the proxy was killed", "recovered": True}
            self._new[number] = {**item, **lost}

    def __len__(self) -> int:
        return len(self._new) + self._unwritten

    def opened(self, access: Access) -> None:
        """See `access.Report`."""
        if len(self._new) + self._unwritten >= self._most:
            raise _unwritable()
        access.number = next(self._numbers)
        if access.ended is not None:
            return  # it was refused: nothing goes out, and its end, which says all, is told next
        item = item_of(access)
        try:
            self._journal.opened(access.number, item)
        except OSError as error:
            raise _unwritable() from error
        self._put(access.number, item)

    def closed(self, access: Access) -> None:
        """See `access.Report`."""
        if access.number:
            self._put(access.number, item_of(access))

    def listen(self, tell: Tell) -> None:
        """Tell everything that was not acknowledged, and all that comes."""
        self.tell = tell
        for place, items in self._told.items():
            if not tell(place, items):
                self.tell = None
                return
        self.flush()

    def acknowledged(self, upto: int) -> None:
        """What was told up to here is written down."""
        written: list[int] = []
        while self._told and next(iter(self._told)) <= upto:
            written += [int(str(item["number"])) for item in self._told.popitem(last=False)[1]]
        self._unwritten -= len(written)
        self._journal.written(written)

    def _put(self, number: int, item: Item) -> None:
        self._new[number] = item
        if len(self._new) >= _MANY:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._flush_s, self.flush)

    def flush(self) -> None:
        """Tell now what has come since the last time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.tell is None:
            return
        for items in self._batches():
            self._tell(items)

    def _tell(self, items: list[Item]) -> None:
        place = next(self._places)
        self._told[place] = items
        self._unwritten += len(items)
        if self.tell is not None and not self.tell(place, items):
            self.tell = None

    def _batches(self) -> Iterator[list[Item]]:
        while self._new:
            batch: list[Item] = []
            while self._new and len(batch) < BATCH:
                batch.append(self._new.popitem(last=False)[1])
            yield batch
