"""Recovery after a restart: compares the records with what runs, takes over live sandboxes and cleans up the rest."""

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
    """The numbers of sandboxes that were taken over and ended."""

    adopted: int = 0
    ended: int = 0


async def recover(
    sessions: Sessions, store: SessionStore, workspaces: Workspaces, providers: Mapping[str, Provider], run_dir: str
) -> Recovered:
    """Make records, sandboxes and files of this server agree. Runs once, before the server takes requests."""

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
    handles = {(box.provider.name, str(box.handle["id"])) for box in sessions.live()}  # slots have ids of their own
    await _end_strays(providers, handles)  # before their files are read
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


async def _end_strays(providers: Mapping[str, Provider], keep: set[tuple[str, str]]) -> None:
    """End the sandboxes that no session of this server has: those without a record, and slots without an owner. `keep`
    has the providers and ids of the others.
    """
    for provider in providers.values():
        for name in await provider.running():
            if (provider.name, name) in keep:
                continue
            try:
                await provider.remove({"provider": provider.name, "id": name, "socket": ""})
                log.info("sandbox %s has no record and is ended", name)
            except Exception:
                log.exception("sandbox %s could not be ended", name)


def _remove_sockets(run_dir: str, keep: set[str]) -> None:
    for name in os.listdir(run_dir):
        path = os.path.join(run_dir, name)
        if name.startswith(("sbx-", "eph-", "slot-")) and path not in keep:
            with suppress(FileNotFoundError):
                os.unlink(path)
