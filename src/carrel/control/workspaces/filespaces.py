"""Operations on filespaces: sync with a workspace; read and write files without one. Each passes admission.

Connects the sync with sessions and records. Only a context has a filespace: an ephemeral sandbox keeps nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

from carrel.control.governance.policy_attachments import PolicyMasks
from carrel.control.operations.caller import Caller
from carrel.control.operations.operations import Operations
from carrel.control.sessions.masks import hides
from carrel.control.sessions.sessions import Sessions
from carrel.control.workspaces.filespace_files import FilespaceFiles
from carrel.control.workspaces.workspaces import cap_bytes, refuse_folder
from carrel.errors import Conflict, FileMissing, InvalidPath, LimitExceeded, NotFound
from carrel.models import FilespaceFile, FilespacePage, SyncDirection, SyncSummary
from carrel.models import operations as op
from carrel.store import FilespaceChange, FilespaceEntry, FilespaceStore
from carrel.workspaces.filespace import NOT_SYNCED, synced
from carrel.workspaces.filespace_contents import Contents, HashedContent
from carrel.workspaces.layout import encode
from carrel.workspaces.synced_tree import MOST_FILES

_LONGEST_PATH = 4096
_LONGEST_NAME = 255


class Filespaces:
    """The filespaces of every context, for callers."""

    def __init__(
        self,
        sessions: Sessions,
        operations: Operations,
        store: FilespaceStore,
        files: FilespaceFiles,
        masks: PolicyMasks,
        *,
        default_cap: int,
    ):
        self._sessions = sessions
        self._operations = operations
        self._store = store
        self._files = files
        self._masks = masks
        self._default_cap = default_cap

    # with workspaces

    async def sync(self, caller: Caller, name: str, direction: SyncDirection = SyncDirection.BOTH) -> SyncSummary:
        """Sync the workspace of a running sandbox with its filespace."""
        box = await self._sessions.find(name)
        arguments, record = {"direction": direction.value}, box.record
        async with self._operations.admit(
            caller, op.SYNC_FILESPACE, arguments, record.id, record.context_id
        ) as traffic:
            if box.record.context_id is None:
                raise Conflict(
                    "an ephemeral sandbox keeps nothing, so it has no filespace",
                    field="id",
                    hint="make the sandbox with a context_id",
                )
            refuse_folder(record, "it is not synced with a filespace")
            box.check_lease()
            masks = await self._masks.of(box.record) if box.masks == "unknown" else box.masks
            done = await self._files.sync(box.record, box.workspace, direction, hides(masks))
            traffic.count_in(done.pulled_bytes)
            traffic.count_out(done.pushed_bytes)
            return done

    # without workspaces

    async def list(
        self, caller: Caller, context: str, *, prefix: str = "", limit: int = 100, cursor: str | None = None
    ) -> FilespacePage:
        """List the files in the order of their paths."""
        encode(context, ephemeral=False)
        async with self._operations.admit(caller, op.LIST_FILESPACE, {"path": prefix}, context_id=context):
            found, following = await self._store.page(context, prefix=prefix, limit=limit, cursor=cursor)
            return FilespacePage(items=[_file(entry) for entry in found], next=following)

    async def read(self, caller: Caller, context: str, path: str) -> AsyncIterator[int | bytes]:
        """Yield the size of a file, then its bytes."""
        contents = self._files.contents(context)
        async with self._operations.admit(caller, op.READ_FILESPACE, {"path": path}, context_id=context) as traffic:
            entry = await self._store.get(context, _checked(path))
            if entry is None or entry.deleted or entry.hash is None:
                raise _missing(path)
            yield entry.size
            pieces = contents.read(entry.hash, entry.size)
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                traffic.count_out(len(piece))
                yield piece

    async def write(
        self, caller: Caller, context: str, path: str, content: AsyncIterator[bytes] | bytes, *, mode: int = 0o644
    ) -> FilespaceFile:
        """Write a file atomically, from bytes or from a stream of any length. It wins over earlier
        writes of its path.
        """
        contents = self._files.contents(context)
        async with self._operations.admit(caller, op.WRITE_FILESPACE, {"path": path}, context_id=context) as traffic:
            room = await self._room(context, _checked(path))
            draft = await _drafted(contents, content, room)
            traffic.count_in(draft.size)
            try:
                await asyncio.to_thread(contents.keep, draft)
                change = FilespaceChange(path, draft.hash, draft.size, mode & 0o777)
                stored = await self._store.put(context, [change])
            finally:
                await asyncio.to_thread(draft.drop)
            return _file(next(entry for entry in stored.entries if entry.path == path))

    async def delete(self, caller: Caller, context: str, path: str) -> None:
        """Delete a file; workspaces follow with their next pull."""
        encode(context, ephemeral=False)
        async with self._operations.admit(caller, op.DELETE_FILESPACE, {"path": path}, context_id=context):
            stored = await self._store.put(context, [FilespaceChange(_checked(path))])
            if not stored.entries:
                raise _missing(path)

    async def forget(self, caller: Caller, context: str) -> None:
        """Delete a filespace with everything in it; the workspace stays. May be repeated."""
        encode(context, ephemeral=False)
        async with self._operations.admit(caller, op.FORGET_FILESPACE, {}, context_id=context):
            await self._files.erase(context)

    # inner

    async def _room(self, context: str, path: str) -> int:
        """Return how many bytes a file may have."""
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


async def _drafted(contents: Contents, content: AsyncIterator[bytes] | bytes, room: int) -> HashedContent:
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


def _names(path: str) -> Iterator[bytes]:
    for name in path.split("/"):
        yield name.encode("utf-8", "surrogateescape")


def _checked(path: str) -> str:
    """Check that a path can be one of a workspace, in normal form."""
    try:
        names = list(_names(path))
    except UnicodeEncodeError:
        raise InvalidPath("the path cannot be a file name", field="path", hint="use UTF-8 names") from None
    if (
        any(name in {b"", b".", b".."} or len(name) > _LONGEST_NAME or b"\0" in name for name in names)
        or sum(len(name) + 1 for name in names) > _LONGEST_PATH
    ):
        raise InvalidPath(
            f"{path[:100]!r} is not a path of a filespace",
            field="path",
            hint="give it relative to the workspace, without '.' or '..', such as data/in.csv",
        )
    if not synced(path):
        raise InvalidPath(
            "a filespace does not contain this",
            field="path",
            hint=f"these names are never synced: {', '.join(sorted(NOT_SYNCED))}",
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
