"""Copies a tree into an empty directory, file by file, with all that a volume preserves.

The source may be hostile: nothing is followed. The target must be used by nobody else.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from carrel.workspaces.volumes import kernel

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 8 << 20


def copy_tree(source: int, target: int, owner: int | None) -> None:
    """Copy everything beneath one open directory into another, and the directory's own attributes."""
    made = kernel.Directories(target)
    firsts: dict[int, tuple[int, str]] = {}
    done: list[tuple[os.stat_result, dict[str, bytes]]] = []
    try:
        for visited in kernel.visit(source):
            if visited.number:
                made.add(visited.parent, visited.name)
            here = made.get(visited.number)
            done.append((visited.info, kernel.user_xattrs(visited.fd)))
            for name, info in visited.entries:
                kind = stat.S_IFMT(info.st_mode)
                if kind == stat.S_IFDIR:
                    os.mkdir(name, 0o700, dir_fd=here)
                elif kind == stat.S_IFLNK:
                    _copy_link(name, info, visited.fd, here, owner)
                elif kind == stat.S_IFREG:
                    first = firsts.get(info.st_ino)
                    if first is not None:
                        _link(made, first, visited.number, name)
                        continue
                    _copy_file(name, visited.fd, here, owner)
                    if info.st_nlink > 1:
                        firsts[info.st_ino] = visited.number, name
        for number in reversed(range(len(done))):
            _attributes(made.get(number), *done[number], owner)
    finally:
        made.close()


def _link(made: kernel.Directories, first: tuple[int, str], number: int, name: str) -> None:
    origin = os.dup(made.get(first[0]))
    try:
        os.link(first[1], name, src_dir_fd=origin, dst_dir_fd=made.get(number), follow_symlinks=False)
    finally:
        os.close(origin)


def _copy_link(name: str, info: os.stat_result, source: int, target: int, owner: int | None) -> None:
    os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    os.utime(name, ns=(info.st_mtime_ns, info.st_mtime_ns), dir_fd=target, follow_symlinks=False)
    if owner is not None:
        os.chown(name, owner, owner, dir_fd=target, follow_symlinks=False)


def _copy_file(name: str, source: int, target: int, owner: int | None) -> None:
    origin = kernel.open_for_reading(name, source)
    try:
        info = os.fstat(origin)
        copy = os.open(name, _NEW, 0o600, dir_fd=target)
        try:
            if not kernel.clone(origin, copy):
                _copy_data(origin, copy, info.st_size)
            _attributes(copy, info, kernel.user_xattrs(origin), owner)
        finally:
            os.close(copy)
    finally:
        os.close(origin)


def _copy_data(origin: int, copy: int, size: int) -> None:
    os.ftruncate(copy, size)
    for start, length in kernel.data_extents(origin, size):
        at, end = start, start + length
        while at < end:
            data = os.pread(origin, min(_PIECE, end - at), at)
            if not data:
                break
            view = memoryview(data)
            while view:
                wrote = os.pwrite(copy, view, at)
                at += wrote
                view = view[wrote:]


def _attributes(fd: int, info: os.stat_result, xattrs: dict[str, bytes], owner: int | None) -> None:
    if owner is not None:
        os.fchown(fd, owner, owner)
    for key, value in xattrs.items():
        with suppress(OSError):
            os.setxattr(fd, key, value)
    os.fchmod(fd, stat.S_IMODE(info.st_mode))
    os.utime(fd, ns=(info.st_mtime_ns, info.st_mtime_ns))
