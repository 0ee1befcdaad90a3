"""Reads a live tree into objects. Only files that changed since the last time are opened; others cost one `stat`.
A directory whose files are all unchanged costs one more comparison of two hashes.

Hostile code may change the tree meanwhile: no link is followed, and a file that changes while it is read is read again,
a bounded number of times.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import BoundedSemaphore
from typing import NamedTuple, TypeVar

import msgpack

from carrel.errors import LimitExceeded
from carrel.primitives import libc, walk
from carrel.workspaces.volumes.objects import CHUNK, PACKED_MAX, Batch, ObjectStore, digest
from carrel.workspaces.volumes.trees import Extents, pack_entries

WORKERS = min(8, (os.cpu_count() or 1) + 1)
FRESH_NS = 20_000_000
"""A file that changed so shortly before it was read may change again without a change of its times."""

_WRITTEN_BACK_NS = 60_000_000_000
_SURELY_WRITTEN_BACK_NS = 10 * _WRITTEN_BACK_NS
_TRIES = 3
AT_ONCE = 48
"""The most chunks of files in work."""
_CHUNK_FILES = 48
_CHUNK_BYTES = 8 << 20
_NEVER = 0
_KINDS = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFBLK: "device", stat.S_IFCHR: "device"}

T = TypeVar("T")
R = TypeVar("R")


class CapturedFile(NamedTuple):
    """The known facts of one file or link. They hold while the first four fields match those of the file."""

    inode: int
    ctime_ns: int
    size: int
    mtime_ns: int
    mode: int
    extents: Extents
    xattrs: dict[str, bytes] | None
    group: bytes
    target: bytes | None


PlainRow = tuple[int, int, int, int, int, Extents, dict[str, bytes] | None, bytes, bytes | None]
"""A row as read from the disk. Most never become a `CapturedFile`: a snapshot compares thousands of them."""


def pack_row(row: PlainRow) -> tuple[object, ...]:
    """Return the entry of a directory, as `pack_entries` takes it."""
    _, _, size, mtime_ns, mode, extents, xattrs, group, target = row
    if target is not None:
        return 2, mtime_ns, target
    return 0, mode, mtime_ns, size, extents, sorted(xattrs.items()) if xattrs else [], group


class Folder:
    """The known facts of one directory. Its rows are decoded only when somebody looks at them.

    `listing` is the hash of the facts of all its entries when they were read; empty if an equal listing does not prove
    that nothing changed. `packed` is the form on the disk while nothing in it changes.
    """

    __slots__ = (
        "_packed_rows",
        "_rows",
        "files",
        "folders",
        "listing",
        "packed",
        "signature",
        "size",
        "tree",
        "xattrs",
    )

    def __init__(
        self,
        tree: bytes,
        signature: tuple[int, int, int],
        xattrs: dict[str, bytes] | None,
        rows: dict[str, PlainRow] | bytes,
        folders: list[str],
        listing: bytes = b"",
        files: int = 0,
        size: int = 0,
        packed: bytes = b"",
    ):
        self.tree = tree
        self.signature = signature
        self.xattrs = xattrs
        self.folders = folders
        self.listing = listing
        self.files = files
        self.size = size
        self.packed = packed
        self._rows = None if isinstance(rows, bytes) else rows
        self._packed_rows = rows if isinstance(rows, bytes) else b""

    @property
    def rows(self) -> dict[str, PlainRow]:
        """The known facts of its files and links, by name."""
        if self._rows is None:
            self._rows = dict(msgpack.unpackb(self._packed_rows, use_list=False, unicode_errors="surrogateescape"))
        return self._rows

    def pack(self) -> bytes:
        """Encode for the disk."""
        if not self.packed:
            rows: bytes = msgpack.packb(list(self.rows.items()), unicode_errors="surrogateescape")
            value = (self.tree, self.signature, self.xattrs, rows, self.folders, self.listing, self.files, self.size)
            self.packed = msgpack.packb(value, unicode_errors="surrogateescape")
        return self.packed


Known = dict[bytes, Folder]
"""The known facts of the directories of a tree, by place. A place is a hash of the path: paths could take more
memory than all else in a tree that an agent nests on purpose."""
ROOT = b""
_FORMAT = 3


def place_of(parent: bytes, name: str) -> bytes:
    """Return the place of a directory, from the place of its parent and its name."""
    return digest(parent + b"/" + os.fsencode(name))


def signature(info: os.stat_result) -> tuple[int, int, int]:
    """Return numbers that change with a directory's attributes or names; zeros when it changed just now."""
    if time.time_ns() - info.st_ctime_ns < FRESH_NS:
        return 0, 0, 0
    return info.st_ino, info.st_ctime_ns, info.st_mtime_ns


