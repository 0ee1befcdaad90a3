"""Writes down what a session says of itself: its newest snapshot, a notice for its owner."""

from __future__ import annotations

from dataclasses import replace

from carrel.control.sessions.live import LiveSandboxes
from carrel.store import SessionRecord, SessionStore


class SessionNotes:
    """The notes of every session of this server."""

    def __init__(self, live: LiveSandboxes, store: SessionStore):
        self._live = live
        self._store = store

    async def write(self, record: SessionRecord, **values: str | None) -> None:
        """Change fields of a session's record, of a running one too."""
        box = self._live.get(record.id)
        if box is not None:
            box.record = replace(box.record, **values)  # type: ignore[arg-type]
        await self._store.update(record.id, values, fence=box.record.fence if box else None)
