"""Guards the folders that sandboxes work on against protected names that appear later (see `folder_guard`).

Each guarded folder has one task. What it needs to go on after a restart, or to look for the last time when the sandbox
has ended, is in a small file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress

from carrel.audit import AuditEntry, AuditLog, chain_of
from carrel.control.sessions.attachments import Attachment
from carrel.control.sessions.folder_guard import FolderGuard, Held, ProtectedPaths
from carrel.control.sessions.live import LiveSandbox, SessionNotes
from carrel.errors import PlatformError
from carrel.primitives.atomic import write_file
from carrel.primitives.tasks import cancel, readable
from carrel.providers import Masks
from carrel.store import SessionRecord
from carrel.threads import run_to_end

log = logging.getLogger("carrel.folders")

PAUSE_S = 0.02
"""A pause after each look: an agent that makes files all the time must not keep the server busy."""
MOST_RECORDED = 100
"""How many paths of one look are recorded one by one."""
MOST_SHOWN = 5


class ProtectedFolders(Attachment):
    """The guards of all folders of this server. `directory` is for the files about them."""

    def __init__(self, directory: str, audit: AuditLog, notes: SessionNotes):
        self._directory = directory
        self._audit = audit
        self._notes = notes
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}

    async def open(self, boxes: Iterable[LiveSandbox]) -> None:
        """Guard the folders of sandboxes that run already."""
        for box in boxes:
            guard = await asyncio.to_thread(self._stored, box.record)
            if guard is not None:
                await self._start(box, guard)

    async def close(self) -> None:
        await cancel(self._tasks.values())

    async def attach(self, box: LiveSandbox) -> None:
        """Guard the folder of a new sandbox. Masks protect what is there now."""
        masks = box.masks
        if box.record.workspace_path is None or not isinstance(masks, Masks) or not masks.readonly:
            return
        guard = await asyncio.to_thread(FolderGuard, box.record.workspace_path, ProtectedPaths(masks.readonly))
        await self._start(box, guard)
        await asyncio.to_thread(self._store, box.record, masks.readonly, guard)

    def detach(self, box: LiveSandbox) -> None:
        """Stop watching. `save` looks for the last time."""
        name = box.record.id
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()
            self._ending[name] = task
            task.add_done_callback(lambda _: self._ending.pop(name, None))

    async def save(self, record: SessionRecord, workspace: str) -> None:
        """Take away what appeared until the end."""
        if (ending := self._ending.get(record.id)) is not None:
            await asyncio.wait([ending])
        guard = await asyncio.to_thread(self._stored, record)
        if guard is None:
            return
        try:
            await self._report(record, guard, await run_to_end(guard.sweep))
        finally:
            guard.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path(record))

    async def _start(self, box: LiveSandbox, guard: FolderGuard) -> None:
        try:
            await self._report(box.record, guard, await run_to_end(guard.watch))
        except BaseException as error:
            guard.close()
            if isinstance(error, OSError):
                raise PlatformError(f"the folder cannot be watched: {error.strerror}") from None
            raise
        self._tasks[box.record.id] = asyncio.get_running_loop().create_task(self._guard(box, guard))

    async def _guard(self, box: LiveSandbox, guard: FolderGuard) -> None:
        try:
            while True:
                await readable(guard.fd)
                looking = asyncio.ensure_future(self._look(box, guard))
                try:
                    await asyncio.shield(looking)
                except asyncio.CancelledError:
                    await asyncio.wait([looking])  # whatever was renamed is recorded, also at the end
                    raise
                await asyncio.sleep(PAUSE_S)
        except Exception:
            log.exception("the folder of %s is not watched any more", box.record.owner)
            await self._notes.write(box.record, notice="new protected paths in the folder are not noticed any more")
        finally:
            await run_to_end(guard.close)  # the kernel takes milliseconds to end its watches

    async def _look(self, box: LiveSandbox, guard: FolderGuard) -> None:
        held = await asyncio.to_thread(guard.look)
        if replaced := guard.take_replaced():
            log.info("sandbox %s: replaced on the host: %s", box.record.id, ", ".join(replaced)[:500])
            try:
                await box.provider.protect(box.handle, replaced)
            except PlatformError as error:
                words = f"{error.detail}: {', '.join(replaced)}; stop the sandbox and start it again"
                await self._notes.write(box.record, notice=words[:2000])
        await self._report(box.record, guard, held)

    async def _report(self, record: SessionRecord, guard: FolderGuard, held: Sequence[Held]) -> None:
        """Record what was taken away, and tell the owner of the session."""
        if not held and guard.complete:
            return
        for each in held[:MOST_RECORDED]:
            log.warning("sandbox %s: the protected path %s appeared and is %s now", record.id, each.path, each.now)
            arguments = {"path": each.path, "renamed_to": each.now}
            chain = chain_of(record.context_id, record.id)
            entry = AuditEntry(chain, "carrel", "file", "hold_path", decision="deny", arguments=arguments)
            (await self._audit.begin(entry)).end()
        words = []
        guard.count += len(held)
        guard.newest = (*reversed(held), *guard.newest)[:MOST_SHOWN]
        if guard.count:
            shown = ", ".join(f"{each.path} (now {each.now})" for each in guard.newest)
            more = f" and {guard.count - MOST_SHOWN} more" if guard.count > MOST_SHOWN else ""
            words.append(f"protected paths appeared in the folder and were renamed: {shown}{more}")
        if not guard.complete:
            words.append("the folder is too large to notice all protected paths that appear in it")
        await self._notes.write(record, notice="; ".join(words)[:2000])

    # files; blocking

    def _path(self, record: SessionRecord) -> str:
        return os.path.join(self._directory, f"{record.id}.json")

    def _store(self, record: SessionRecord, patterns: Sequence[str], guard: FolderGuard) -> None:
        os.makedirs(self._directory, 0o700, exist_ok=True)
        content = {"patterns": list(patterns), "known": sorted(guard.known or ())}
        write_file(self._path(record), json.dumps(content).encode())

    def _stored(self, record: SessionRecord) -> FolderGuard | None:
        if record.workspace_path is None:
            return None
        try:
            with open(self._path(record), "rb") as file:
                content = json.load(file)
            return FolderGuard(record.workspace_path, ProtectedPaths(content["patterns"]), set(content["known"]))
        except OSError:  # nothing is protected, or the folder is gone
            return None