def pack_known(known: Known, generation: str) -> bytes:
    """Encode for the disk, with a check sum that reveals a torn file."""
    value = [(place, folder.pack()) for place, folder in known.items()]
    body: bytes = msgpack.packb((_FORMAT, generation, value), unicode_errors="surrogateescape")
    return digest(body) + body


def unpack_known(raw: bytes) -> tuple[Known, str]:
    """Decode; returns nothing when the data is damaged or has another format."""
    body = memoryview(raw)[32:]
    if len(raw) < 32 or digest(body) != raw[:32]:
        return {}, ""
    written = msgpack.unpackb(body, use_list=False, unicode_errors="surrogateescape")
    if written[0] != _FORMAT:
        return {}, ""
    _, generation, value = written
    return {place: _unpack_folder(packed) for place, packed in value}, generation


def _unpack_folder(packed: bytes) -> Folder:
    values = msgpack.unpackb(packed, use_list=False, unicode_errors="surrogateescape")
    tree, sign, xattrs, rows, folders, listing, files, size = values
    return Folder(tree, sign, xattrs, rows, list(folders), listing, files, size, packed)


class Rules:
    """The differences between a capture of a workspace, which has every file, and one of a person's folder."""

    owner: tuple[int, int] | None = None
    """The user and group that most files belong to; others are recorded. None: owners are not recorded."""
    most_bytes: int | None = None
    """The most bytes that may be read."""
    may_ignore: frozenset[str] = frozenset()
    """The names of directories for which `ignores` is asked."""

    def ignores(self, visited: walk.Visited, name: str) -> bool:
        """Return whether a directory is left out, with everything in it."""
        return False

    def skipped(self, visited: walk.Visited | None, name: str, why: str) -> None:
        """Take notice of an entry that cannot be stored. Called from several threads."""

    def open_directory(self, name: str, parent: int) -> int:
        """Open a directory to read it."""
        return walk.open_for_reading(name, parent, walk.DIRECTORY)

    def open_file(self, name: str, parent: int) -> int:
        """Open a file to read it."""
        return walk.open_for_reading(name, parent)


OWNER = "carrel.owner"
"""The extended attribute, of no file system, that stands for an owner who is not `Rules.owner`."""
_EVERYTHING = Rules()


@dataclass(slots=True)
class Captured:
    """The result of a capture."""

    tree: bytes
    bytes: int = 0
    files: int = 0
    skipped: int = 0
    read: int = 0
    known: Known = field(default_factory=dict)


@dataclass(slots=True)
class _Seen:
    info: os.stat_result
    fd_xattrs: dict[str, bytes] | None
    rows: dict[str, PlainRow] | None  # None: those that are known
    folders: list[str]
    changed: bool
    listing: bytes
    expected: int = 0


