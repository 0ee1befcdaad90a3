"""Reads a live tree into objects. Only files that changed since the last time are opened; others cost one `stat`.

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

from carrel.primitives import libc, walk
from carrel.workspaces.volumes.objects import CHUNK, Batch, ObjectStore, digest
from carrel.workspaces.volumes.trees import EntryKind, Extents, Node, Tree, pack_tree

WORKERS = min(8, (os.cpu_count() or 1) + 1)
FRESH_NS = 20_000_000
"""A file that changed so shortly before it was read may change again without a change of its times."""

_WRITTEN_BACK_NS = 60_000_000_000
_TRIES = 3
AT_ONCE = 48
"""The most chunks of files in work."""
_CHUNK_FILES = 48
_CHUNK_BYTES = 8 << 20
_NEVER = 0

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

    def node(self) -> Node:
        """Return the entry of a directory."""
        if self.target is not None:
            return Node(EntryKind.LINK, mtime_ns=self.mtime_ns, target=self.target)
        group = self.group or None
        return Node(EntryKind.FILE, self.mode, self.mtime_ns, self.size, self.extents, xattrs=self.xattrs, group=group)


PlainRow = tuple[int, int, int, int, int, Extents, dict[str, bytes] | None, bytes, bytes | None]
"""A row as read from the disk. Most never become a `CapturedFile`: a snapshot compares thousands of them."""


@dataclass(slots=True)
class Folder:
    """The known facts of one directory; `packed` is its form on the disk while nothing in it changes."""

    tree: bytes
    signature: tuple[int, int, int]
    xattrs: dict[str, bytes] | None
    rows: dict[str, PlainRow]
    folders: list[str]
    packed: bytes = b""


Known = dict[bytes, Folder]
"""The known facts of the directories of a tree, by place. A place is a hash of the path: paths could take more
memory than all else in a tree that an agent nests on purpose."""
ROOT = b""
_FORMAT = 2


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
    value = [(place, folder.packed or _pack_folder(folder)) for place, folder in known.items()]
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


def _pack_folder(folder: Folder) -> bytes:
    value = (folder.tree, folder.signature, folder.xattrs, list(folder.rows.items()), folder.folders)
    packed: bytes = msgpack.packb(value, unicode_errors="surrogateescape")
    return packed


def _unpack_folder(packed: bytes) -> Folder:
    tree, sign, xattrs, rows, folders = msgpack.unpackb(packed, use_list=False, unicode_errors="surrogateescape")
    return Folder(tree, sign, xattrs, dict(rows), list(folders), packed)


@dataclass(slots=True)
class Captured:
    """The result of a capture."""

    tree: bytes
    bytes: int = 0
    files: int = 0
    skipped: int = 0
    known: Known = field(default_factory=dict)


@dataclass(slots=True)
class _Seen:
    info: os.stat_result
    fd_xattrs: dict[str, bytes] | None
    rows: dict[str, PlainRow]
    folders: list[str]
    changed: bool


def capture(store: ObjectStore, batch: Batch, root: int, known: Known, *, trusted: bool) -> Captured:
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
            for visited in walk.visit(root):
                place = place_of(places[visited.parent], visited.name) if visited.number else ROOT
                places[visited.number] = place
                doubt = store if not trusted else None
                jobs += _look(visited, place, known, seen, linked, found, doubt, batch, pool, slots)
            for place, job in jobs:
                seen[place].rows.update(job.result())
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
) -> list[tuple[bytes, Future[list[tuple[str, CapturedFile]]]]]:
    fd = visited.fd
    before = known.get(place)
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
            else:
                size += row[2]
            continue
        kind = stat.S_IFMT(info.st_mode)
        if kind == stat.S_IFDIR:
            folders.append(name)
        elif kind == stat.S_IFREG:
            todo.append((name, info))
            if info.st_nlink > 1:
                linked.setdefault(info.st_ino, []).append((place, name))
            else:
                size += info.st_size
        elif kind == stat.S_IFLNK:
            with suppress(OSError):
                target = os.fsencode(os.readlink(name, dir_fd=fd))
                inode = info.st_ino if time.time_ns() - info.st_ctime_ns > FRESH_NS else _NEVER
                rows[name] = CapturedFile(
                    inode, info.st_ctime_ns, info.st_size, info.st_mtime_ns, 0, (), None, b"", target
                )
        else:
            found.skipped += 1
    folders.sort()
    changed = before is None or bool(todo) or rows != old or folders != before.folders
    sign = signature(visited.info)
    if before is not None and sign[0] and before.signature == sign:
        xattrs = before.xattrs
    else:
        changed = True
        xattrs = walk.user_xattrs(fd) or None
    seen[place] = _Seen(visited.info, xattrs, rows, folders, changed)
    found.files += len(rows) + len(todo)
    found.bytes += size
    submitted = submit_chunks(todo, lambda info: info.st_size, fd, partial(_read_files, batch), pool, slots)
    return [(place, job) for job in submitted]


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


def _read_files(batch: Batch, parent: int, files: list[tuple[str, os.stat_result]]) -> list[tuple[str, CapturedFile]]:
    opened: list[tuple[str, int]] = []
    rows = []
    try:
        for name, _ in files:
            fd = _open(parent, name)
            if fd is not None:
                opened.append((name, fd))
                if libc.dirty(fd) is not False:
                    libc.start_writing(fd)
        for name, fd in opened:
            row = _read_file(fd, batch)
            if row is not None:
                rows.append((name, row))
    finally:
        for _, fd in opened:
            os.close(fd)
    return rows


def _open(parent: int, name: str) -> int | None:
    try:
        return walk.open_for_reading(name, parent)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:  # replaced by a link or a socket since it was seen
            return None
        raise


def _read_file(fd: int, batch: Batch) -> CapturedFile | None:
    for left in reversed(range(_TRIES)):
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            return None
        now = time.time_ns()
        _show_later_writes(fd, before, now)
        xattrs = walk.user_xattrs(fd) or None
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
    for start, length in pieces:
        at, end = start, start + length
        while at < end:
            data = os.pread(fd, min(CHUNK, end - at), at)
            if not data:
                return extents, at  # the file became shorter: keep what was read
            extents.append((at, len(data), batch.put(data)))
            at += len(data)
    return extents, size


def _group_links(seen: dict[bytes, _Seen], linked: dict[int, list[tuple[bytes, str]]], found: Captured) -> None:
    """Give all names of one file the same group, named after the first of them, so that equal trees stay equal."""
    for members in linked.values():
        there = sorted((place, name) for place, name in members if name in seen[place].rows)
        if not there:
            continue
        first = CapturedFile._make(seen[there[0][0]].rows[there[0][1]])
        found.bytes += first.size
        group = place_of(*there[0])[:16] if len(there) > 1 else b""
        for place, name in there:
            folder = seen[place]
            row = folder.rows[name]
            wanted = first._replace(group=group)
            if row != wanted:
                folder.rows[name] = wanted
                folder.changed = True


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
        tree = Tree(stat.S_IMODE(here.info.st_mode), here.info.st_mtime_ns, here.fd_xattrs)
        for name, row in here.rows.items():
            tree.entries[os.fsencode(name)] = CapturedFile._make(row).node()
        for name in names:
            tree.entries[os.fsencode(name)] = Node(EntryKind.DIRECTORY, tree=found.known[below[name]].tree)
        key = batch.put_packed(pack_tree(tree))
        found.known[place] = Folder(key, signature(here.info), here.fd_xattrs, here.rows, here.folders)
    found.tree = found.known[ROOT].tree
