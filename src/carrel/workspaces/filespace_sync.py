"""Carries a sync out: reads the workspace, follows the plan, and remembers what both sides have in common.

May be killed at any point: what it is about to write is remembered first, so the next sync knows its own traces.
Blocking; who calls sees to it that a workspace has one sync at a time.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVar

from carrel.errors import Conflict, LimitExceeded, PlatformError
from carrel.models import SyncDirection
from carrel.workspaces.filespace import (
    UNSURE,
    Base,
    Content,
    Entry,
    LocalFile,
    Pending,
    Plan,
    Row,
    content_of,
    plan,
)
from carrel.workspaces.filespace_contents import Contents, Draft
from carrel.workspaces.synced_tree import Obstructed, Scan, SyncedTree
from carrel.workspaces.volumes.objects import sync_directory, write_whole

TOMBSTONE_S = 60 * 86_400.0
"""How long the filespace remembers at least that a file was deleted."""
_STALE_S = TOMBSTONE_S / 2
_WORKERS = 8
_BATCH = 1000
_MANY_BYTES = 16 << 20
_BLOCK = 4096
ASIDE = "."
"""How the name of a file begins that is on its way; no workspace has such a name."""

A = TypeVar("A")
B = TypeVar("B")


class Change(NamedTuple):
    """A file to write to the filespace, or without a hash one to delete while its entry has the version expected."""

    path: str
    hash: str | None
    size: int
    mode: int
    expected: int | None


class Mark(NamedTuple):
    """What is stored together with changes, so that a push that was killed can tell how far it came."""

    path: str
    token: str
    number: int


class Stored(NamedTuple):
    """The entries that changes made, and the newest version before them and with them."""

    entries: Sequence[Entry]
    before: int
    newest: int


class Entries(Protocol):
    """The entries of one filespace."""

    def newest(self) -> tuple[int, float]:
        """The newest version, and the time by the filespace's clock."""
        ...

    def changed(self, after: int) -> Sequence[Entry]:
        """Every entry with a version above `after`, in their order."""
        ...

    def put(self, changes: Sequence[Change], mark: Mark) -> Stored:
        """Make changes and leave a mark, all at once."""
        ...


@dataclass(slots=True)
class Synced:
    """What a sync did."""

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
    """What is remembered in a file; an empty base when there is none or it is damaged."""
    return Base.unpack(read_base(path))


