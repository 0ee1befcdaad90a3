"""Opening and walking a tree of files that hostile code may be changing.

Knows nothing of volumes or snapshots.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from carrel.errors import LimitExceeded
from carrel.primitives import libc

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
LONGEST_PATH = 4096
"""How many bytes the path of a directory may have where paths are needed, as in a tar or a filespace. No program can
name more in one call. Snapshots need no paths and take every depth."""
LONGEST_NAME = 255
_KEPT_OPEN = 96
_MOST_REOPENED = 200_000
_SPARE_STEPS, _STEPS_EACH = 200_000, 64
_SHOWN = 80
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_WRITE_BACK_S = 0.2


@contextmanager
def writing_back(fd: int) -> Iterator[None]:
    """Write what is made on the file system meanwhile back as it comes: a `sync` at the end then waits for little."""
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

    As an ordinary user, a file of ours that forbids reading is opened by allowing it for a moment.
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
            if stat.S_ISREG(info.st_mode):  # a directory must stay passable while its entries are looked at
                os.chmod(through, mode)
    finally:
        os.close(handle)


class Directories:
    """Open directories of one tree by number, the ones used last kept open. No link is ever followed.

    A directory is known by its parent and its name, so a deep tree costs neither recursion, long paths nor descriptors.
    Getting one costs its distance from the one that was got before; when they are far apart again and again,
    `LimitExceeded` says so.
    """

    def __init__(self, root: int):
        self._root = root
        self._places: list[tuple[int, str, int]] = [(0, "", 0)]  # parent, name and depth
        self._identities: dict[int, tuple[int, int]] = {}
        self._open: OrderedDict[int, int] = OrderedDict()
        self._last = 0
        self._steps_left = _SPARE_STEPS

    def add(self, parent: int, name: str) -> int:
        """Give a directory its number; the root has 0, and numbers are given in order. Nothing is opened yet."""
        self._places.append((parent, name, self._places[parent][2] + 1))
        self._steps_left += _STEPS_EACH
        return len(self._places) - 1

    def get(self, number: int) -> int:
        """The descriptor of a directory; stays open until many others were asked for."""
        self._steps_left += _STEPS_EACH
        found = self._opened(number)
        if found is None:
            found = self._go(number)
        elif number:
            self._open.move_to_end(number)
        self._last = number
        return found

    def _opened(self, number: int) -> int | None:
        return self._open.get(number) if number else self._root

    def _go(self, number: int) -> int:
        """Go from the directory that was used last to another one: up to what is above both, then down."""
        here, target = self._last, number
        fd = self._opened(here)
        assert fd is not None  # what was used last is closed last
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
        chain = []  # the child was moved: then from the top, by names
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


def _open_directory(name: str, parent: int) -> int:
    return open_for_reading(name, parent, DIRECTORY)


def open_expected(name: str, parent: int, identity: tuple[int, int], opener: Callable[[str, int], int]) -> int:
    """Open a directory; -1 when it is not there, or is not the one that is expected."""
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
    """One directory on the way from the root of a tree to the current one. `fd` is -1 while it is closed."""

    number: int
    name: str
    fd: int
    identity: tuple[int, int]
    path_bytes: int
    waiting: list[str]


class Chain:
    """The directories from the root of a tree down to the current one, of which only the first are kept open.

    Going down and up again costs one call each, however deep the tree is. `open_directory` opens a name in a directory.
    """

    def __init__(self, root: int, open_directory: Callable[[str, int], int]):
        info = os.fstat(root)
        self.device = info.st_dev
        self.levels = [Level(0, "", root, (info.st_dev, info.st_ino), 0, [])]
        self._open_directory = open_directory
        self._count = 0
        self._reopened = 0

    def next(self) -> os.stat_result | None:
        """Go to the next directory that waits, which becomes the last level; None when there is none.

        One that has vanished, or that is mounted there, is passed over.
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

        Where the directory was moved or deleted meanwhile, the parents are looked for by their names. One that is not
        there any more has vanished, with all that waits in it.
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
    """One directory of a tree. It is good only until the next one is asked for; entries are not sorted.

    Numbers are given in the order of the visits: the root has 0, and is its own parent.
    """

    number: int
    parent: int
    name: str
    fd: int
    info: os.stat_result
    entries: list[tuple[str, os.stat_result]]
    path_bytes: int
    _chain: Chain

    @property
    def path(self) -> str:
        """Its path beneath the root. Look at `path_bytes` first: the paths of a deep tree take more room than memory
        has."""
        return "/".join(level.name for level in self._chain.levels[1:])


def visit(root: int) -> Iterator[Visited]:
    """Every directory beneath an open one, parents first. What vanishes meanwhile or is mounted there is left out.

    Memory and time are proportional to the number of entries, however deep the tree is.
    """
    chain = Chain(root, _open_directory)
    levels = chain.levels
    info: os.stat_result | None = os.fstat(root)
    try:
        while info is not None:
            here = levels[-1]
            parent = levels[-2].number if len(levels) > 1 else 0
            entries = []
            with os.scandir(here.fd) as listing:
                for entry in listing:
                    name = entry.name
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    entries.append((name, found))
                    if found.st_mode & 0o170000 == 0o040000:
                        here.waiting.append(name)
            yield Visited(here.number, parent, here.name, here.fd, info, entries, here.path_bytes, chain)
            info = chain.next()
    finally:
        chain.close()


def too_deep(names: Sequence[str]) -> LimitExceeded:
    """The refusal of a tree with a path of more than `LONGEST_PATH` bytes; `names` lead to where it lies."""
    top = names[0] if names else "?"
    shown = top if len(top) <= _SHOWN else f"{top[:_SHOWN]}…"
    return LimitExceeded(
        f"directories are nested too deep beneath {shown!r}: more than {len(names)} levels, "
        f"with a path of more than {LONGEST_PATH} bytes",
        field="files",
        hint=f"delete {shown!r} (in a sandbox: rm -rf), or move what lies deep in it further up, then try again",
    )


def user_xattrs(fd: int) -> dict[str, bytes]:
    """The attributes a program may set itself; none where the file system has none."""
    found = {}
    with suppress(OSError):
        for name in os.listxattr(fd):
            if name.startswith("user."):
                with suppress(OSError):
                    found[name] = os.getxattr(fd, name)
    return found


def data_extents(fd: int, size: int) -> list[tuple[int, int]]:
    """Where a file has data, as (offset, length)."""
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
