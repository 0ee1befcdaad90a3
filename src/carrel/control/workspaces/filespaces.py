"""Filespaces: brought together with workspaces, and read and written beside them. Each operation passes the one door.

Binds the sync to sessions, records and the archive's storage. Only a context has a filespace: an ephemeral sandbox
keeps nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TypeVar

from carrel.control.operations.operations import Operations
from carrel.control.sessions.masks import hides
from carrel.control.sessions.sessions import Sessions
from carrel.control.workspaces.stopping import Base
from carrel.control.workspaces.workspaces import Workspaces, cap_bytes
from carrel.errors import (
    CarrelError,
    Conflict,
    FileMissing,
    InvalidPath,
    LimitExceeded,
    NotFound,
    PlatformError,
)
from carrel.metrics import OK, outcome_of
from carrel.models import FilespaceFile, FilespacePage, SyncDirection, SyncSummary
from carrel.providers import Masks
from carrel.store import FilespaceChange, FilespaceEntry, FilespaceMark, FilespaceStore, SessionRecord
from carrel.workspaces.filespace import NOT_SYNCED, synced
from carrel.workspaces.filespace_contents import Contents, Draft
from carrel.workspaces.filespace_sync import (
    ASIDE,
    TOMBSTONE_S,
    Change,
    FilespaceSync,
    Mark,
    Stored,
    Synced,
    read_base,
    save_base,
)
from carrel.workspaces.layout import encode
from carrel.workspaces.remote import Remote
from carrel.workspaces.synced_tree import MOST_FILES

log = logging.getLogger("carrel.filespaces")

NOTICE = "the filespace could not be synced: "
"""How the notice of a session begins whose sync failed."""
MOST_CONFLICTS = 100
_PAGE = 1000
_LONGEST_PATH = 4096
_LONGEST_NAME = 255

T = TypeVar("T")


class _Entries:
    """The entries of a context for a thread: the queries run on the loop."""

    def __init__(self, store: FilespaceStore, context: str, loop: asyncio.AbstractEventLoop):
        self._store = store
        self._context = context
        self._loop = loop

    def newest(self) -> tuple[int, float]:
        return self._ask(self._store.newest(self._context))

    def changed(self, after: int) -> list[FilespaceEntry]:
        found: list[FilespaceEntry] = []
        while len(page := self._ask(self._store.changed(self._context, after=after, limit=_PAGE))) == _PAGE:
            found += page
            after = page[-1].version
            if len(found) > 2 * MOST_FILES:
                raise LimitExceeded(
                    f"the filespace has more than {MOST_FILES} files", field="files", hint="delete some of them"
                )
        return found + page

    def put(self, changes: Sequence[Change], mark: Mark) -> Stored:
        wanted = [FilespaceChange(*change) for change in changes]
        done = self._ask(self._store.put(self._context, wanted, FilespaceMark(*mark)))
        return Stored(done.entries, done.before, done.newest)

    def hashes(self) -> set[str]:
        return self._ask(self._store.hashes(self._context))

    def _ask(self, query: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(query, self._loop).result()


async def _no_masks(_record: SessionRecord) -> Masks | None:
    return None


class Filespaces:
    """The filespaces of every context. `directory` is where this server remembers what workspaces have of them."""

    def __init__(
        self,
        sessions: Sessions,
        operations: Operations,
        workspaces: Workspaces,
        store: FilespaceStore,
        remote: Remote,
        directory: str,
        *,
        default_cap: int,
    ):
        self._sessions = sessions
        self._operations = operations
        self._workspaces = workspaces
        self._store = store
        self._remote = remote
        self._bases = os.path.join(directory, "bases")
        self._spool = os.path.join(directory, "spool")
        self._default_cap = default_cap
        self.masks: Callable[[SessionRecord], Awaitable[Masks | None]] = _no_masks
        """What the sandbox of a session must not reach, where that is not known from its start."""
        _prepare(self._bases, self._spool)

    # with workspaces

    async def sync(self, name: str, direction: SyncDirection = SyncDirection.BOTH, actor: str = "") -> SyncSummary:
        """Bring the workspace of a running sandbox and its filespace together."""
        box = await self._sessions.find(name)
        arguments = {"direction": direction.value}
        context = box.record.context_id
        door = self._operations.session_door("sync_filespace", arguments, actor, box.record.id, context)
        async with door as traffic:
            if box.record.context_id is None:
                raise Conflict(
                    "an ephemeral sandbox keeps nothing, so it has no filespace",
                    field="id",
                    hint="make the sandbox with a context_id",
                )
            box.check_lease()
            masks = await self.masks(box.record) if box.masks == "unknown" else box.masks
            done = await self._sync(box.record, box.workspace, direction, hides(masks))
            traffic.took(done.pulled_bytes)
            traffic.gave(done.pushed_bytes)
            return done

    async def pull(self, record: SessionRecord, path: str) -> None:
        """Before a sandbox starts."""
        await self._sync(record, path, SyncDirection.PULL)

    async def push(self, record: SessionRecord, path: str) -> None:
        """After operations, and when a sandbox has stopped."""
        await self._sync(record, path, SyncDirection.PUSH)

    async def _sync(
        self, record: SessionRecord, path: str, direction: SyncDirection, hidden: Callable[[str], bool] | None = None
    ) -> SyncSummary:
        """Tried twice; what fails then is told by the session too."""
        context = record.context_id or ""
        began = time.monotonic()
        outcome = OK
        try:
            async with self._workspaces.keeping.still(context):
                try:
                    done = await self._attempt(context, path, direction, cap_bytes(record), hidden)
                except PlatformError as error:
                    log.info("the sync of context '%s' is tried again: %s", context, error.code)
                    done = await self._attempt(context, path, direction, cap_bytes(record), hidden)
        except BaseException as error:
            outcome = outcome_of(error)
            if isinstance(error, CarrelError):
                await self._operations.clean(context, error)  # it may quote the name of a file
                with suppress(CarrelError):  # the first failure tells more than that it cannot be written down
                    await self._sessions.note(record, notice=f"{NOTICE}{error.detail}"[:2000])
            raise
        finally:
            self._workspaces.metrics.synced(direction, outcome, time.monotonic() - began)
        if record.notice is not None and record.notice.startswith(NOTICE):
            await self._sessions.note(record, notice=None)
        return _summary(direction, done, time.monotonic() - began)

    async def _attempt(
        self,
        context: str,
        path: str,
        direction: SyncDirection,
        cap: int | None,
        hidden: Callable[[str], bool] | None,
    ) -> Synced:
        entries = _Entries(self._store, context, asyncio.get_running_loop())
        engine = FilespaceSync(path, self._base_path(context), entries, self._contents(context), hidden=hidden)
        return await _to_its_end(lambda: engine.run(direction, cap), engine.stop)

    # what a workspace has in common with its filespace, which travels with its snapshots

    @property
    def base(self) -> Base:
        """How snapshots keep it and bring it back."""
        return Base(self.base_bytes, self.set_base, self.forget_base)

    async def base_bytes(self, context: str) -> bytes:
        """What this server remembers."""
        return await asyncio.to_thread(read_base, self._base_path(context))

    async def set_base(self, context: str, base: bytes) -> None:
        """The workspace was brought back as it was when this was remembered; empty when nothing was."""
        if not base:
            await self.forget_base(context)
            return
        await asyncio.to_thread(save_base, self._base_path(context), base)

    async def forget_base(self, context: str) -> None:
        """The workspace is gone; the filespace stays."""

        def run() -> None:
            with suppress(FileNotFoundError):
                os.unlink(self._base_path(context))

        await asyncio.to_thread(run)

    # beside workspaces

    async def list(
        self, context: str, *, prefix: str = "", limit: int = 100, cursor: str | None = None, actor: str = ""
    ) -> FilespacePage:
        """The files in the order of their paths."""
        encode(context, ephemeral=False)
        async with self._operations.session_door("filespace_list", {"path": prefix}, actor, "", context, kind="file"):
            found, following = await self._store.page(context, prefix=prefix, limit=limit, cursor=cursor)
            return FilespacePage(items=[_file(entry) for entry in found], next=following)

    async def read(self, context: str, path: str, actor: str = "") -> AsyncIterator[int | bytes]:
        """First the number of bytes, then the bytes of a file."""
        contents = self._contents(context)
        door = self._operations.session_door("filespace_read", {"path": path}, actor, "", context, kind="file")
        async with door as traffic:
            entry = await self._store.get(context, _checked(path))
            if entry is None or entry.deleted or entry.hash is None:
                raise _missing(path)
            yield entry.size
            pieces = contents.read(entry.hash, entry.size)
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                traffic.gave(len(piece))
                yield piece

    async def write(
        self,
        context: str,
        path: str,
        content: AsyncIterator[bytes] | bytes,
        *,
        mode: int = 0o644,
        actor: str = "",
    ) -> FilespaceFile:
        """A file from bytes or from a stream of any length, whole or not at all. It is the last write of its path."""
        contents = self._contents(context)
        door = self._operations.session_door("filespace_write", {"path": path}, actor, "", context, kind="file")
        async with door as traffic:
            room = await self._room(context, _checked(path))
            draft = await _drafted(contents, content, room)
            traffic.took(draft.size)
            try:
                await asyncio.to_thread(contents.keep, draft)
                change = FilespaceChange(path, draft.hash, draft.size, mode & 0o777)
                stored = await self._store.put(context, [change])
            finally:
                await asyncio.to_thread(draft.drop)
            return _file(next(entry for entry in stored.entries if entry.path == path))

    async def delete(self, context: str, path: str, actor: str = "") -> None:
        """Delete a file; workspaces follow with their next pull."""
        encode(context, ephemeral=False)
        async with self._operations.session_door("filespace_delete", {"path": path}, actor, "", context, kind="file"):
            stored = await self._store.put(context, [FilespaceChange(_checked(path))])
            if not stored.entries:
                raise _missing(path)

    async def collect(self, context: str) -> int:
        """Remove contents that no file has any more and what was deleted long ago; says how many contents."""
        entries = _Entries(self._store, context, asyncio.get_running_loop())
        async with self._workspaces.keeping.still(context):
            await self._store.forget_tombstones(context, TOMBSTONE_S)
            return await _to_its_end(lambda: self._contents(context).collect(entries.hashes))

    async def forget(self, context: str, actor: str = "") -> None:
        """Delete a filespace with everything in it; the workspace stays. May be repeated."""
        encode(context, ephemeral=False)
        async with self._operations.session_door("filespace_forget", {}, actor, "", context, kind="file"):
            await self.erase(context)

    async def holds(self, context: str) -> bool:
        """Whether a filespace has any file. Passes no door: for upkeep."""
        return bool((await self._store.page(context, limit=1))[0])

    async def erase(self, context: str) -> None:
        """Delete a filespace with everything in it. Passes no door: the caller has been admitted."""
        contents = self._contents(context)
        async with self._workspaces.keeping.still(context):
            await self._store.forget(context)
            await self.forget_base(context)
            await _to_its_end(contents.forget)

    # inner

    def _contents(self, context: str) -> Contents:
        return Contents(self._remote, encode(context, ephemeral=False), self._spool)

    def _base_path(self, context: str) -> str:
        return os.path.join(self._bases, encode(context, ephemeral=False))

    async def _room(self, context: str, path: str) -> int:
        """How many bytes a file may have."""
        try:
            cap = cap_bytes(await self._sessions.record(context)) or self._default_cap
        except NotFound:
            cap = self._default_cap
        count, used = await self._store.size(context)
        there = await self._store.get(context, path)
        if there is not None and not there.deleted:
            used -= there.size
        elif count >= MOST_FILES:
            raise LimitExceeded(f"the filespace has {count} files", field="files", hint="delete some of them")
        return max(0, cap - used)


def _prepare(bases: str, spool: str) -> None:
    """Make the directories; what a server that was killed left on its way is removed."""
    try:
        for path in (bases, spool):
            os.makedirs(path, 0o700, exist_ok=True)
        left = [os.path.join(spool, name) for name in os.listdir(spool)]
        left += [os.path.join(bases, name) for name in os.listdir(bases) if name.startswith(ASIDE)]
        for path in left:
            os.unlink(path)
    except OSError as error:
        raise PlatformError(f"filespaces cannot be used: {error.strerror}", field="data_dir") from None


async def _drafted(contents: Contents, content: AsyncIterator[bytes] | bytes, room: int) -> Draft:
    drafting = contents.drafting()
    try:
        async for piece in _pieces(content):
            if drafting.size + len(piece) > room:
                raise LimitExceeded(
                    f"the filespace has room for {room} bytes more",
                    field="disk_mb",
                    hint="delete files in it, or raise the limit of the workspace",
                )
            await asyncio.to_thread(drafting.add, piece)
        return await asyncio.to_thread(drafting.finish)
    finally:
        await asyncio.to_thread(drafting.drop)


async def _pieces(content: AsyncIterator[bytes] | bytes) -> AsyncIterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    async for piece in content:
        yield piece


async def _to_its_end(work: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """Run in a thread, and wait for it even when nobody waits for us: a thread goes on, and must not meet another."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        await asyncio.gather(running, return_exceptions=True)
        raise


