"""Writes a stored tree into an empty directory that nobody else uses. Every object is verified on the way.

Knows objects and trees, not volumes.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import BoundedSemaphore

from carrel.errors import SnapshotDamaged
from carrel.primitives import libc
from carrel.workspaces.volumes import kernel
from carrel.workspaces.volumes.capture import FRESH_NS, ROOT, WORKERS, Folder, Known, PlainRow, Row, place_of, signature
from carrel.workspaces.volumes.objects import ObjectStore, Reader, digest, write_whole
from carrel.workspaces.volumes.trees import Kind, Node, unpack_tree

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AT_ONCE = 48
_CHUNK_FILES = 48
_CHUNK_BYTES = 8 << 20

_Job = Future[list[tuple[str, Row]]]


def rebuild(store: ObjectStore, reader: Reader, tree: bytes, root: int, owner: int | None) -> Known:
    """Write the tree; what is then known of it spares the next capture the reading."""
    return _Rebuild(store, reader, root, owner).run(tree)


class _Rebuild:
    def __init__(self, store: ObjectStore, reader: Reader, root: int, owner: int | None):
        self._store = store
        self._reader = reader
        self._owner = owner
        self._slots = BoundedSemaphore(_AT_ONCE)
        self._directories = kernel.Directories(root)
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
                first, first_name = self._firsts[group]
                source = os.dup(directories.get(first))
                try:
                    os.link(
                        first_name,
                        name,
                        src_dir_fd=source,
                        dst_dir_fd=directories.get(number),
                        follow_symlinks=False,
                    )
                finally:
                    os.close(source)
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
            if node.kind is Kind.DIRECTORY:
                os.mkdir(name, 0o700, dir_fd=fd)
                below.append((number, name, node.tree))
            elif node.kind is Kind.LINK:
                os.symlink(node.target, raw, dir_fd=fd)
                os.utime(name, ns=(node.mtime_ns, node.mtime_ns), dir_fd=fd, follow_symlinks=False)
                if self._owner is not None:
                    os.chown(name, self._owner, self._owner, dir_fd=fd, follow_symlinks=False)
                info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                rows[name] = Row(
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
        jobs += [(place, job) for job in self._submit(todo, fd, pool)]
        return below

    def _submit(self, todo: list[tuple[str, Node]], fd: int, pool: ThreadPoolExecutor) -> list[_Job]:
        jobs = []
        while todo:
            files: list[tuple[str, Node]] = []
            total = 0
            while todo and len(files) < _CHUNK_FILES and total < _CHUNK_BYTES:
                files.append(todo.pop())
                total += files[-1][1].size
            self._slots.acquire()
            mine = os.dup(fd)
            job = pool.submit(self._write_files, mine, files)

            def done(_: object, mine: int = mine) -> None:
                os.close(mine)
                self._slots.release()

            job.add_done_callback(done)
            jobs.append(job)
        return jobs

    def _write_files(self, parent: int, files: list[tuple[str, Node]]) -> list[tuple[str, Row]]:
        return [(name, self._write_file(parent, name, node)) for name, node in files]

    def _write_file(self, parent: int, name: str, node: Node) -> Row:
        fd = os.open(name, _NEW, 0o600, dir_fd=parent)
        try:
            self._fill(fd, node)
            if self._owner is not None:
                os.fchown(fd, self._owner, self._owner)
            for key, value in (node.xattrs or {}).items():
                with suppress(OSError):
                    os.setxattr(fd, key, value)
            if node.mode != 0o600:
                os.fchmod(fd, node.mode)
            os.utime(fd, ns=(node.mtime_ns, node.mtime_ns))
            info = os.fstat(fd)
        finally:
            os.close(fd)
        if info.st_size != node.size:
            raise SnapshotDamaged(f"{name!r} has another size than the snapshot says")
        inode = info.st_ino if node.group is None else 0  # linking a file changes its times once more
        return Row(
            inode,
            info.st_ctime_ns,
            node.size,
            info.st_mtime_ns,
            node.mode,
            node.extents,
            node.xattrs,
            node.group or b"",
            None,
        )

    def _fill(self, fd: int, node: Node) -> None:
        if len(node.extents) == 1 and node.extents[0][1] == node.size:
            key = node.extents[0][2]
            if node.size > (1 << 20) and self._cloned(fd, key):
                return
            write_whole(fd, self._reader.read(key))
            return
        for offset, _, key in node.extents:
            os.lseek(fd, offset, os.SEEK_SET)
            write_whole(fd, self._reader.read(key))
        if node.extents and node.extents[-1][0] + node.extents[-1][1] == node.size:
            return
        os.ftruncate(fd, node.size)

    def _cloned(self, fd: int, key: bytes) -> bool:
        try:
            source = os.open(self._store.raw_path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if not libc.clone(source, fd):
                return False
            if digest(os.pread(source, os.fstat(source).st_size, 0)) != key:
                os.ftruncate(fd, 0)
                return False  # the ordinary way names what is wrong
            return True
        finally:
            os.close(source)

    def _finish(self, number: int, fd: int) -> None:
        mode, mtime_ns, xattrs = self._attributes[number]
        if self._owner is not None:
            os.fchown(fd, self._owner, self._owner)
        for key, value in (xattrs or {}).items():
            with suppress(OSError):
                os.setxattr(fd, key, value)
        os.fchmod(fd, mode)
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        self._known[self._places[number]].signature = signature(os.fstat(fd))

    def _forget_fresh(self) -> None:
        """What was written in the last moment may change again without its times showing it."""
        limit = time.time_ns() - FRESH_NS
        for folder in self._known.values():
            for name, row in folder.rows.items():
                if row[1] > limit:
                    folder.rows[name] = (0, *row[1:])
