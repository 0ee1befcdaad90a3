"""Wakes those who wait for a job of this server: for its end, or for more of its output."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from carrel.store.jobs import JobRecord


class JobWatch:
    """Who waits for which job."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}

    def changed(self, record: JobRecord) -> None:
        """Wake everybody who waits for a job: its record or its output has changed."""
        for event in self._waiting.get(record.id, ()):
            event.set()

    @contextmanager
    def watching(self, job_id: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set at each change; the caller clears it."""
        event = asyncio.Event()
        self._waiting.setdefault(job_id, set()).add(event)
        try:
            yield event
        finally:
            others = self._waiting[job_id]
            others.discard(event)
            if not others:
                del self._waiting[job_id]
