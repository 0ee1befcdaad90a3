"""The few Linux calls that Python does not offer, and opening files in a tree that hostile code may be changing.

Knows nothing of volumes or snapshots.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_FICLONE = 0x40049409
_RENAME_EXCHANGE = 2
_KEPT_OPEN = 96
_WRITE_BACK_S = 0.2
_NR_CACHESTAT = 451
_DIRTY, _IN_WRITEBACK = 1, 2
_WHOLE_FILE = (ctypes.c_uint64 * 2)(0, 0)
_RANGE_WAIT_BEFORE, _RANGE_WRITE, _RANGE_WAIT_AFTER = 1, 2, 4
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)


def control(fd: int, request: int, argument: bytearray | None = None) -> int:
    """An ioctl that lets other threads run meanwhile, which Python's own does not when the argument is large."""
    where = None if argument is None else ctypes.addressof(ctypes.c_char.from_buffer(argument))
    result: int = _libc.ioctl(fd, request, where)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def sync(fd: int) -> None:
    """Write everything of the file system of an open file to the disk."""
    if _libc.syncfs(fd) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def dirty(fd: int) -> bool | None:
    """Whether parts of a file are in memory and not yet on their way to the disk; None where the kernel cannot tell."""
    counts = (ctypes.c_uint64 * 5)()
    if _libc.syscall(ctypes.c_long(_NR_CACHESTAT), ctypes.c_int(fd), _WHOLE_FILE, counts, ctypes.c_uint(0)) != 0:
        return None
    return bool(counts[_DIRTY] or counts[_IN_WRITEBACK])


def start_writing(fd: int) -> None:
    """Begin to write a file's changed parts to the disk. A failure shows when they are awaited."""
    _libc.sync_file_range(fd, 0, 0, _RANGE_WRITE)


def finish_writing(fd: int) -> None:
    """Wait until all parts of a file that were changed have been written; not its times or its name."""
    if _libc.sync_file_range(fd, 0, 0, _RANGE_WAIT_BEFORE | _RANGE_WRITE | _RANGE_WAIT_AFTER) != 0:
        code = ctypes.get_errno()
        if code not in {errno.EINVAL, errno.ENOSYS, errno.ESPIPE}:
            raise OSError(code, os.strerror(code))


def exchange(a: str, b: str) -> bool:
    """Swap two directories of one parent in one step; False where the file system cannot."""
    result = _libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), _RENAME_EXCHANGE)
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
        return False
    raise OSError(code, os.strerror(code), a)


def clone(source: int, target: int) -> bool:
    """Let one file share the other's blocks; False where the file system cannot."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


@contextmanager
def writing_back(fd: int) -> Iterator[None]:
    """Write what is made on the file system meanwhile back as it comes: a `sync` at the end then waits for little."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(_WRITE_BACK_S):
            _libc.syncfs(fd)  # what fails here fails again at the end, and is told then

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
    """Open directories of one tree by path, the ones used last kept open: depth costs neither recursion, long paths
    nor descriptors, and no component is ever followed when it is a link."""

    def __init__(self, root: int):
        self._root = root
        self._open: OrderedDict[str, int] = OrderedDict()

    def get(self, path: str) -> int:
        """The descriptor of a directory; stays open until many others were asked for."""
        if not path:
            return self._root
        found = self._open.get(path)
        if found is not None:
            self._open.move_to_end(path)
            return found
        todo = []
        while path and path not in self._open:
            path, _, name = path.rpartition("/")
            todo.append((path, name))
        for parent, name in reversed(todo):
            child = open_for_reading(name, self._open[parent] if parent else self._root, DIRECTORY)
            self._open[f"{parent}/{name}" if parent else name] = child
            while len(self._open) > _KEPT_OPEN:
                _, oldest = self._open.popitem(last=False)
                os.close(oldest)
            found = child
        assert found is not None
        return found

    def close(self) -> None:
        """Close all but the root."""
        while self._open:
            os.close(self._open.popitem()[1])


@dataclass(slots=True)
class Visited:
    """One directory of a tree. The descriptor is open only until the next one is asked for; entries are not sorted."""

    path: str
    fd: int
    info: os.stat_result
    entries: list[tuple[str, os.stat_result]]


def visit(root: int) -> Iterator[Visited]:
    """Every directory beneath an open one, parents first. What vanishes meanwhile or is mounted there is left out."""
    device = os.fstat(root).st_dev
    directories = Directories(root)
    pending = [""]
    try:
        while pending:
            path = pending.pop()
            try:
                fd = directories.get(path)
                info = os.fstat(fd)
            except OSError as error:
                if path and error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                    continue
                raise
            if info.st_dev != device:
                continue
            entries = []
            prefix = f"{path}/" if path else ""
            with os.scandir(fd) as listing:
                for entry in listing:
                    name = entry.name
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    entries.append((name, found))
                    if found.st_mode & 0o170000 == 0o040000:
                        pending.append(prefix + name)
            yield Visited(path, fd, info, entries)
    finally:
        directories.close()


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