def read_base(path: str) -> bytes:
    """The bytes of what is remembered in a file."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise PlatformError(f"what the filespace knows cannot be read: {error.strerror}", field="data_dir") from None


def save_base(path: str, raw: bytes) -> None:
    """Remember in a file, whole or not at all."""
    aside = os.path.join(os.path.dirname(path), f"{ASIDE}{secrets.token_hex(8)}")
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            write_whole(fd, raw)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(aside, path)
        sync_directory(os.path.dirname(path))
    except OSError as error:
        with suppress(OSError):
            os.unlink(aside)
        raise PlatformError(f"what the filespace knows cannot be kept: {error.strerror}", field="data_dir") from None


class FilespaceSync:
    """One sync of the workspace at `path`; `base_path` is the file where it remembers."""

    def __init__(
        self,
        path: str,
        base_path: str,
        entries: Entries,
        contents: Contents,
        *,
        hidden: Callable[[str], bool] | None = None,
    ):
        """`hidden` says which paths something that uses the workspace right now must not see replaced."""
        self._hidden = hidden
        self._path = path
        self._base_path = base_path
        self._entries = entries
        self._contents = contents
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Break off soon. What is done stays done."""
        self._stopped.set()

    def run(self, direction: SyncDirection, cap_bytes: int | None) -> Synced:
        """Sync. `LimitExceeded` before anything is written when the workspace is over its cap or would be, `Conflict`
        when a file would be replaced that is hidden from who uses it.
        """
        with closing(SyncedTree(self._path, cap_bytes)) as tree:
            base = load_base(self._base_path)
            newest, now = self._entries.newest()
            if newest < base.cursor:  # the filespace was deleted or brought back from a copy: it is another one
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

    def _pull(self, tree: SyncedTree, scan: Scan, made: Plan, known: Base, done: Synced) -> None:
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
            known.rows[entry.path] = Row(entry.version, content, entry.size, UNSURE, placed)
            done.pulled += placed
            done.pulled_bytes += entry.size if placed else 0
            if not expected:
                done.conflicts.append(entry.path)
        tree.flush()

    def _write(self, tree: SyncedTree, scan: Scan, entry: Entry, content: Content) -> bool | None:
        """Whether it replaced what was expected; None when it cannot be there."""
        try:
            data = self._contents.read(content.hash, entry.size)
            return tree.write(entry.path, entry.mode & 0o777, data, scan.files.get(entry.path))
        except Obstructed:
            return None

    # into the filespace

    def _push(self, tree: SyncedTree, scan: Scan, made: Plan, known: Base, done: Synced) -> None:
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
        changes = [Change(path, None, 0, 0, version) for path, version in gone.items()]
        changes += [
            Change(path, local.content.hash, local.facts.size, local.content.mode, None)
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
            if stored.before == known.cursor:  # nobody else wrote meanwhile
                known.cursor, known.merged = stored.newest, True

    def _upload(self, tree: SyncedTree, path: str, there: set[str]) -> LocalFile | None:
        drafts: list[Draft] = []

        def read(fd: int, size: int) -> Draft:
            drafts.append(self._contents.draft(fd, size))
            return drafts[-1]

        try:
            taken = tree.take(path, read)
            if taken is None:
                return None
            draft, local = taken
            if draft.hash not in there:
                self._contents.keep(draft)
                there.add(draft.hash)
            return local
        finally:
            for draft in drafts:
                draft.drop()

    @staticmethod
    def _stored(entry: Entry, local: LocalFile | None, known: Base, done: Synced) -> None:
        if local is None or entry.deleted:
            known.rows.pop(entry.path, None)
            done.push_deleted += 1
            return
        known.rows[entry.path] = Row(entry.version, local.content, entry.size, local.known, True)
        done.pushed += 1
        done.pushed_bytes += entry.size

    # inner

    def _check(self) -> None:
        if self._stopped.is_set():
            raise PlatformError("the sync was broken off", hint="it goes on where it was with the next one")

    def _all(self, work: Callable[[A], B], items: Sequence[A]) -> Iterable[B]:
        """Do many, some at a time, most of which wait for the network; the first failure ends it."""

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
    """Refuse a workspace over its cap before it is read. A file that only claims to be big counts as what it claims."""
    used = max(scan.allocated, scan.apparent)
    if cap is not None and used > cap:
        raise LimitExceeded(
            f"the workspace holds {used} bytes and may hold {cap}",
            field="disk_mb",
            hint="delete files, then sync again",
        )


def _refuse_hidden(made: Plan, hidden: Callable[[str], bool]) -> None:
    """Refuse to put a file where a running sandbox must not read: the mask lies on the file that was there, if any."""
    path = next((entry.path for entry in made.writes if hidden(entry.path)), None)
    if path is not None:
        raise Conflict(
            f"the filespace has a change of {path[:200]!r}, which the policy hides or keeps from being written: in the "
            "sandbox that runs it would not be",
            field="direction",
            hint="stop the sandbox: when it starts again it pulls first, and the file is masked then",
        )


def _room(made: Plan, scan: Scan, cap: int | None) -> None:
    """Refuse a pull whose files would not fit."""
    if cap is None or not made.writes:
        return
    freed = [scan.files[path] for path in made.removals]
    freed += [scan.files[entry.path] for entry in made.writes if entry.path in scan.files]
    grown = sum(-(-entry.size // _BLOCK) * _BLOCK for entry in made.writes)
    after = scan.allocated + grown - sum(local.allocated for local in freed)
    claimed = scan.apparent + sum(entry.size for entry in made.writes) - sum(local.facts.size for local in freed)
    if max(after, claimed) > cap:
        raise LimitExceeded(
            f"with what the filespace holds the workspace would have {max(after, claimed)} bytes, and may hold {cap}",
            field="disk_mb",
            hint="delete files in the filespace, or raise the limit of the workspace",
        )
