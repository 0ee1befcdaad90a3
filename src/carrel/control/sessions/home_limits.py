"""Stops sandboxes on folders whose kept home has become too large.

The home is a plain directory, which no quota of the kernel limits. So it is measured while its sandbox runs.
"""

from __future__ import annotations

import logging
import time

from carrel.control.sessions.folders import HOME_FULL, Folders
from carrel.control.sessions.sessions import Sessions
from carrel.errors import LimitExceeded

log = logging.getLogger("carrel.folders")

LOOK_EVERY_S = 5.0
COST_FACTOR = 30.0
"""A home is measured again after this many times as long as measuring took."""


class HomeLimits:
    """Measures the homes of all running sandboxes on folders."""

    def __init__(self, sessions: Sessions, folders: Folders):
        self._sessions = sessions
        self._folders = folders
        self._next: dict[str, float] = {}

    async def enforce(self) -> None:
        """Stop the sandboxes whose home is too large."""
        live = {box.record.id: box.record for box in self._sessions.live() if box.record.workspace_path is not None}
        self._next = {key: moment for key, moment in self._next.items() if key in live}
        for key, record in live.items():
            if record.context_id is None or time.monotonic() < self._next.get(key, 0.0):
                continue
            try:
                self._next[key] = time.monotonic() + COST_FACTOR * await self._folders.measure_home(record.context_id)
            except LimitExceeded as error:
                log.warning("sandbox %s is stopped: %s", key, error.detail)
                await self._sessions.stop(key, HOME_FULL, error=f"{error.detail}; {error.hint}")
