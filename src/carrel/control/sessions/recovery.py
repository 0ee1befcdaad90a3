"""After a restart: what is recorded against what runs. Sandboxes that live are taken over, the rest is
cleaned up.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from carrel.control.sessions.lifecycle import LIVE
from carrel.control.sessions.sessions import Sessions
from carrel.control.workspaces.workspaces import Workspaces
from carrel.errors import RunsElsewhere
from carrel.providers.base import Provider
from carrel.store import SessionRecord, SessionStore

log = logging.getLogger("carrel.recovery")


@dataclass(frozen=True)
class Recovered:
    """What a start found."""

    adopted: int = 0
    ended: int = 0


async def recover(
    sessions: Sessions,
    store: SessionStore,
    workspaces: Workspaces,
    providers: Mapping[str, Provider],
    run_dir: str,
) -> Recovered:
    """Bring the records of this server, its sandboxes and its files together. Runs once, before it takes requests."""

    async def known(context: str) -> bool:
        return await store.newest_of_context(context) is not None

    await workspaces.recover(known)
    left: list[SessionRecord] = []
    for record in await store.in_states(LIVE):
        if record.node not in {None, workspaces.node}:
            continue
        try:
            if not await sessions.adopt(record):
                left.append(record)
        except RunsElsewhere as error:
            log.warning("session %s was taken over meanwhile: %s", record.id, error)
        except Exception:
            log.exception("session %s could not be recovered", record.id)
    keep = {box.record.id for box in sessions.live()}
    await _end_strays(providers, keep)  # before their files are looked at
    for record in left:
        try:
            await sessions.end_recorded(record, "the server was restarted")
        except RunsElsewhere as error:
            log.warning("session %s was taken over meanwhile: %s", record.id, error)
        except Exception:
            log.exception("session %s could not be recovered", record.id)
    await workspaces.sweep(keep)
    await asyncio.to_thread(_remove_sockets, run_dir, {str(box.handle["socket"]) for box in sessions.live()})
    return Recovered(len(keep), len(left))


async def _end_strays(providers: Mapping[str, Provider], keep: set[str]) -> None:
    """End the sandboxes that no record of this server knows."""
    for provider in providers.values():
        for name in await provider.running():
            if name in keep:
                continue
            try:
                await provider.remove({"provider": provider.name, "id": name, "socket": ""})
                log.info("sandbox %s, which nobody waited for, is ended", name)
            except Exception:
                log.exception("sandbox %s could not be ended", name)


def _remove_sockets(run_dir: str, keep: set[str]) -> None:
    for name in os.listdir(run_dir):
        path = os.path.join(run_dir, name)
        if name.startswith(("sbx-", "eph-")) and path not in keep:
            with suppress(FileNotFoundError):
                os.unlink(path)
