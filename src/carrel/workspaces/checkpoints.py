"""Checkpoints: immutable pictures of a person's folder, so that the changes of an agent can be shown and undone.

The folder stays where it is; only its content is copied, into a store of objects of its own. The same files cost space
once. Nothing here knows sessions or sandboxes. Blocking.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

from carrel.errors import CarrelError, Conflict, LimitExceeded, NotFound, SnapshotDamaged
from carrel.primitives.atomic import sync_directory, write_file
from carrel.primitives.keyed_lock import KeyedThreadLocks
from carrel.primitives.libc import open_without_links
from carrel.primitives.trees import remove_tree
from carrel.workspaces.folder_rules import FolderRules
from carrel.workspaces.layout import decode, encode
from carrel.workspaces.line_diffs import unified
from carrel.workspaces.undoing import SET_IDS, Difference, Differences, Undo, Undone, differences
from carrel.workspaces.volumes.base import Collected, check_name
from carrel.workspaces.volumes.capture import Captured, Known, capture, pack_known, unpack_known
from carrel.workspaces.volumes.directory import failing
from carrel.workspaces.volumes.objects import Batch, ObjectStore, Reader, digest, sweep
from carrel.workspaces.volumes.trees import EntryKind, Node, Tree, mark, unpack_tree

MOST_PATCH_BYTES = 1 << 20
"""The largest file whose changes are shown line by line."""
MOST_PATCHED = 2000
"""The most files whose changes are shown at once."""
MOST_PATCH_CHARACTERS = 4 << 20
_MOST_LINES = 20_000
_LARGEST_RECORD = 1 << 20


class CheckpointKind(StrEnum):
    """When a checkpoint was taken."""

    START = "start"
    """A sandbox was about to start on the folder."""
    END = "end"
    """That sandbox, or that undo, has ended."""
    REQUEST = "request"
    """A caller asked for it."""
    UNDO = "undo"
    """Changes were about to be undone."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint. `begin` is the checkpoint before the run that this one ends. `identity` is the device and inode
    of the folder. `ignored` and `left_out` name at most 100 entries that are not recorded.
    """

    id: str
    context_id: str
    folder: str
    identity: tuple[int, int]
    kind: CheckpointKind
    reason: str
    created_at: float
    tree: str
    begin: str | None
    files: int
    bytes: int
    new_bytes: int
    ignored: tuple[str, ...]
    ignored_count: int
    left_out: tuple[str, ...]
    left_out_count: int


@dataclass(slots=True)
class Patch:
    """Changes line by line. `omitted` are changed files without lines: binary, large, links."""

    texts: list[str] = field(default_factory=list)
    omitted: list[bytes] = field(default_factory=list)
    truncated: bool = False


def open_folder(path: str) -> int:
    """Open a directory by its absolute path; no part of the path may be a link."""
    place = open_without_links(path)
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
    finally:
        os.close(place)


class CheckpointStore:
    """The checkpoints of all folders of a server, below one directory. May be used from several threads."""

    def __init__(self, root: str, *, most_bytes: int, ignored: Sequence[str] = ()):
        self._root = root
        self._records = os.path.join(root, "records")
        self._cache = os.path.join(root, "cache")
        self._store = ObjectStore(root)
        self._most_bytes = most_bytes
        self._ignored = tuple(ignored)
        self._locks = KeyedThreadLocks()

    def open(self) -> None:
        """Create the directories, and remove unfinished files of a killed process unless another process works."""
        with failing("cannot use the directory of checkpoints"):
            self._store.prepare()
            for path in (self._records, self._cache):
                os.makedirs(path, 0o700, exist_ok=True)
            with self._store.exclusive(wait=False) as held:
                if held:
                    self._clean()

    def _clean(self) -> None:
        for name in os.listdir(self._store.temporary):
            os.unlink(os.path.join(self._store.temporary, name))

    # taking

    def take(
        self, context_id: str, folder: str, kind: CheckpointKind, *, begin: str | None = None, reason: str = ""
    ) -> Checkpoint:
        """Record the folder as it is now. `reason` is a text for people. A crash leaves a whole checkpoint or none."""
        with self._locks.hold(folder), self._store.shared(), self._opened(folder) as root:
            made, _ = self._take(context_id, folder, root, kind, begin, reason)
        return made

    def _take(
        self, context_id: str, folder: str, root: int, kind: CheckpointKind, begin: str | None, reason: str = ""
    ) -> tuple[Checkpoint, Captured]:
        captured, rules, stored = self._capture(folder, root)
        info = os.fstat(root)
        made = Checkpoint(
            id=f"cp-{time.time_ns():016x}-{secrets.token_hex(2)}",
            context_id=context_id,
            folder=folder,
            identity=(info.st_dev, info.st_ino),
            kind=kind,
            reason=reason,
            created_at=time.time(),
            tree=captured.tree.hex(),
            begin=begin,
            files=captured.files,
            bytes=captured.bytes,
            new_bytes=stored,
            ignored=tuple(rules.ignored),
            ignored_count=rules.ignored_count,
            left_out=tuple(rules.left_out),
            left_out_count=rules.left_out_count,
        )
        with failing("cannot write the checkpoint"):
            self._publish(made)
        return made, captured

    def _capture(self, folder: str, root: int) -> tuple[Captured, FolderRules, int]:
        cache = os.path.join(self._cache, hashlib.sha256(os.fsencode(folder)).hexdigest())
        known, generation = self._load(cache)
        current = self._store.generation()
        info = os.fstat(root)
        rules = FolderRules((info.st_uid, info.st_gid), self._most_bytes, self._ignored)
        try:
            with failing(f"cannot record the folder {folder}"), Batch(self._store) as batch:
                found = capture(self._store, batch, root, known, trusted=generation == current, rules=rules)
                batch.finish()
                stored = batch.stored
        except LimitExceeded as error:
            raise LimitExceeded(
                f"the folder {folder} cannot be recorded: {error.detail}",
                field="workspace_path",
                hint="choose a smaller folder, or raise CARREL_CHECKPOINTS_MAX_MB",
            ) from None
        unchanged = generation == current and all(known.get(place) is each for place, each in found.known.items())
        if unchanged and len(known) == len(found.known):
            return found, rules, stored
        with suppress(OSError):  # without it only the next checkpoint takes longer
            write_file(cache, pack_known(found.known, current), temporary=self._store.temporary)
        return found, rules, stored

    @staticmethod
    def _load(cache: str) -> tuple[Known, str]:
        try:
            with open(cache, "rb") as file:
                return unpack_known(file.read())
        except FileNotFoundError:
            return {}, ""

    @contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        try:
            root = open_folder(folder)
        except OSError as error:
            raise Conflict(
                f"the folder {folder} cannot be opened: {error.strerror}",
                field="workspace_path",
                hint="it was moved, deleted or replaced by a link",
            ) from None
        try:
            yield root
        finally:
            os.close(root)

    # records

    def _directory(self, context_id: str) -> str:
        return os.path.join(self._records, encode(context_id, ephemeral=False))

    def _publish(self, made: Checkpoint) -> None:
        directory = self._directory(made.context_id)
        if not os.path.isdir(directory):
            os.makedirs(directory, 0o700, exist_ok=True)
            sync_directory(self._records)
        body = json.dumps(asdict(made)).encode()
        whole = body + b"\n" + digest(body).hex().encode() + b"\n"
        write_file(
            os.path.join(directory, made.id), whole, durable=True, replace=False, temporary=self._store.temporary
        )

    def all_of(self, context_id: str) -> list[Checkpoint]:
        """Return the checkpoints of a context, oldest first. Damaged records are left out."""
        found = []
        with suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._directory(context_id))):
                with suppress(NotFound, SnapshotDamaged):
                    found.append(self.get(context_id, name))
        return found

    def get(self, context_id: str, checkpoint_id: str) -> Checkpoint:
        """Return a checkpoint; `NotFound`, or `SnapshotDamaged` when its record is damaged."""
        path = os.path.join(self._directory(context_id), check_name(checkpoint_id, "checkpoint_id"))
        try:
            with open(path, "rb") as file:
                body, _, check = file.read(_LARGEST_RECORD).partition(b"\n")
        except FileNotFoundError:
            raise NotFound(
                f"context '{context_id}' has no checkpoint '{checkpoint_id[:64]}'",
                field="checkpoint_id",
                hint="list them first",
            ) from None
        if check.strip() != digest(body).hex().encode():
            raise SnapshotDamaged(f"the record of checkpoint {checkpoint_id} is damaged", object=checkpoint_id)
        value = json.loads(body)
        value["kind"] = CheckpointKind(value["kind"])
        for name in ("identity", "ignored", "left_out"):
            value[name] = tuple(value[name])
        return Checkpoint(**value)

    def end_of(self, start: Checkpoint) -> Checkpoint | None:
        """Return the checkpoint that ends the run that this one begins."""
        ends = [each for each in self.all_of(start.context_id) if each.begin == start.id]
        return ends[-1] if ends else None

    # comparing

    def changes(self, before: Checkpoint, after: Checkpoint | None) -> Differences:
        """Return the entries that differ between two checkpoints, or a checkpoint and the folder now, by path."""
        with self._store.shared(), Reader(self._store) as reader:
            tree = self._tree(before.folder, after)
            with failing("cannot compare the checkpoints"):
                return differences(bytes.fromhex(before.tree), tree, _loader(reader))

    def clear_set_ids(self, start: Checkpoint, end: Checkpoint) -> list[str]:
        """Take the set-user-ID and set-group-ID bits of files that were made or changed in a run; return their paths.

        No call in a sandbox sets such a bit, but the kernel leaves it when a file is changed through a mapping.
        """
        cleared = []
        with self._opened(start.folder) as root:
            for path in map(os.fsdecode, self.changes(start, end).set_ids):
                with suppress(OSError):  # gone by now, or a file of another user, which the agent could not change
                    handle = open_without_links(path, root, os.O_PATH | os.O_NOFOLLOW)
                    try:
                        mode = os.fstat(handle).st_mode
                        if stat.S_ISREG(mode) and mode & SET_IDS:
                            os.chmod(f"/proc/self/fd/{handle}", stat.S_IMODE(mode) & ~SET_IDS)
                            cleared.append(path)
                    finally:
                        os.close(handle)
        return cleared

    def _tree(self, folder: str, checkpoint: Checkpoint | None) -> bytes:
        if checkpoint is not None:
            return bytes.fromhex(checkpoint.tree)
        with self._locks.hold(folder), self._opened(folder) as root:
            return self._capture(folder, root)[0].tree

    def patch(self, before: Checkpoint, after: Checkpoint | None, paths: Sequence[bytes]) -> Patch:
        """Return the changes of text files, all or those at and below some paths, as a unified diff."""
        with self._store.shared(), Reader(self._store) as reader:
            tree, load = self._tree(before.folder, after), _loader(reader)
            with failing("cannot compare the checkpoints"):
                found = differences(bytes.fromhex(before.tree), tree, load)
                made = Patch(truncated=found.truncated)
                length = 0
                for each in found.items:
                    if all(node is None or node.kind is EntryKind.DIRECTORY for node in (each.before, each.after)):
                        continue
                    if paths and not any(each.path == one or each.path.startswith(one + b"/") for one in paths):
                        continue
                    text = _patch(each, reader)
                    if text is None:
                        made.omitted.append(each.path)
                    else:
                        made.texts.append(text)
                        length += len(text)
                    if length > MOST_PATCH_CHARACTERS or len(made.texts) + len(made.omitted) >= MOST_PATCHED:
                        made.truncated = True
                        break
                return made

    # undoing

    def undo(
        self, start: Checkpoint, end: Checkpoint | None, paths: Sequence[bytes] | None, *, dry_run: bool
    ) -> tuple[Undone, Checkpoint | None]:
        """Give the entries that changed between two checkpoints their state of the first one, in the folder.

        Entries that changed again after `end` are left and named. Without `end`, everything that changed until now is
        undone. Returns also the checkpoint that was taken before; an undo of it brings everything back.
        """
        folder = start.folder
        with self._locks.hold(folder), self._store.shared(), self._opened(folder) as root:
            info = os.fstat(root)
            if (info.st_dev, info.st_ino) != start.identity:
                raise Conflict(
                    f"{folder} is another directory than the one that was recorded",
                    field="checkpoint_id",
                    hint="move the recorded directory back to this path",
                )
            begin: Checkpoint | None = None
            if dry_run:
                now = self._capture(folder, root)[0]
            else:
                begin, now = self._take(start.context_id, folder, root, CheckpointKind.UNDO, None)
            last = now.tree if end is None else bytes.fromhex(end.tree)
            with Reader(self._store) as reader, failing(f"cannot undo changes in {folder}"):
                undo = Undo(self._store, reader, root, bytes.fromhex(start.tree), last, now)
                done = undo.run(paths, dry_run=dry_run)
            if begin is not None:
                self._take(start.context_id, folder, root, CheckpointKind.END, begin.id)
        return done, begin

    # retention

    def contexts(self) -> list[str]:
        """Return the contexts that have checkpoints, encoded."""
        return sorted(os.listdir(self._records))

    def forget(self, context_id: str) -> None:
        """Remove the checkpoints of a context. `collect_garbage` frees their space."""
        with suppress(FileNotFoundError):
            remove_tree(self._directory(context_id))

    def prune(self, context_id: str, keep_runs: int) -> int:
        """Remove the oldest checkpoints of each kind but those of so many; return how many were removed.

        Each kind is counted by itself, so that many checkpoints on request do not push out the start of a run.
        """
        found = self.all_of(context_id)
        kept: set[str] = set()
        for kind in CheckpointKind:
            kept.update([each.id for each in found if each.kind is kind][-keep_runs:])
        gone = [each for each in found if (each.begin or each.id) not in kept]
        self._remove(gone)
        return len(gone)

    def shrink(self, most_bytes: int) -> int:
        """Remove the oldest checkpoints of all contexts until the store is small enough. The newest run of an agent
        stays in each context.
        """
        removed = 0
        while self.size() > most_bytes:
            runs = [run for name in self.contexts() for run in self._old_runs(name)]
            if not runs:
                break
            runs.sort(key=lambda run: run[0].created_at)
            for run in runs[: max(1, len(runs) // 4)]:
                self._remove(run)
                removed += len(run)
            self.collect_garbage()
        return removed

    def _old_runs(self, encoded: str) -> list[list[Checkpoint]]:
        directory = os.path.join(self._records, encoded)
        found: dict[str, list[Checkpoint]] = {}
        with suppress(FileNotFoundError):
            names = sorted(os.listdir(directory))
            for name in names:
                with suppress(CarrelError):
                    each = self.get(decode(encoded), name)
                    found.setdefault(each.begin or each.id, []).append(each)
        starts = [key for key, run in found.items() if run[0].kind is CheckpointKind.START]
        return [run for key, run in found.items() if key not in starts[-1:]]

    def _remove(self, checkpoints: Sequence[Checkpoint]) -> None:
        for each in checkpoints:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self._directory(each.context_id), each.id))

    def size(self) -> int:
        """Return the bytes of all stored objects."""
        self._store.refresh()
        paths = [pack.path for pack in self._store.packs()] + [path for _, path in self._store.loose_files()]
        total = 0
        for path in paths:
            with suppress(FileNotFoundError):
                total += os.stat(path).st_size
        return total

    def collect_garbage(self) -> Collected:
        """Remove objects that no checkpoint needs. A damaged checkpoint keeps all objects: nobody knows its own."""
        trees: set[bytes] = set()
        parts: set[bytes] = set()
        damaged: list[str] = []
        with failing("cannot collect garbage of checkpoints"), self._store.exclusive():
            self._clean()
            with Reader(self._store) as reader:
                for name in self.contexts():
                    for record in sorted(os.listdir(os.path.join(self._records, name))):
                        try:
                            found = self.get(decode(name), record)
                            mark(bytes.fromhex(found.tree), _loader(reader), trees, parts)
                        except NotFound:
                            continue
                        except SnapshotDamaged:
                            damaged.append(record)
            if damaged:
                return Collected(0, 0, tuple(damaged))
            return replace(sweep(self._store, trees | parts), damaged=())


def _loader(reader: Reader) -> Callable[[bytes], Tree]:
    return lambda key: unpack_tree(reader.read(key))


def _patch(change: Difference, reader: Reader) -> str | None:
    """Return the unified diff of a text file; None if there are no lines to show."""
    old, new = change.before, change.after
    texts = []
    for node in (old, new):
        if node is not None and (node.kind is not EntryKind.FILE or node.size > MOST_PATCH_BYTES):
            return None
        content = b"" if node is None else _content(node, reader)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            return None
        if "\0" in text or text.count("\n") > _MOST_LINES:
            return None
        texts.append(text)
    name = change.path.decode(errors="backslashreplace")
    before = "/dev/null" if old is None else f"a/{name}"
    after = "/dev/null" if new is None else f"b/{name}"
    modes = ""
    if old is not None and new is not None and old.mode != new.mode:
        modes = f"old mode {old.mode:o}\nnew mode {new.mode:o}\n"
    return modes + unified(texts[0], texts[1], before, after)


def _content(node: Node, reader: Reader) -> bytes:
    whole = bytearray(node.size)
    for offset, length, key in node.extents:
        whole[offset : offset + length] = reader.read(key)
    return bytes(whole)
