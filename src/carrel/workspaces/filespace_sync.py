"""Syncs a workspace with its filespace: reads the workspace, executes the plan, and stores the common state (the base).

May be killed at any point: it stores what it is about to write first, so the next sync recognizes it. Blocking; the
caller makes sure that a workspace has one sync at a time.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVar

from carrel.errors import Conflict, LimitExceeded, PlatformError
from carrel.models import SyncDirection
from carrel.primitives.atomic import draft, write_all
from carrel.workspaces.filespace import (
    UNSURE,
    Base,
    BaseRow,
    Content,
    LocalFile,
    Pending,
    SyncEntry,
    SyncPlan,
    content_of,
    plan,
)
from carrel.workspaces.filespace_contents import Contents, HashedContent
from carrel.workspaces.synced_tree import Obstructed, Scan, SyncedTree

TOMBSTONE_S = 60 * 86_400.0
"""How long, at least, the filespace keeps the tombstone of a deleted file."""
_STALE_S = TOMBSTONE_S / 2
_WORKERS = 8
_BATCH = 1000
_MANY_BYTES = 16 << 20
_BLOCK = 4096
ASIDE = "."
"""The first character of the name of an unfinished file; no workspace has such a name."""

A = TypeVar("A")
B = TypeVar("B")


class SyncChange(NamedTuple):
    """A file to write to the filespace, or without a hash to delete while its entry has the expected version."""

    path: str
    hash: str | None
    size: int
    mode: int
    expected: int | None


class Mark(NamedTuple):
    """Stored with a batch of changes, so that the sync after a killed push knows which batches were stored."""

    path: str
    token: str
    number: int


class StoredBatch(NamedTuple):
    """The entries of stored changes, and the newest version before and after them."""

    entries: Sequence[SyncEntry]
    before: int
    newest: int


class Entries(Protocol):
    """The entries of one filespace."""

    def newest(self) -> tuple[int, float]:
        """Return the newest version, and the time by the filespace's clock."""

    def changed(self, after: int) -> Sequence[SyncEntry]:
        """Return every entry with a version above `after`, in order."""

    def put(self, changes: Sequence[SyncChange], mark: Mark) -> StoredBatch:
        """Store changes and a mark, all or nothing."""


@dataclass(slots=True)
class Synced:
    """The result of a sync."""

    pushed: int = 0
    pushed_bytes: int = 0
    push_deleted: int = 0
    pulled: int = 0
    pulled_bytes: int = 0
    pull_deleted: int = 0
    skipped: int = 0
    read: int = 0
    conflicts: list[str] = field(default_factory=list)


def load_base(path: str) -> Base:
    """Read a base from a file; an empty base when the file is missing or damaged."""
    return Base.unpack(read_base(path))


