"""Writes the layers of a build: what a COPY copies, and what a RUN has changed. Blocking.

A layer is the same for the same content: entries are sorted, and all times are one fixed time. So its digest serves as
the key of the build cache, and a build that is repeated makes the same image.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from carrel.errors import LimitExceeded, NotFound
from carrel.images.build_steps import CopyStep
from carrel.images.dockerfile import refused
from carrel.primitives import libc, walk

TIME = 315_619_200
"""2 January 1980: some archives cannot hold an earlier time."""
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_OPAQUE_XATTRS = ("trusted.overlay.opaque", "user.overlay.opaque")
_WILD = frozenset("*?[")

Owner = tuple[int, int]
"""The user and the group of a file in the image."""


@dataclass(frozen=True, slots=True)
class WrittenLayer:
    """A layer in a file. It is not compressed, so it has one digest."""

    digest: str
    size: int
    entries: int


class _Hashed(io.RawIOBase):
    """Writes to a file and keeps the digest of everything; refuses to grow beyond a limit."""

    def __init__(self, descriptor: int, most: int):
        self._descriptor = descriptor
        self._most = most
        self._hash = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        self.size += len(view)
        if self.size > self._most:
            raise LimitExceeded(
                f"a layer of the build is larger than {self._most >> 20} MiB",
                field="max_image_mb",
                hint="copy less, or remove temporary files in the same RUN line; the operator sets the limit",
            )
        self._hash.update(view)
        written = 0
        while written < len(view):
            written += os.write(self._descriptor, view[written:])
        return len(view)

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


class _LayerTar:
    def __init__(self, hashed: _Hashed):
        self._hashed = hashed
        self._tar = tarfile.open(fileobj=hashed, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20)  # noqa: SIM115
        self._inodes: dict[tuple[int, int], str] = {}
        self._made: set[str] = set()
        self.entries = 0

    def directory(self, path: str, mode: int, owner: Owner) -> None:
        if path and path not in self._made:
            self._made.add(path)
            self._add(self._header(path, tarfile.DIRTYPE, mode, owner))

    def empty(self, path: str) -> None:
        self._add(self._header(path, tarfile.REGTYPE, 0o644, (0, 0)))

    def text(self, path: str, content: bytes, mode: int, owner: Owner) -> None:
        """Add a file that is not on the disk."""
        header = self._header(path, tarfile.REGTYPE, mode, owner)
        header.size = len(content)
        self._add(header, io.BytesIO(content))

    def entry(self, path: str, name: str, parent: int, info: os.stat_result, mode: int, owner: Owner) -> None:
        """Add what has this name in an open directory. Sockets, pipes and devices are left out."""
        kind = stat.S_IFMT(info.st_mode)
        if kind == stat.S_IFLNK:
            header = self._header(path, tarfile.SYMTYPE, 0o777, owner)
            header.linkname = os.readlink(name, dir_fd=parent)
            self._add(header)
        elif kind == stat.S_IFREG:
            self._file(path, name, parent, info, mode, owner)

    def _file(self, path: str, name: str, parent: int, info: os.stat_result, mode: int, owner: Owner) -> None:
        inode = info.st_dev, info.st_ino
        if info.st_nlink > 1 and inode in self._inodes:
            header = self._header(path, tarfile.LNKTYPE, mode, owner)
            header.linkname = self._inodes[inode]
            self._add(header)
            return
        descriptor = walk.open_for_reading(name, parent)
        with open(descriptor, "rb") as file:
            header = self._header(path, tarfile.REGTYPE, mode, owner)
            header.size = os.fstat(descriptor).st_size
            xattrs = walk.user_xattrs(descriptor)
            header.pax_headers = {
                f"SCHILY.xattr.{key}": value.decode(errors="surrogateescape")
                for key, value in sorted(xattrs.items())
                if not key.startswith("user.overlay.")
            }
            self._add(header, file)
        self._inodes[inode] = path

    def _header(self, path: str, kind: bytes, mode: int, owner: Owner) -> tarfile.TarInfo:
        header = tarfile.TarInfo(path)
        header.type, header.mode, header.mtime = kind, mode & 0o7777, TIME
        header.uid, header.gid = owner
        return header

    def _add(self, header: tarfile.TarInfo, file: IO[bytes] | None = None) -> None:
        self._tar.addfile(header, file)
        self.entries += 1

    def close(self) -> None:
        self._tar.close()


@contextmanager
def _layer(path: str, most: int) -> Iterator[tuple[_LayerTar, Callable[[], WrittenLayer]]]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        hashed = _Hashed(descriptor, most)
        tar = _LayerTar(hashed)

        def written() -> WrittenLayer:
            tar.close()
            return WrittenLayer(hashed.digest, hashed.size, tar.entries)

        yield tar, written
    finally:
        os.close(descriptor)


# COPY


def copy_layer(step: CopyStep, source: str, root: str, owner: Owner | None, path: str, most: int) -> WrittenLayer:
    """Write the layer of a COPY or ADD to `path`. `source` has the files, `root` is the image so far. Without an owner,
    each file keeps its own.
    """
    source_fd, root_fd = _open_root(source), _open_root(root)
    try:
        with _layer(path, most) as (tar, written):
            found = [each for pattern in step.sources for each in _matching(source_fd, pattern, step.line)]
            into = step.target.endswith("/") or len(found) + len(step.texts) > 1
            target = resolve(root_fd, step.target)
            into = into or _is_directory(root_fd, target)
            for each in found:
                _copy_one(tar, source_fd, each, root_fd, target, owner, step.mode, into=into)
            for name, text in step.texts:
                place = posixpath.join(target, name) if into else target
                _make_parents(tar, root_fd, place, owner or (0, 0))
                tar.text(place, text.encode(), 0o644 if step.mode is None else step.mode, owner or (0, 0))
            return written()
    finally:
        os.close(source_fd)
        os.close(root_fd)


def directory_layer(directory: str, root: str, owner: Owner, path: str) -> WrittenLayer | None:
    """Write the layer that makes a directory; None if the image has it already."""
    root_fd = _open_root(root)
    try:
        target = resolve(root_fd, directory)
        if _is_directory(root_fd, target):
            return None
        with _layer(path, 1 << 20) as (tar, written):
            _make_parents(tar, root_fd, f"{target}/x", owner)
            return written()
    finally:
        os.close(root_fd)


def _copy_one(
    tar: _LayerTar, source: int, name: str, root: int, target: str, owner: Owner | None, mode: int | None, *, into: bool
) -> None:
    place = libc.open_in_root(source, os.fsencode(name), os.O_PATH)
    try:
        info = os.fstat(place)
        if stat.S_ISDIR(info.st_mode):
            # Opened again for reading, by its descriptor: the name may mean something else by now.
            directory = os.open(f"/proc/self/fd/{place}", walk.DIRECTORY & ~os.O_NOFOLLOW)
            try:
                _make_parents(tar, root, f"{target}/x", owner or (0, 0))
                _copy_tree(tar, directory, target, owner, mode)
            finally:
                os.close(directory)
            return
        resolved = os.readlink(f"/proc/self/fd/{place}")
        parent = os.open(os.path.dirname(resolved), walk.DIRECTORY & ~os.O_NOFOLLOW)
    finally:
        os.close(place)
    try:
        path = posixpath.join(target, posixpath.basename(name.rstrip("/"))) if into else target
        _make_parents(tar, root, path, (0, 0) if mode is None or owner is None else owner)
        wanted = info.st_mode if mode is None else mode
        tar.entry(path, os.path.basename(resolved), parent, info, wanted, owner or (info.st_uid, info.st_gid))
    finally:
        os.close(parent)


def _copy_tree(tar: _LayerTar, directory: int, target: str, owner: Owner | None, mode: int | None) -> None:
    for visited in walk.visit(directory):
        if visited.path_bytes > walk.LONGEST_PATH:
            raise walk.too_deep([target])
        base = posixpath.join(target, visited.path) if visited.path else target
        for name, info in sorted(visited.entries, key=lambda entry: entry[0]):
            path = posixpath.join(base, name)
            wanted, whose = info.st_mode if mode is None else mode, owner or (info.st_uid, info.st_gid)
            if stat.S_ISDIR(info.st_mode):
                tar.directory(path, wanted, whose)
            else:
                tar.entry(path, name, visited.fd, info, wanted, whose)


def _make_parents(tar: _LayerTar, root: int, path: str, owner: Owner) -> None:
    parts = path.split("/")[:-1]
    for count in range(1, len(parts) + 1):
        parent = "/".join(parts[:count])
        if parent and not _is_directory(root, parent):
            tar.directory(parent, 0o755, owner)


def _matching(source: int, pattern: str, line: int) -> list[str]:
    """Return the paths that a source of a COPY names: itself, or all that match, sorted."""
    clean = posixpath.normpath("/" + pattern).lstrip("/") or "."
    found = ["."]
    for part in clean.split("/") if clean != "." else []:
        if _WILD.isdisjoint(part):
            found = [posixpath.join(each, part) for each in found]
            continue
        wanted = part.replace("[^", "[!")
        found = [
            posixpath.join(each, name)
            for each in found
            for name in _names(source, each)
            if fnmatch.fnmatchcase(name, wanted)
        ]
    there = [each for each in found if _exists(source, each)]
    if not there:
        raise refused(line, f"'{pattern[:200]}' is not in the build context", "check the path, and .dockerignore")
    return sorted(there)


def _names(source: int, directory: str) -> Sequence[str]:
    try:
        descriptor = libc.open_in_root(source, os.fsencode(directory), os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return ()
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _exists(source: int, path: str) -> bool:
    try:
        os.close(libc.open_in_root(source, os.fsencode(path), os.O_PATH))
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}:
            return False
        raise
    return True


def resolve(root: int, path: str) -> str:
    """Return a path of an image without its links, relative to the root. What does not exist stays as it is."""
    rest: list[str] = []
    parts = [part for part in path.split("/") if part]
    top = os.readlink(f"/proc/self/fd/{root}")
    while parts:
        with suppress(OSError):
            place = libc.open_in_root(root, os.fsencode("/".join(parts)), os.O_PATH)
            try:
                found = os.readlink(f"/proc/self/fd/{place}")
            finally:
                os.close(place)
            return posixpath.join(posixpath.relpath(found, top), *rest).removeprefix("./")
        rest.insert(0, parts.pop())
    return "/".join(rest)


def _is_directory(root: int, path: str) -> bool:
    try:
        place = libc.open_in_root(root, os.fsencode(path or "."), os.O_PATH | os.O_DIRECTORY)
    except OSError:
        return False
    os.close(place)
    return True


def _open_root(path: str) -> int:
    try:
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(f"the directory {path} is gone", hint="build again") from None


# RUN


def changes_layer(
    upper: str, owner_of: Callable[[os.stat_result], Owner], path: str, most: int, shared: Collection[str] = ()
) -> WrittenLayer:
    """Write what a command has changed, from the upper directory of an overlay, as a layer to `path`.

    `owner_of` returns the owner that a file has in the image. Directories in `shared` were there before: they are only
    written if there is something in them.
    """
    directory = os.open(upper, walk.DIRECTORY)
    try:
        with _layer(path, most) as (tar, written):
            for visited in walk.visit(directory):
                if visited.path_bytes > walk.LONGEST_PATH:
                    raise walk.too_deep([visited.name])
                _changed(tar, visited, owner_of, shared)
            return written()
    finally:
        os.close(directory)


def _changed(
    tar: _LayerTar, visited: walk.Visited, owner_of: Callable[[os.stat_result], Owner], shared: Collection[str]
) -> None:
    base = visited.path
    if base in shared and visited.entries:
        tar.directory(base, visited.info.st_mode, owner_of(visited.info))
    if base and _is_opaque(visited.fd):
        tar.empty(f"{base}/{_OPAQUE}")
    for name, info in sorted(visited.entries, key=lambda entry: entry[0]):
        path = f"{base}/{name}" if base else name
        if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            tar.empty(f"{base}/{_WHITEOUT}{name}" if base else f"{_WHITEOUT}{name}")
        elif not stat.S_ISDIR(info.st_mode):
            tar.entry(path, name, visited.fd, info, info.st_mode, owner_of(info))
        elif path not in shared:
            tar.directory(path, info.st_mode, owner_of(info))


def _is_opaque(directory: int) -> bool:
    for name in _OPAQUE_XATTRS:
        with suppress(OSError):
            if os.getxattr(directory, name) == b"y":
                return True
    return False