def capture(
    store: ObjectStore, batch: Batch, root: int, known: Known, *, trusted: bool, rules: Rules = _EVERYTHING
) -> Captured:
    """Read the tree of an open directory. `known` are the facts from its last capture.

    Without `trusted`, objects may have been removed since, so each is looked up.
    """
    seen: dict[bytes, _Seen] = {}
    places: dict[int, bytes] = {}
    linked: dict[int, list[tuple[bytes, str]]] = {}
    jobs: list[tuple[bytes, Future[list[tuple[str, CapturedFile]]]]] = []
    found = Captured(b"")
    slots = BoundedSemaphore(AT_ONCE)
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="carrel-capture") as pool:
        try:
            for visited in walk.visit(root, rules.open_directory):
                place = place_of(places[visited.parent], visited.name) if visited.number else ROOT
                places[visited.number] = place
                doubt = store if not trusted else None
                jobs += _look(visited, place, known, seen, linked, found, doubt, batch, pool, slots, rules)
            for place, job in jobs:
                rows = seen[place].rows
                assert rows is not None  # only directories with changes have jobs
                rows.update(job.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    _group_links(seen, linked, found)
    _build(store, batch, seen, known, found, trusted=trusted)
    return found


def _look(
    visited: walk.Visited,
    place: bytes,
    known: Mapping[bytes, Folder],
    seen: dict[bytes, _Seen],
    linked: dict[int, list[tuple[bytes, str]]],
    found: Captured,
    doubt: ObjectStore | None,
    batch: Batch,
    pool: ThreadPoolExecutor,
    slots: BoundedSemaphore,
    rules: Rules,
) -> list[tuple[bytes, Future[list[tuple[str, CapturedFile]]]]]:
    fd = visited.fd
    before = known.get(place)
    listing = _listing(visited)
    if before is not None and doubt is None and listing == before.listing:
        unchanged, xattrs = _attributes(visited, before, rules)
        seen[place] = _Seen(visited.info, xattrs, None, before.folders, not unchanged, listing)
        found.files += before.files
        found.bytes += before.size
        return []
    old = before.rows if before is not None else {}
    rows: dict[str, PlainRow] = {}
    folders: list[str] = []
    todo: list[tuple[str, os.stat_result]] = []
    size = 0
    # This loop runs for every name of an unchanged workspace, so it is flat on purpose.
    for name, info in visited.entries:
        row = old.get(name)
        if (
            row is not None
            and row[1] == info.st_ctime_ns
            and row[0] == info.st_ino
            and row[2] == info.st_size
            and row[3] == info.st_mtime_ns
            and (doubt is None or all(doubt.has(key, length) for _, length, key in row[5]))
        ):
            rows[name] = row
            if row[8] is not None:  # a link has no content of its own
                continue
            if info.st_nlink > 1:
                linked.setdefault(info.st_ino, []).append((place, name))
                listing = b""
            else:
                size += row[2]
            continue
        kind = stat.S_IFMT(info.st_mode)
        if kind == stat.S_IFDIR:
            # A directory that was recorded once stays recorded: a program cannot hide it by making a rule match.
            if (
                name in rules.may_ignore
                and (before is None or name not in before.folders)
                and rules.ignores(visited, name)
            ):
                visited.leave_out(name)
                listing = b""
                continue
            folders.append(name)
        elif kind == stat.S_IFREG:
            todo.append((name, info))
            found.read += min(info.st_size, info.st_blocks * 512)
            if info.st_nlink > 1:
                linked.setdefault(info.st_ino, []).append((place, name))
                listing = b""
            else:
                size += info.st_size
        elif kind == stat.S_IFLNK:
            with suppress(OSError):
                target = os.fsencode(os.readlink(name, dir_fd=fd))
                inode = info.st_ino if time.time_ns() - info.st_ctime_ns > FRESH_NS else _NEVER
                if inode == _NEVER:
                    listing = b""
                rows[name] = CapturedFile(
                    inode, info.st_ctime_ns, info.st_size, info.st_mtime_ns, 0, (), None, b"", target
                )
        else:
            found.skipped += 1
            listing = b""
            rules.skipped(visited, name, _KINDS.get(kind, "special file"))
    if rules.most_bytes is not None and found.read > rules.most_bytes:
        raise LimitExceeded(f"more than {rules.most_bytes} bytes are to be recorded", field="files")
    folders.sort()
    unchanged, xattrs = _attributes(visited, before, rules)
    changed = not unchanged or before is None or bool(todo) or rows != old or folders != before.folders
    seen[place] = _Seen(visited.info, xattrs, rows, folders, changed, listing, len(rows) + len(todo))
    found.files += len(rows) + len(todo)
    found.bytes += size
    submitted = submit_chunks(todo, lambda info: info.st_size, fd, partial(_read_files, batch, rules), pool, slots)
    return [(place, job) for job in submitted]


def _listing(visited: walk.Visited) -> bytes:
    """Return a hash of the names, and of the facts of files and links, in the order of the directory."""
    facts = [
        name
        if info.st_mode & 0o170000 == 0o040000
        else (name, info.st_ino, info.st_ctime_ns, info.st_size, info.st_mtime_ns)
        for name, info in visited.entries
    ]
    return digest(msgpack.packb(facts, unicode_errors="surrogateescape"))


def _attributes(visited: walk.Visited, before: Folder | None, rules: Rules) -> tuple[bool, dict[str, bytes] | None]:
    """Return whether a directory's own attributes and its names are unchanged, and its extended attributes."""
    sign = signature(visited.info)
    if before is not None and sign[0] and before.signature == sign:
        return True, before.xattrs
    return False, _xattrs(visited.fd, visited.info, rules.owner)


def _xattrs(fd: int, info: os.stat_result, owner: tuple[int, int] | None) -> dict[str, bytes] | None:
    found = walk.user_xattrs(fd)
    if owner is not None and (info.st_uid, info.st_gid) != owner:
        found[OWNER] = b"%d:%d" % (info.st_uid, info.st_gid)
    return found or None


def submit_chunks(
    todo: list[tuple[str, T]],
    size_of: Callable[[T], int],
    fd: int,
    work: Callable[[int, list[tuple[str, T]]], R],
    pool: ThreadPoolExecutor,
    slots: BoundedSemaphore,
) -> list[Future[R]]:
    """Let threads work on the files of an open directory, in chunks of limited number and size."""
    jobs = []
    while todo:
        files: list[tuple[str, T]] = []
        total = 0
        while todo and len(files) < _CHUNK_FILES and total < _CHUNK_BYTES:
            files.append(todo.pop())
            total += size_of(files[-1][1])
        slots.acquire()
        mine = os.dup(fd)
        job = pool.submit(work, mine, files)

        def done(_: object, mine: int = mine) -> None:
            os.close(mine)
            slots.release()

        job.add_done_callback(done)
        jobs.append(job)
    return jobs


def _read_files(
    batch: Batch, rules: Rules, parent: int, files: list[tuple[str, os.stat_result]]
) -> list[tuple[str, CapturedFile]]:
    opened: list[tuple[str, os.stat_result, int]] = []
    rows: list[tuple[str, CapturedFile]] = []
    small: list[tuple[str, os.stat_result, dict[str, bytes] | None, bytes]] = []
    try:
        for name, seen in files:
            fd = _open(parent, name, rules)
            if fd is None:
                continue
            age_ns = time.time_ns() - seen.st_ctime_ns
            is_clean = age_ns > _SURELY_WRITTEN_BACK_NS or libc.dirty(fd) is False
            if is_clean and age_ns > FRESH_NS and seen.st_size <= PACKED_MAX:
                try:
                    whole = _read_clean(fd, seen, rules)
                finally:
                    os.close(fd)
                if whole is not None:
                    small.append((name, seen, *whole))
                    continue
                fd = _open(parent, name, rules)
                if fd is None:
                    continue
            opened.append((name, seen, fd))
            if not is_clean:
                libc.start_writing(fd)
        for name, _, fd in opened:
            row = _read_file(fd, batch, rules)
            if row is not None:
                rows.append((name, row))
    finally:
        for _, _, fd in opened:
            os.close(fd)
    for (name, seen, xattrs, data), key in zip(small, batch.put_all([each[3] for each in small]), strict=True):
        facts = seen.st_ino, seen.st_ctime_ns, seen.st_size, seen.st_mtime_ns, stat.S_IMODE(seen.st_mode)
        rows.append((name, CapturedFile(*facts, ((0, len(data), key),) if data else (), xattrs, b"", None)))
    return rows


def _read_clean(fd: int, seen: os.stat_result, rules: Rules) -> tuple[dict[str, bytes] | None, bytes] | None:
    """Read a small file that is on the disk as it is, with few calls; None if it changed since then or has holes."""
    if seen.st_blocks * 512 < seen.st_size:
        return None
    data = os.pread(fd, seen.st_size + 1, 0)
    xattrs = _xattrs(fd, seen, rules.owner)
    after = os.fstat(fd)
    if _times(after) != _times(seen) or after.st_ino != seen.st_ino or len(data) != seen.st_size:
        return None
    return xattrs, data


def _open(parent: int, name: str, rules: Rules) -> int | None:
    try:
        return rules.open_file(name, parent)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:  # replaced by a link or a socket since it was seen
            return None
        raise


def _read_file(fd: int, batch: Batch, rules: Rules) -> CapturedFile | None:
    for left in reversed(range(_TRIES)):
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            return None
        now = time.time_ns()
        _show_later_writes(fd, before, now)
        xattrs = _xattrs(fd, before, rules.owner)
        written = os.fstat(fd)  # while a file is being written, its blocks are not all counted
        extents, size = _read_extents(fd, written, batch)
        after = os.fstat(fd)
        unchanged = _times(before) == _times(after)
        if unchanged or not left:
            inode = before.st_ino if unchanged and now - before.st_ctime_ns > FRESH_NS else _NEVER
            mode = stat.S_IMODE(after.st_mode)
            return CapturedFile(
                inode, after.st_ctime_ns, size, after.st_mtime_ns, mode, tuple(extents), xattrs, b"", None
            )
    return None


def _times(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _show_later_writes(fd: int, info: os.stat_result, now: int) -> None:
    """Make sure that a later write through a memory map changes the file's times.

    The kernel updates the times when a page becomes dirty, and not again while it stays dirty. So dirty pages are
    written to the disk now, between the two looks at the times. Where the kernel cannot say which pages are dirty,
    only a file that was not changed for long is known to be clean.
    """
    found = libc.dirty(fd)
    if found or (found is None and now - info.st_mtime_ns < _WRITTEN_BACK_NS):
        libc.finish_writing(fd)


def _read_extents(fd: int, info: os.stat_result, batch: Batch) -> tuple[list[tuple[int, int, bytes]], int]:
    size = info.st_size
    if size == 0:
        return [], 0
    sparse = info.st_blocks * 512 < size
    pieces = walk.data_extents(fd, size) if sparse else [(0, size)]
    extents: list[tuple[int, int, bytes]] = []
    for start, whole in pieces:
        at, end = start, start + whole
        while at < end:
            length = min(CHUNK, end - at)
            if length > PACKED_MAX and (key := batch.put_clone(fd, at, length)) is not None:
                extents.append((at, length, key))
                at += length
                continue
            data = os.pread(fd, length, at)
            if not data:
                return extents, at  # the file became shorter: keep what was read
            extents.append((at, len(data), batch.put(data)))
            at += len(data)
    return extents, size


def _group_links(seen: dict[bytes, _Seen], linked: dict[int, list[tuple[bytes, str]]], found: Captured) -> None:
    """Give all names of one file the same group, named after the first of them, so that equal trees stay equal."""
    for members in linked.values():
        there = sorted((place, name) for place, name in members if name in (seen[place].rows or {}))
        if not there:
            continue
        first = CapturedFile._make((seen[there[0][0]].rows or {})[there[0][1]])
        found.bytes += first.size
        group = place_of(*there[0])[:16] if len(there) > 1 else b""
        for place, name in there:
            rows = seen[place].rows
            assert rows is not None  # a directory with hard links is always looked at
            wanted = first._replace(group=group)
            if rows[name] != wanted:
                rows[name] = wanted
                seen[place].changed = True


def _build(
    store: ObjectStore, batch: Batch, seen: dict[bytes, _Seen], known: Known, found: Captured, *, trusted: bool
) -> None:
    """Write directories from the leaves up, but only those that changed or have a change below them."""
    for place in reversed(list(seen)):
        here = seen[place]
        before = known.get(place)
        below = {name: place_of(place, name) for name in here.folders}
        names = [name for name in here.folders if below[name] in found.known]
        if (
            before is not None
            and not here.changed
            and names == here.folders
            and all((old := known.get(below[name])) and old.tree == found.known[below[name]].tree for name in names)
            and (trusted or store.has(before.tree, 0))
        ):
            found.known[place] = before
            continue
        rows = here.rows
        if rows is None:
            assert before is not None  # its listing was compared
            rows = before.rows
        parts = {os.fsencode(name): pack_row(row) for name, row in rows.items()}
        for name in names:
            parts[os.fsencode(name)] = (1, found.known[below[name]].tree)
        key = batch.put_packed(
            pack_entries(stat.S_IMODE(here.info.st_mode), here.info.st_mtime_ns, here.fd_xattrs, parts)
        )
        doubtful = any(row[0] == _NEVER for row in rows.values()) or (
            here.rows is not None and len(rows) < here.expected
        )
        size = sum(row[2] for row in rows.values() if row[8] is None)
        listing = b"" if doubtful else here.listing
        sign = signature(here.info)
        found.known[place] = Folder(key, sign, here.fd_xattrs, rows, here.folders, listing, len(rows), size)
    found.tree = found.known[ROOT].tree
