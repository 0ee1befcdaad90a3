"""Writes a stored tree into an empty directory that nothing else uses. Every object is verified when it is read."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore

from carrel.errors import SnapshotDamaged
from carrel.primitives import libc, walk
from carrel.primitives.atomic import write_all
from carrel.workspaces.volumes.capture import (
    AT_ONCE,
    FRESH_NS,
    ROOT,
    WORKERS,
    CapturedFile,
    Folder,
    Known,
    PlainRow,
    place_of,
    signature,
    submit_chunks,
)
from carrel.workspaces.volumes.objects import PACKED_MAX, ObjectStore, Reader, digest
from carrel.workspaces.volumes.trees import EntryKind, Node, unpack_tree

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_Job = Future[list[tuple[str, CapturedFile]]]


def rebuild(store: ObjectStore, reader: Reader, tree: bytes, root: int, owner: int | None) -> Known:
    """Write the tree, and return the facts that spare the next capture reading the files."""
    return _Rebuild(store, reader, root, owner).run(tree)


class _Rebuild:
    def __init__(self, store: ObjectStore, reader: Reader, root: int, owner: int | None):
        self._store = store
        self._reader = reader
        self._owner = owner
        self._slots = BoundedSemaphore(AT_ONCE)
        self._directories = walk.Directories(root)
        self._places: list[bytes] = [ROOT]
        self._attributes: list[tuple[int, int, dict[str, bytes] | None]] = []
        self._firsts: dict[bytes, tuple[int, str]] = {}
        self._links: list[tuple[int, str, bytes]] = []
        self._known: Known = {}

    def run(self, tree: bytes) -> Known:
        directories = self._directories
        jobs: list[tuple[bytes, _Job]] = []
        try:
            with ThreadPoolExecutor(WORKERS, thread_name_prefix="carrel-restore") as pool:
                try:
                    pending = [(0, "", tree)]
                    while pending:
                        parent, name, key = pending.pop()
                        pending += self._make(parent, name, key, pool, jobs)
                        if jobs and (broken := jobs[-1][1]).done():
                            broken.result()
                    for place, job in jobs:
                        self._known[place].rows.update(job.result())
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            for number, name, group in self._links:
                directories.link(*self._firsts[group], number, name)
            for number in reversed(range(len(self._places))):
                self._finish(number, directories.get(number))
        finally:
            directories.close()
        self._forget_fresh()
        return self._known

    def _make(
        self, parent: int, name: str, key: bytes, pool: ThreadPoolExecutor, jobs: list[tuple[bytes, _Job]]
    ) -> list[tuple[int, str, bytes]]:
        number, place = 0, ROOT
        if name:
            number, place = self._directories.add(parent, name), place_of(self._places[parent], name)
            self._places.append(place)
        fd = self._directories.get(number)
        tree = unpack_tree(self._reader.read(key))
        self._attributes.append((tree.mode, tree.mtime_ns, tree.xattrs))
        below: list[tuple[int, str, bytes]] = []
        rows: dict[str, PlainRow] = {}
        todo: list[tuple[str, Node]] = []
        for raw, node in tree.entries.items():
            name = os.fsdecode(raw)
            if node.kind is EntryKind.DIRECTORY:
                os.mkdir(name, 0o700, dir_fd=fd)
                below.append((number, name, node.tree))
            elif node.kind is EntryKind.LINK:
                os.symlink(node.target, raw, dir_fd=fd)
                os.utime(name, ns=(node.mtime_ns, node.mtime_ns), dir_fd=fd, follow_symlinks=False)
                if self._owner is not None:
                    os.chown(name, self._owner, self._owner, dir_fd=fd, follow_symlinks=False)
                info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                rows[name] = CapturedFile(
                    info.st_ino, info.st_ctime_ns, info.st_size, node.mtime_ns, 0, (), None, b"", node.target
                )
            elif node.group is not None and node.group in self._firsts:
                self._links.append((number, name, node.group))
            else:
                if node.group is not None:
                    self._firsts[node.group] = number, name
                todo.append((name, node))
        self._known[place] = Folder(
            key, (0, 0, 0), tree.xattrs, rows, sorted(os.fsdecode(n) for n, e in tree.entries.items() if e.tree)
        )
        submitted = submit_chunks(todo, lambda node: node.size, fd, self._write_files, pool, self._slots)
        jobs += [(place, job) for job in submitted]
        return below

    def _write_files(self, parent: int, files: list[tuple[str, Node]]) -> list[tuple[str, CapturedFile]]:
        return [(name, self._write_file(parent, name, node)) for name, node in files]

    def _write_file(self, parent: int, name: str, node: Node) -> CapturedFile:
        fd = os.open(name, _NEW, 0o600, dir_fd=parent)
        try:
            fill_file(self._store, self._reader, fd, node)
            walk.set_attributes(fd, node.mode, node.mtime_ns, node.xattrs, self._owner)
            info = os.fstat(fd)
        finally:
            os.close(fd)
        if info.st_size != node.size:
            raise SnapshotDamaged(f"the size of {name!r} is not the one in the snapshot")
        inode = info.st_ino if node.group is None else 0  # linking a file changes its times once more
        times = info.st_ctime_ns, node.size, info.st_mtime_ns
        return CapturedFile(inode, *times, node.mode, node.extents, node.xattrs, node.group or b"", None)

    def _finish(self, number: int, fd: int) -> None:
        walk.set_attributes(fd, *self._attributes[number], self._owner)
        self._known[self._places[number]].signature = signature(os.fstat(fd))

    def _forget_fresh(self) -> None:
        """Mark files written just now as unknown: they may change again without a change of their times."""
        limit = time.time_ns() - FRESH_NS
        for folder in self._known.values():
            for name, row in folder.rows.items():
                if row[1] > limit:
                    folder.rows[name] = (0, *row[1:])


def fill_file(store: ObjectStore, reader: Reader, fd: int, node: Node) -> None:
    """Write the content of a stored file into an empty one; shares blocks where the file system can."""
    for offset, length, key in node.extents:
        if length > PACKED_MAX and _cloned(store, fd, key, offset):
            continue
        os.lseek(fd, offset, os.SEEK_SET)
        write_all(fd, reader.read(key))
    if node.extents and node.extents[-1][0] + node.extents[-1][1] == node.size:
        return
    os.ftruncate(fd, node.size)


def _cloned(store: ObjectStore, fd: int, key: bytes, offset: int) -> bool:
    try:
        source = os.open(store.raw_path(key), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not libc.clone_range(source, 0, 0, fd, offset):  # a length of 0 means all of it
            return False
        # Reading a damaged object the ordinary way reports it.
        return digest(os.pread(source, os.fstat(source).st_size, 0)) == key
    finally:
        os.close(source)
