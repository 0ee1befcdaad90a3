"""Walking a directory tree that hostile code may be changing, and reading and copying its files. Follows no link."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from carrel.errors import LimitExceeded
from carrel.primitives import libc

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
LONGEST_PATH = 4096
"""The most bytes in the path of a directory where paths are needed, as in a tar or a filespace. No system call takes a
longer one. Snapshots need no paths and have no limit on depth."""
LONGEST_NAME = 255
_KEPT_OPEN = 96
_MOST_REOPENED = 200_000
_SPARE_STEPS, _STEPS_EACH = 200_000, 64
_SHOWN = 80
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_WRITE_BACK_S = 0.2
_COPY_BYTES = 8 << 20


@contextmanager
def writing_back(fd: int) -> Iterator[None]:
    """Sync the file system again and again during the block, so that the `sync` at the end waits only briefly."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(_WRITE_BACK_S):
            with suppress(OSError):  # it fails again at the end, and is reported then
                libc.sync(fd)

    thread = threading.Thread(target=run, name="carrel-write-back", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def open_for_reading(name: str, parent: int, flags: int = FILE) -> int:
    """Open an entry of a directory without following a link.

    As an ordinary user, the mode of a file of ours that forbids reading is changed for a moment.
    """
    try:
        return os.open(name, flags, dir_fd=parent)
    except PermissionError:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        info = os.fstat(handle)
        if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        through = f"/proc/self/fd/{handle}"
        mode = stat.S_IMODE(info.st_mode)
        os.chmod(through, mode | (0o500 if stat.S_ISDIR(info.st_mode) else 0o400))
        try:
            return os.open(through, flags & ~os.O_NOFOLLOW)
        finally:
            if stat.S_ISREG(info.st_mode):  # a directory must stay accessible while its entries are read
                os.chmod(through, mode)
    finally:
        os.close(handle)


class Directories:
    """Open directories of one tree, by number. The most recently used stay open. No link is ever followed.

    A directory is identified by its parent and name, so a deep tree costs neither recursion, long paths nor
    descriptors. `get` costs the distance from the directory of the last `get`; `LimitExceeded` when these distances
    are long again and again.
    """

    def __init__(self, root: int):
        self._root = root
        self._places: list[tuple[int, str, int]] = [(0, "", 0)]  # parent, name and depth
        self._identities: dict[int, tuple[int, int]] = {}
        self._open: OrderedDict[int, int] = OrderedDict()
        self._last = 0
        self._steps_left = _SPARE_STEPS

    def add(self, parent: int, name: str) -> int:
        """Add a directory and return its number. Numbers count up; the root has 0. Nothing is opened yet."""
        self._places.append((parent, name, self._places[parent][2] + 1))
        self._steps_left += _STEPS_EACH
        return len(self._places) - 1

    def get(self, number: int) -> int:
        """Return the descriptor of a directory. It stays open until many other directories were opened."""
        self._steps_left += _STEPS_EACH
        found = self._opened(number)
        if found is None:
            found = self._go(number)
        elif number:
            self._open.move_to_end(number)
        self._last = number
        return found

    def link(self, origin: int, origin_name: str, number: int, name: str) -> None:
        """Make a hard link in directory `number` to a file in directory `origin`."""
        source = os.dup(self.get(origin))
        try:
            os.link(origin_name, name, src_dir_fd=source, dst_dir_fd=self.get(number), follow_symlinks=False)
        finally:
            os.close(source)

    def _opened(self, number: int) -> int | None:
        return self._open.get(number) if number else self._root

    def _go(self, number: int) -> int:
        """Go from the last used directory to another one: up to their common ancestor, then down."""
        here, target = self._last, number
        fd = self._opened(here)
        assert fd is not None  # the last used directory is closed last
        down: list[int] = []
        while target != here:
            if (near := self._opened(target)) is not None:
                fd = near
                break
            if self._places[target][2] > self._places[here][2]:
                down.append(target)
                target = self._places[target][0]
            else:
                here = self._places[here][0]
                fd = self._above(here, fd)
        for child in reversed(down):
            fd = self._step(child, self._places[child][1], fd)
        return fd

    def _above(self, number: int, child: int) -> int:
        """Open the parent of an open directory."""
        if (found := self._opened(number)) is not None:
            return found
        fd = open_expected("..", child, self._identities[number], _open_directory)
        if fd >= 0:
            return self._keep(number, fd)
        chain = []  # the child was moved: start again from the root, by names
        while number:
            chain.append(number)
            number = self._places[number][0]
        fd = self._root
        for below in reversed(chain):
            fd = self._step(below, self._places[below][1], fd)
        return fd

    def _step(self, number: int, name: str, parent: int) -> int:
        if (found := self._open.get(number)) is not None:
            self._open.move_to_end(number)
            return found
        fd = _open_directory(name, parent)
        info = os.fstat(fd)
        self._identities[number] = info.st_dev, info.st_ino
        return self._keep(number, fd)

    def _keep(self, number: int, fd: int) -> int:
        self._open[number] = fd
        while len(self._open) > _KEPT_OPEN:
            _, oldest = self._open.popitem(last=False)
            os.close(oldest)
        self._steps_left -= 1
        if self._steps_left < 0:
            raise LimitExceeded(
                f"directories are nested too deep: {self._places[number][2]} levels, with links between them",
                field="files",
                hint="nest fewer directories",
            )
        return fd

    def close(self) -> None:
        """Close all but the root."""
        while self._open:
            os.close(self._open.popitem()[1])
        self._last = 0


def open_expected(name: str, parent: int, identity: tuple[int, int], opener: Callable[[str, int], int]) -> int:
    """Open a directory; -1 when it is missing or is not the expected one."""
    try:
        fd = opener(name, parent)
    except OSError as error:
        if error.errno in _GONE:
            return -1
        raise
    info = os.fstat(fd)
    if (info.st_dev, info.st_ino) == identity:
        return fd
    os.close(fd)
    return -1


@dataclass(slots=True)
class Level:
    """One directory between the root of a tree and the current one. `fd` is -1 while it is closed."""

    number: int
    name: str
    fd: int
    identity: tuple[int, int]
    path_bytes: int
    waiting: list[str]


class OpenDirectories:
    """The directories from the root of a tree down to the current one. Only the first ones and the last stay open.

    Going down or up costs one call, however deep the tree is. `open_directory` opens a name in a directory.
    """

    def __init__(self, root: int, open_directory: Callable[[str, int], int]):
        info = os.fstat(root)
        self.device = info.st_dev
        self.levels = [Level(0, "", root, (info.st_dev, info.st_ino), 0, [])]
        self._open_directory = open_directory
        self._count = 0
        self._reopened = 0

    def next(self) -> os.stat_result | None:
        """Go to the next waiting directory, which becomes the last level; None when there is none.

        Directories that have vanished and mount points are skipped.
        """
        while True:
            while self.levels and not self.levels[-1].waiting:
                self._leave()
            if not self.levels:
                return None
            above = self.levels[-1]
            name = above.waiting.pop()
            try:
                fd = self._open_directory(name, above.fd)
            except OSError as error:
                if error.errno in _GONE:
                    continue
                raise
            info = os.fstat(fd)
            if info.st_dev == self.device:
                break
            os.close(fd)
        self._count += 1
        length = above.path_bytes + len(os.fsencode(name)) + (len(self.levels) > 1)
        self.levels.append(Level(self._count, name, fd, (info.st_dev, info.st_ino), length, []))
        if len(self.levels) > _KEPT_OPEN + 1:
            os.close(above.fd)
            above.fd = -1
        return info

    def _leave(self) -> None:
        """Go from the last level to its parent. A closed parent is opened as `..`.

        If the directory was moved or deleted meanwhile, its parents are opened again by name. A missing parent is
        dropped, with everything that waits in it.
        """
        left = self.levels.pop()
        if not self.levels:
            return
        above = self.levels[-1]
        if above.fd < 0:
            above.fd = open_expected("..", left.fd, above.identity, self._open_directory)
        os.close(left.fd)
        if above.fd >= 0:
            return
        first = next(index for index, level in enumerate(self.levels) if level.fd < 0)
        for index in range(first, len(self.levels)):
            self._reopened += 1
            if self._reopened > _MOST_REOPENED:
                raise OSError(errno.ESTALE, "directories kept being moved while they were read")
            level, above = self.levels[index], self.levels[index - 1]
            level.fd = open_expected(level.name, above.fd, level.identity, self._open_directory)
            if level.fd < 0:
                del self.levels[index:]
                return
            if index > _KEPT_OPEN:
                os.close(above.fd)
                above.fd = -1

    def close(self) -> None:
        """Close all but the root."""
        for level in self.levels:
            if level.number and level.fd >= 0:
                os.close(level.fd)
        self.levels.clear()


@dataclass(slots=True)
class Visited:
    """One directory of a tree, valid until the next one is visited. Entries are not sorted.

    Numbers count up in the order of visits; the root has 0 and is its own parent.
    """

    number: int
    parent: int
    name: str
    fd: int
    info: os.stat_result
    entries: list[tuple[str, os.stat_result]]
    path_bytes: int
    _chain: OpenDirectories

    @property
    def path(self) -> str:
        """The path below the root. Check `path_bytes` first: the paths of a deep tree can take more than all memory."""
        return "/".join(level.name for level in self._chain.levels[1:])

    def leave_out(self, name: str) -> None:
        """Do not visit a directory in this one."""
        self._chain.levels[-1].waiting.remove(name)


def _open_directory(name: str, parent: int) -> int:
    return open_for_reading(name, parent, DIRECTORY)


def visit(root: int, open_directory: Callable[[str, int], int] = _open_directory) -> Iterator[Visited]:
    """Visit an open directory and every directory below it, parents first. Skips vanished ones and mount points.

    Memory and time are proportional to the number of entries, however deep the tree is.
    """
    chain = OpenDirectories(root, open_directory)
    levels = chain.levels
    info: os.stat_result | None = os.fstat(root)
    try:
        while info is not None:
            here = levels[-1]
            parent = levels[-2].number if len(levels) > 1 else 0
            entries = _entries(here.fd)
            here.waiting += [name for name, found in entries if found.st_mode & 0o170000 == 0o040000]
            yield Visited(here.number, parent, here.name, here.fd, info, entries, here.path_bytes, chain)
            info = chain.next()
    finally:
        chain.close()


def _entries(fd: int) -> list[tuple[str, os.stat_result]]:
    """Return the names in a directory, with their states."""
    try:
        with os.scandir(fd) as listing:
            return [(entry.name, entry.stat(follow_symlinks=False)) for entry in listing]
    except FileNotFoundError:  # one was removed meanwhile: look at each by itself
        entries = []
        with os.scandir(fd) as listing:
            for entry in listing:
                with suppress(FileNotFoundError):
                    entries.append((entry.name, entry.stat(follow_symlinks=False)))
        return entries


def too_deep(names: Sequence[str]) -> LimitExceeded:
    """Return the error for a path of more than `LONGEST_PATH` bytes; `names` are its first components."""
    top = names[0] if names else "?"
    shown = top if len(top) <= _SHOWN else f"{top[:_SHOWN]}…"
    return LimitExceeded(
        f"directories are nested too deep beneath {shown!r}: more than {len(names)} levels, "
        f"with a path of more than {LONGEST_PATH} bytes",
        field="files",
        hint=f"delete {shown!r} (in a sandbox: rm -rf), or move what lies deep in it further up, then try again",
    )


def user_xattrs(fd: int) -> dict[str, bytes]:
    """Return the extended attributes that programs may set; empty where the file system has none."""
    found = {}
    with suppress(OSError):
        for name in os.listxattr(fd):
            if name.startswith("user."):
                with suppress(OSError):
                    found[name] = os.getxattr(fd, name)
    return found


def data_extents(fd: int, size: int) -> list[tuple[int, int]]:
    """Return the offset and length of each part of a file that has data; the rest are holes."""
    extents = []
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            return [(0, size)]
        if start >= size:
            break
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        if end <= start:
            break
        extents.append((start, end - start))
        at = end
    return extents


def copy_content(source: int, target: int) -> None:
    """Copy an open file into an empty one: shares blocks where the file system can, and keeps holes."""
    if libc.clone(source, target):
        return
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    for start, length in data_extents(source, size):
        at, end = start, start + length
        while at < end and (data := os.pread(source, min(_COPY_BYTES, end - at), at)):
            view = memoryview(data)
            while view:
                written = os.pwrite(target, view, at)
                at, view = at + written, view[written:]


def set_attributes(
    fd: int, mode: int, mtime_ns: int, xattrs: Mapping[str, bytes] | None = None, owner: int | None = None
) -> None:
    """Set owner, extended attributes (where the file system has them), mode and times of an open file or directory."""
    if owner is not None:
        os.fchown(fd, owner, owner)
    for key, value in (xattrs or {}).items():
        with suppress(OSError):
            os.setxattr(fd, key, value)
    os.fchmod(fd, mode)
    os.utime(fd, ns=(mtime_ns, mtime_ns))
