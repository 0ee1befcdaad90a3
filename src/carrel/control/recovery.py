"""After a restart: what is recorded against what runs. Sandboxes that live are taken over, the rest is
cleaned up.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from carrel.control.lifecycle import LIVE
from carrel.control.sessions import Sessions
from carrel.errors import CarrelError
from carrel.store import SessionStore
from carrel.workspaces.layout import Layout

log = logging.getLogger("carrel.recovery")


@dataclass(frozen=True)
class Recovered:
    """What a start found."""

    adopted: int = 0
    ended: int = 0


async def recover(sessions: Sessions, store: SessionStore, layout: Layout) -> Recovered:
    """Bring records and sandboxes together. Runs once, before the server takes requests."""
    try:
        await asyncio.to_thread(layout.empty_trash)
    except (CarrelError, OSError):
        log.exception("some removed workspaces could not be deleted")
    adopted, ended = 0, 0
    for record in await store.in_states(LIVE):
        try:
            if await sessions.adopt(record):
                adopted += 1
            else:
                await sessions.end_recorded(record, "the server was restarted")
                ended += 1
        except Exception:
            log.exception("session %s could not be recovered", record.id)
    keep = {box.record.id for box in sessions.live()}
    for name in await asyncio.to_thread(layout.ephemeral_leftovers, keep):
        try:
            await asyncio.to_thread(layout.remove, name, ephemeral=True)
        except (CarrelError, OSError):
            log.exception("the workspace of %s could not be removed", name)
    return Recovered(adopted, ended)