def _names(path: str) -> Iterator[bytes]:
    for name in path.split("/"):
        yield name.encode("utf-8", "surrogateescape")


def _checked(path: str) -> str:
    """A path that a file of a workspace can have, written in the one way."""
    try:
        names = list(_names(path))
    except UnicodeEncodeError:
        raise InvalidPath("the path cannot be a file name", field="path", hint="use UTF-8 names") from None
    if (
        any(name in {b"", b".", b".."} or len(name) > _LONGEST_NAME or b"\0" in name for name in names)
        or sum(len(name) + 1 for name in names) > _LONGEST_PATH
    ):
        raise InvalidPath(
            f"{path[:100]!r} is no path of a filespace",
            field="path",
            hint="give it relative to the workspace, without '.' or '..', such as data/in.csv",
        )
    if not synced(path):
        raise InvalidPath(
            "a filespace does not hold this",
            field="path",
            hint=f"these names stay out of it: {', '.join(sorted(NOT_SYNCED))}",
        )
    return path


def _missing(path: str) -> FileMissing:
    return FileMissing(f"the filespace has no file '{path[:200]}'", field="path", hint="list the files first")


def _file(entry: FilespaceEntry) -> FilespaceFile:
    return FilespaceFile(
        path=entry.path,
        size=entry.size,
        mode=f"{entry.mode:o}",
        hash=entry.hash or "",
        updated_at=datetime.fromtimestamp(entry.updated_at, UTC),
    )


def _summary(direction: SyncDirection, done: Synced, seconds: float) -> SyncSummary:
    return SyncSummary(
        direction=direction,
        pushed=done.pushed,
        pushed_bytes=done.pushed_bytes,
        push_deleted=done.push_deleted,
        pulled=done.pulled,
        pulled_bytes=done.pulled_bytes,
        pull_deleted=done.pull_deleted,
        conflicts=done.conflicts[:MOST_CONFLICTS],
        skipped=done.skipped,
        duration_ms=seconds * 1000,
    )
