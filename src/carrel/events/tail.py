"""The newest events in memory, which all readers that keep up share. Knows no database."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence

from carrel.models.events import StoredEvent

MOST_EVENTS = 4096
MOST_BYTES = 16 * 1024 * 1024
_ROW = 400
"""Bytes of an event in memory beside its body, about."""


class Tail:
    """All events after `start` and up to `last`. A reader that asks for earlier ones reads them from the store."""

    def __init__(self, start: int):
        self.start = start
        self.last = start
        self._events: list[StoredEvent] = []
        self._bytes = 0
        self._grown = asyncio.Event()

    def extend(self, events: Sequence[StoredEvent], last: int) -> None:
        """Add the events that follow, up to the id `last`, and wake the readers."""
        self._events.extend(events)
        self._bytes += sum(map(_size, events))
        self.last = last
        if len(self._events) > MOST_EVENTS or self._bytes > MOST_BYTES:
            self._shrink()
        self._grown.set()
        self._grown = asyncio.Event()

    def _shrink(self) -> None:
        """Drop the oldest half, so that this happens seldom."""
        kept = size = 0
        for event in reversed(self._events):
            size += _size(event)
            if kept == MOST_EVENTS // 2 or size > MOST_BYTES // 2:
                size -= _size(event)
                break
            kept += 1
        dropped = len(self._events) - kept
        self.start = self._events[dropped - 1].id
        self._events = self._events[dropped:]
        self._bytes = size

    def after(self, position: int) -> list[StoredEvent]:
        """Return the events after an id, which must not be before `start`."""
        return self._events[bisect_right(self._events, position, key=_id) :]

    def grown(self) -> asyncio.Event:
        """Return an event that is set when the tail grows."""
        return self._grown


def _id(event: StoredEvent) -> int:
    return event.id


def _size(event: StoredEvent) -> int:
    return len(event.body) + _ROW
