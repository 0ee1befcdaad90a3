"""Compares and copies directory trees that do not change, such as read-only subvolumes, and writes them as tar."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from carrel.primitives import walk
from carrel.workspaces.volumes import tarball
from carrel.workspaces.volumes.base import Change, ChangeKind
from carrel.workspaces.volumes.capture import ROOT, place_of
from carrel.workspaces.volumes.trees import Changes, EntryKind, Node, Position

_KEPT = {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}
_PIECE = 4 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Folder:
    directories: walk.Directories
    number: int
    where: Position
    entries: dict[str, os.stat_result]


def _folders(root: int, directories: walk.Directories) -> dict[bytes, _Folder]:
    """Return every directory by its place, with the entries that a snapshot keeps."""
    found: dict[bytes, _Folder] = {}
    places: list[bytes] = []
    for visited in walk.visit(root):
        place, where = ROOT, Position()
        if visited.number:
            directories.add(visited.parent, visited.name)
            place = place_of(places[visited.parent], visited.name)
            where = found[places[visited.parent]].where.below(os.fsencode(visited.name))
        places.append(place)
        kept = {name: info for name, info in visited.entries if stat.S_IFMT(info.st_mode) in _KEPT}
        found[place] = _Folder(directories, visited.number, where, kept)
    return found


def compare(one: int, other: int) -> list[Change]:
    """Return the differences between two trees, sorted by path."""
    left, right = walk.Directories(one), walk.Directories(other)
    changes = Changes()
    try:
        old, new = _folders(one, left), _folders(other, right)
        for place in old.keys() | new.keys():
            before, after = old.get(place), new.get(place)
            position = (old.get(place) or new[place]).where
            names = (before.entries if before else {}).keys() | (after.entries if after else {}).keys()
            for name in names:
                if after is None or name not in after.entries:
                    kind = ChangeKind.REMOVED
                elif before is None or name not in before.entries:
                    kind = ChangeKind.ADDED
                elif _differ(name, before, after):
                    kind = ChangeKind.CHANGED
                else:
                    continue
                changes.add(position.below(os.fsencode(name)).path(), kind)
    finally:
        left.close()
        right.close()
    return changes.sorted()


def _differ(name: str, before: _Folder, after: _Folder) -> bool:
    a, b = before.entries[name], after.entries[name]
    if (a.st_ino, a.st_ctime_ns, a.st_mode, a.st_size) == (b.st_ino, b.st_ctime_ns, b.st_mode, b.st_size):
        return False
    if stat.S_IFMT(a.st_mode) != stat.S_IFMT(b.st_mode):
        return True
    here, there = before.directories.get(before.number), after.directories.get(after.number)
    if stat.S_ISLNK(a.st_mode):
        return os.readlink(name, dir_fd=here) != os.readlink(name, dir_fd=there)
    if a.st_mode != b.st_mode or (stat.S_ISREG(a.st_mode) and a.st_size != b.st_size):
        return True
    flags = walk.DIRECTORY if stat.S_ISDIR(a.st_mode) else walk.FILE
    one = walk.open_for_reading(name, here, flags)
    try:
        other = walk.open_for_reading(name, there, flags)
        try:
            if walk.user_xattrs(one) != walk.user_xattrs(other):
                return True
            return stat.S_ISREG(a.st_mode) and any(x != y for x, y in zip(_pieces(one), _pieces(other), strict=True))
        finally:
            os.close(other)
    finally:
        os.close(one)


def _pieces(fd: int) -> Iterator[bytes]:
    at = 0
    while data := os.pread(fd, _PIECE, at):
        yield data
        at += len(data)


def tar(root: int) -> Iterator[bytes]:
    """Yield a tree as a tar stream."""
    firsts: dict[int, Position] = {}
    folders: list[Position] = []
    for visited in walk.visit(root):
        here = folders[visited.parent].below(os.fsencode(visited.name)) if visited.number else Position()
        folders.append(here)
        folder = here.path() + b"/" if visited.number else b""
        info = visited.info
        attributes = walk.user_xattrs(visited.fd) or None
        node = Node(EntryKind.DIRECTORY, stat.S_IMODE(info.st_mode), info.st_mtime_ns, xattrs=attributes)
        yield tarball.header(folder or b"./", node)
        for name, entry in visited.entries:
            path = folder + os.fsencode(name)
            if stat.S_ISLNK(entry.st_mode):
                target = os.fsencode(os.readlink(name, dir_fd=visited.fd))
                yield tarball.header(path, Node(EntryKind.LINK, mtime_ns=entry.st_mtime_ns, target=target))
            elif stat.S_ISREG(entry.st_mode):
                first = None
                if entry.st_nlink > 1:
                    first = firsts.get(entry.st_ino)
                    if first is None:
                        firsts[entry.st_ino] = here.below(os.fsencode(name))
                yield from _tar_file(path, name, visited.fd, entry, first.path() if first else None)
    yield tarball.END


def _tar_file(path: bytes, name: str, parent: int, info: os.stat_result, first: bytes | None) -> Iterator[bytes]:
    fd = walk.open_for_reading(name, parent)
    try:
        node = Node(
            EntryKind.FILE,
            stat.S_IMODE(info.st_mode),
            info.st_mtime_ns,
            info.st_size,
            xattrs=walk.user_xattrs(fd) or None,
        )
        yield tarball.header(path, node, hard_link_to=first)
        if first is None:
            yield from tarball.content(info.st_size, _data(fd, info.st_size))
    finally:
        os.close(fd)


def _data(fd: int, size: int) -> Iterator[tuple[int, bytes]]:
    for start, length in walk.data_extents(fd, size):
        at, end = start, start + length
        while at < end and (data := os.pread(fd, min(_PIECE, end - at), at)):
            yield at, data
            at += len(data)


def copy_tree(source: int, target: int, owner: int | None) -> None:
    """Copy everything below one open directory into another, and the directory's own attributes.

    The source may be hostile: no link is followed. Nothing else may use the target.
    """
    made = walk.Directories(target)
    firsts: dict[int, tuple[int, str]] = {}
    done: list[tuple[os.stat_result, dict[str, bytes]]] = []
    try:
        for visited in walk.visit(source):
            if visited.number:
                made.add(visited.parent, visited.name)
            here = made.get(visited.number)
            done.append((visited.info, walk.user_xattrs(visited.fd)))
            for name, info in visited.entries:
                kind = stat.S_IFMT(info.st_mode)
                if kind == stat.S_IFDIR:
                    os.mkdir(name, 0o700, dir_fd=here)
                elif kind == stat.S_IFLNK:
                    _copy_link(name, info, visited.fd, here, owner)
                elif kind == stat.S_IFREG:
                    first = firsts.get(info.st_ino)
                    if first is not None:
                        made.link(*first, visited.number, name)
                        continue
                    _copy_file(name, visited.fd, here, owner)
                    if info.st_nlink > 1:
                        firsts[info.st_ino] = visited.number, name
        for number in reversed(range(len(done))):
            info, xattrs = done[number]
            walk.set_attributes(made.get(number), stat.S_IMODE(info.st_mode), info.st_mtime_ns, xattrs, owner)
    finally:
        made.close()


def _copy_link(name: str, info: os.stat_result, source: int, target: int, owner: int | None) -> None:
    os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    os.utime(name, ns=(info.st_mtime_ns, info.st_mtime_ns), dir_fd=target, follow_symlinks=False)
    if owner is not None:
        os.chown(name, owner, owner, dir_fd=target, follow_symlinks=False)


def _copy_file(name: str, source: int, target: int, owner: int | None) -> None:
    origin = walk.open_for_reading(name, source)
    try:
        info = os.fstat(origin)
        copy = os.open(name, _NEW, 0o600, dir_fd=target)
        try:
            walk.copy_content(origin, copy)
            mode = stat.S_IMODE(info.st_mode)
            walk.set_attributes(copy, mode, info.st_mtime_ns, walk.user_xattrs(origin), owner)
        finally:
            os.close(copy)
    finally:
        os.close(origin)