def read_base(path: str) -> bytes:
    """Return the bytes of a base file; empty when it is missing."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise PlatformError(f"the base of the filespace cannot be read: {error.strerror}", field="data_dir") from None


def save_base(path: str, raw: bytes) -> None:
    """Write a base file, whole or not at all, durably."""
    aside = os.path.join(os.path.dirname(path), f"{ASIDE}{secrets.token_hex(8)}")
    try:
        with draft(path, aside=aside, durable=True) as fd:
            write_all(fd, raw)
    except OSError as error:
        raise PlatformError(f"the base of the filespace cannot be saved: {error.strerror}", field="data_dir") from None


class FilespaceSync:
    """One sync of the workspace at `path`; `base_path` is the file of its base."""

    def __init__(
        self,
        path: str,
        base_path: str,
        entries: Entries,
        contents: Contents,
        *,
        hidden: Callable[[str], bool] | None = None,
    ):
        """`hidden` says which paths must not be replaced, because a running sandbox must not see them."""
        self._hidden = hidden
        self._path = path
        self._base_path = base_path
        self._entries = entries
        self._contents = contents
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop soon. Finished work stays."""
        self._stopped.set()

    def run(self, direction: SyncDirection, cap_bytes: int | None) -> Synced:
        """Sync. Before anything is written, raises `LimitExceeded` when the workspace is or would be over its cap, and
        `Conflict` when it would replace a file that is hidden from the running sandbox.
        """
        with closing(SyncedTree(self._path, cap_bytes)) as tree:
            base = load_base(self._base_path)
            newest, now = self._entries.newest()
            if newest < base.cursor:  # another filespace: this one was deleted or restored from a backup
                base = Base()
            complete = base.cursor == 0 or now - base.synced_at > _STALE_S
            remote = self._entries.changed(0 if complete else base.cursor) if complete or newest > base.cursor else ()
            scan = tree.scan(base.rows)
            _refuse_over(scan, cap_bytes)
            read = tree.read(scan)
            made = plan(base, scan.files, remote, direction, complete=complete)
            _room(made, scan, cap_bytes)
            if self._hidden is not None:
                _refuse_hidden(made, self._hidden)
            done = Synced(skipped=scan.skipped, read=read, conflicts=made.conflicts)
            known = replace(base, rows=made.rows, pending={})
            if made.writes or made.removals:
                self._pull(tree, scan, made, known, done)
            if direction is not SyncDirection.PUSH:
                known.cursor = max((entry.version for entry in remote), default=base.cursor)
                known.merged, known.synced_at = True, now
            if made.uploads or made.tombstones:
                self._push(tree, scan, made, known, done)
            if replace(known, synced_at=base.synced_at) != base or now - base.synced_at > _STALE_S / 2:
                self._remember(known)
            done.conflicts = sorted(set(done.conflicts))
            return done

    def _remember(self, base: Base) -> None:
        save_base(self._base_path, base.pack())

    # into the workspace

    def _pull(self, tree: SyncedTree, scan: Scan, made: SyncPlan, known: Base, done: Synced) -> None:
        wanted = [(entry, content) for entry in made.writes if (content := content_of(entry)) is not None]
        intended = {entry.path: Pending(content, version=entry.version) for entry, content in wanted}
        self._remember(replace(known, pending=intended))
        for path in made.removals:
            self._check()
            known.rows.pop(path, None)
            if tree.remove(path, scan.files[path]):
                done.pull_deleted += 1
            else:
                done.conflicts.append(path)
        for (entry, content), expected in zip(
            wanted, self._all(lambda each: self._write(tree, scan, *each), wanted), strict=True
        ):
            placed = expected is not None
            known.rows[entry.path] = BaseRow(entry.version, content, entry.size, UNSURE, placed)
            done.pulled += placed
            done.pulled_bytes += entry.size if placed else 0
            if not expected:
                done.conflicts.append(entry.path)
        tree.flush()

    def _write(self, tree: SyncedTree, scan: Scan, entry: SyncEntry, content: Content) -> bool | None:
        """Return whether it replaced the expected file; None when something obstructs it."""
        try:
            data = self._contents.read(content.hash, entry.size)
            return tree.write(entry.path, entry.mode & 0o777, data, scan.files.get(entry.path))
        except Obstructed:
            return None

    # into the filespace

    def _push(self, tree: SyncedTree, scan: Scan, made: SyncPlan, known: Base, done: Synced) -> None:
        size = sum(scan.files[path].facts.size for path in made.uploads)
        there = self._contents.recent() if size > _MANY_BYTES else set()
        files = {
            path: taken
            for path, taken in zip(
                made.uploads, self._all(lambda path: self._upload(tree, path, there), made.uploads), strict=True
            )
            if taken is not None
        }
        gone = {path: version for path, version in made.tombstones.items() if tree.gone(path)}
        changes = [SyncChange(path, None, 0, 0, version) for path, version in gone.items()]
        changes += [
            SyncChange(path, local.content.hash, local.facts.size, local.content.mode, None)
            for path, local in files.items()
        ]
        batches = [changes[start : start + _BATCH] for start in range(0, len(changes), _BATCH)]
        intended = {
            change.path: Pending(files[change.path].content, batch=number)
            for number, batch in enumerate(batches, 1)
            for change in batch
            if change.hash is not None
        }
        known.token = secrets.token_hex(8)
        self._remember(replace(known, pending=intended))
        for number, batch in enumerate(batches, 1):
            self._check()
            stored = self._entries.put(batch, Mark(known.mark, known.token, number))
            for entry in stored.entries:
                self._stored(entry, files.get(entry.path), known, done)
            if stored.before == known.cursor:  # no one else wrote meanwhile
                known.cursor, known.merged = stored.newest, True

    def _upload(self, tree: SyncedTree, path: str, there: set[str]) -> LocalFile | None:
        drafts: list[HashedContent] = []

        def read(fd: int, size: int) -> HashedContent:
            drafts.append(self._contents.draft(fd, size))
            return drafts[-1]

        try:
            taken = tree.take(path, read)
            if taken is None:
                return None
            read_draft, local = taken
            if read_draft.hash not in there:
                self._contents.keep(read_draft)
                there.add(read_draft.hash)
            return local
        finally:
            for each in drafts:
                each.drop()

    @staticmethod
    def _stored(entry: SyncEntry, local: LocalFile | None, known: Base, done: Synced) -> None:
        if local is None or entry.deleted:
            known.rows.pop(entry.path, None)
            done.push_deleted += 1
            return
        known.rows[entry.path] = BaseRow(entry.version, local.content, entry.size, local.known, True)
        done.pushed += 1
        done.pushed_bytes += entry.size

    # inner

    def _check(self) -> None:
        if self._stopped.is_set():
            raise PlatformError("the sync was interrupted", hint="the next sync continues it")

    def _all(self, work: Callable[[A], B], items: Sequence[A]) -> Iterable[B]:
        """Process items in several threads, most of which wait for the network; the first failure ends it."""

        def guarded(item: A) -> B:
            self._check()
            return work(item)

        if len(items) < 2:
            return [guarded(item) for item in items]
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="carrel-sync") as pool:
            jobs = [pool.submit(guarded, item) for item in items]
            try:
                return [job.result() for job in jobs]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _refuse_over(scan: Scan, cap: int | None) -> None:
    """Refuse a workspace over its cap before it is read. A sparse file counts with its apparent size."""
    used = max(scan.allocated, scan.apparent)
    if cap is not None and used > cap:
        raise LimitExceeded(
            f"the workspace has {used} bytes, and its limit is {cap}",
            field="disk_mb",
            hint="delete files, then sync again",
        )


