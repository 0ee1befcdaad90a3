"""Recovery after a restart: compares the records with what runs, takes over live sandboxes and cleans up the rest."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from carrel.control.nodes.workers import Worker
from carrel.control.sessions.lifecycle import LIVE
from carrel.control.sessions.sessions import Sessions
from carrel.control.sessions.slots import SLOT, slot_prefix
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
    sessions: Sessions,
    store: SessionStore,
    workspaces: Workspaces,
    providers: Mapping[str, Provider],
    run_dir: str,
    worker: Worker,
) -> Recovered:
    """Make records, sandboxes and files of this server agree. Runs once, before the process takes requests.

    A worker recovers what its predecessor left. One that was started alone recovers everything, but leaves the
    sandboxes of sessions to the workers that own them and start soon.
    """

    async def known(context: str) -> bool:
        return await store.newest_of_context(context) is not None

    if worker.alone:
        await workspaces.recover(known)
    left: list[SessionRecord] = []
    of_others: list[SessionRecord] = []
    for record in await store.in_states(LIVE):
        if record.node not in {None, workspaces.node}:
            continue
        if not worker.recovers(record.lease_owner):
            of_others.append(record)
            continue
        try:
            if not await sessions.adopt(record):
                left.append(record)
        except RunsElsewhere as error:
            log.warning("session %s was taken over meanwhile: %s", record.id, error)
        except Exception:
            log.exception("session %s could not be recovered", record.id)
    adopted = [(box.record, box.handle) for box in sessions.live()]
    if not worker.alone:
        await workspaces.recover_after_worker({record.id for record in (*left, *(each for each, _ in adopted))})
        await _end_sandboxes_of(worker, providers, left, {str(handle["id"]) for _, handle in adopted})
    kept = [*adopted, *((each, each.handle) for each in of_others)]
    keep = {record.id for record, _ in kept}
    handles = [handle for _, handle in kept if handle is not None]
    if worker.alone:
        # Slots have ids of their own. Before the files are read.
        named = {(str(handle["provider"]), str(handle["id"])) for handle in handles}
        await _end_strays(providers, named)
    for record in left:
        try:
            await sessions.end_recorded(record, "the server was restarted")
        except RunsElsewhere as error:
            log.warning("session %s was taken over meanwhile: %s", record.id, error)
        except Exception:
            log.exception("session %s could not be recovered", record.id)
    if worker.alone:
        await workspaces.sweep(keep)
        await asyncio.to_thread(_remove_sockets, run_dir, {str(handle["socket"]) for handle in handles})
    return Recovered(len(adopted), len(left))


async def _end_sandboxes_of(
    worker: Worker, providers: Mapping[str, Provider], left: Sequence[SessionRecord], adopted: set[str]
) -> None:
    """End the sandboxes that a dead worker was starting or ending, and its slots without an owner. Those of other
    workers run on.
    """
    of_sessions = {(record.provider, record.id) for record in left}
    slots = slot_prefix(worker)
    for provider in providers.values():
        for name in await provider.running():
            unclaimed = slots != SLOT and name.startswith(slots) and name not in adopted
            if unclaimed or (provider.name, name) in of_sessions:
                await _remove(provider, name)


async def _end_strays(providers: Mapping[str, Provider], keep: set[tuple[str, str]]) -> None:
    """End the sandboxes that no session of this server has: those without a record, and slots without an owner. `keep`
    has the providers and ids of the others.
    """
    for provider in providers.values():
        for name in await provider.running():
            if (provider.name, name) in keep:
                continue
            await _remove(provider, name)
        await provider.clean()


async def _remove(provider: Provider, name: str) -> None:
    try:
        await provider.remove({"provider": provider.name, "id": name, "socket": ""})
        log.info("sandbox %s has no session and is ended", name)
    except Exception:
        log.exception("sandbox %s could not be ended", name)


def _remove_sockets(run_dir: str, keep: set[str]) -> None:
    for name in os.listdir(run_dir):
        path = os.path.join(run_dir, name)
        if name.startswith(("sbx-", "eph-", "slot-")) and path not in keep:
            with suppress(FileNotFoundError):
                os.unlink(path)