def _refuse_hidden(made: SyncPlan, hidden: Callable[[str], bool]) -> None:
    """Refuse to write a file that a running sandbox must not read: only the former file has the mask."""
    path = next((entry.path for entry in made.writes if hidden(entry.path)), None)
    if path is not None:
        raise Conflict(
            f"the filespace changed {path[:200]!r}, which the policy hides or makes read-only; the running sandbox "
            "would see the new file without that protection",
            field="direction",
            hint="stop the sandbox: at its next start it pulls first, and the file is masked then",
        )


def _room(made: SyncPlan, scan: Scan, cap: int | None) -> None:
    """Refuse a pull whose files do not fit."""
    if cap is None or not made.writes:
        return
    freed = [scan.files[path] for path in made.removals]
    freed += [scan.files[entry.path] for entry in made.writes if entry.path in scan.files]
    grown = sum(-(-entry.size // _BLOCK) * _BLOCK for entry in made.writes)
    after = scan.allocated + grown - sum(local.allocated for local in freed)
    claimed = scan.apparent + sum(entry.size for entry in made.writes) - sum(local.facts.size for local in freed)
    if max(after, claimed) > cap:
        raise LimitExceeded(
            f"with the files of the filespace the workspace would have {max(after, claimed)} bytes; its limit is {cap}",
            field="disk_mb",
            hint="delete files in the filespace, or raise the limit of the workspace",
        )
