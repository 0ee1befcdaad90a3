"""Calls of libc and of the kernel that Python's `os` lacks. Descriptors and names in, `OSError` out; nothing is decided
here.

Programs that cannot import carrel, because they run on an interpreter inside the sandbox, make their own.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

_OPENAT2 = 437
_CACHESTAT = 451
_FCHMODAT2 = 452
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}.get(os.uname().machine)
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_IOPRIO_WHO_PROCESS = 1
_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
_FICLONE = 0x40049409
_FICLONERANGE = 0x4020940D
_IPC_RMID = 0
_DIRTY, _IN_WRITEBACK = 1, 2
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_SECCOMP_MODE_FILTER, _FILTER_INSTRUCTION = 2, 8
_WHOLE_FILE = (ctypes.c_uint64 * 2)(0, 0)
_RANGE_WAIT_BEFORE, _RANGE_WRITE, _RANGE_WAIT_AFTER = 1, 2, 4
_ATTEMPTS = 500
OPEN_BENEATH_WORDS = struct.unpack("=II", os.urandom(8))
"""Two words in arguments of openat2 that the kernel ignores. By them a system call filter tells the calls of
`open_beneath`, in this process and its forks, from those of programs that the process executes.
"""


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)
# Holds the interpreter lock: for short calls of processes with one thread, as between a fork and `pivot_root`.
_held = ctypes.PyDLL(None, use_errno=True)
_held.syscall.restype = ctypes.c_long


def _check(result: int, call: str = "") -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}" if call else os.strerror(code))
    return int(result)


def _call(number: int | None, *args: object) -> int:
    if number is None:
        raise OSError(errno.ENOSYS, f"the system call is not known on {os.uname().machine}")
    return _check(_libc.syscall(ctypes.c_long(number), *args))


# Paths and names


def open_beneath(directory: int, path: bytes, flags: int) -> int:
    """Open what is at `path` beneath `directory`, whatever `..`, symlinks and renames try; never creates.

    `EXDEV` says that the path leads outside. The kernel answers `EAGAIN` when it cannot tell because of a
    rename at that very moment; that is tried again a bounded number of times.
    """
    return _open_resolved(directory, path, flags, RESOLVE_BENEATH)


def open_in_root(directory: int, path: bytes, flags: int, *, links: bool = True) -> int:
    """Open what is at `path` for a process whose root is `directory`: links and `..` never lead out of it.

    Without `links`, a path that leads over one is refused with `ELOOP`.
    """
    return _open_resolved(directory, path, flags, RESOLVE_IN_ROOT | (0 if links else RESOLVE_NO_SYMLINKS))


def _open_resolved(directory: int, path: bytes, flags: int, resolve: int) -> int:
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve | RESOLVE_NO_MAGICLINKS)
    size = ctypes.c_size_t(ctypes.sizeof(how))
    name = ctypes.c_char_p(path)
    words = [ctypes.c_long(word) for word in OPEN_BENEATH_WORDS]
    for attempt in range(_ATTEMPTS):
        try:
            return _call(_OPENAT2, ctypes.c_int(directory), name, ctypes.byref(how), size, *words)
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EINTR} or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def open_without_links(path: str, directory: int = _AT_FDCWD, flags: int = os.O_PATH) -> int:
    """Open `path`, by default as a place; `ELOOP` if any part of it is a symbolic link."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS)
    size = ctypes.c_size_t(ctypes.sizeof(how))
    name = ctypes.c_char_p(os.fsencode(path))
    return _call(_OPENAT2, ctypes.c_int(directory), name, ctypes.byref(how), size)


def rename_new(from_dir: int, from_name: bytes, to_dir: int, to_name: bytes) -> None:
    """Rename, or fail with `EEXIST` if anything has the new name."""
    _check(_libc.renameat2(from_dir, from_name, to_dir, to_name, _RENAME_NOREPLACE))


def exchange_entries(a_dir: int, a: bytes, b_dir: int, b: bytes) -> bool:
    """Swap two entries of directories in one step; False where the file system cannot."""
    try:
        _check(_libc.renameat2(a_dir, a, b_dir, b, _RENAME_EXCHANGE))
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
            return False
        raise
    return True


def exchange(a: str, b: str) -> bool:
    """Swap two directories of one parent in one step; False where the file system cannot."""
    try:
        return exchange_entries(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b))
    except OSError as error:
        raise OSError(error.errno, error.strerror, a) from None


def chmod_directory(parent: int, name: bytes, mode: int) -> None:
    """Set the mode of the directory `name`; a symlink of that name is an error, never followed."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        try:
            flags = ctypes.c_uint(_AT_SYMLINK_NOFOLLOW)
            _call(_FCHMODAT2, ctypes.c_int(parent), ctypes.c_char_p(name), ctypes.c_uint(mode), flags)
        except OSError as error:
            # Kernels before 6.6 lack the call, and a filter may answer EPERM for what it does not know.
            if error.errno not in {errno.ENOSYS, errno.EPERM}:
                raise
            os.chmod(f"/proc/self/fd/{handle}", mode)
    finally:
        os.close(handle)


# Writing to the disk


def sync(fd: int) -> None:
    """Write everything of the file system of an open file to the disk."""
    _check(_libc.syncfs(fd))


def dirty(fd: int) -> bool | None:
    """Whether parts of a file are in memory and not yet on their way to the disk; None where the kernel cannot say."""
    counts = (ctypes.c_uint64 * 5)()
    try:
        _call(_CACHESTAT, ctypes.c_int(fd), _WHOLE_FILE, counts, ctypes.c_uint(0))
    except OSError:
        return None
    return bool(counts[_DIRTY] or counts[_IN_WRITEBACK])


def start_writing(fd: int) -> None:
    """Begin to write a file's changed parts to the disk. `finish_writing` reports a failure."""
    _libc.sync_file_range(fd, 0, 0, _RANGE_WRITE)


def finish_writing(fd: int) -> None:
    """Wait until all changed parts of a file are on the disk; its times and its name are not included."""
    try:
        _check(_libc.sync_file_range(fd, 0, 0, _RANGE_WAIT_BEFORE | _RANGE_WRITE | _RANGE_WAIT_AFTER))
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOSYS, errno.ESPIPE}:
            raise


def clone(source: int, target: int) -> bool:
    """Let one file share the other's blocks; False where the file system cannot."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def clone_range(source: int, offset: int, length: int, target: int, at: int = 0) -> bool:
    """Let a part of a file share the blocks of a part of another; False where the file system cannot."""
    try:
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("qQQQ", source, offset, length, at))
    except OSError:
        return False
    return True


def ioctl(fd: int, request: int, argument: bytearray | None = None) -> int:
    """Call ioctl and let other threads run meanwhile: Python's own does not when the argument is large."""
    where = None if argument is None else ctypes.addressof(ctypes.c_char.from_buffer(argument))
    return _check(_libc.ioctl(fd, request, where))


# Watching directories, removing shared memory, processes


def inotify_init() -> int:
    """Return a new inotify descriptor that does not block."""
    return _check(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))


def inotify_add_watch(inotify: int, path: bytes, mask: int) -> int:
    """Watch a path; return the number of the watch."""
    return _check(_libc.inotify_add_watch(inotify, path, mask))


def inotify_rm_watch(inotify: int, watch: int) -> None:
    """Stop a watch, if it is still there."""
    _libc.inotify_rm_watch(inotify, watch)


def remove_ipc(kind: str, number: int) -> None:
    """Remove one System V object: `shm`, `msg` or `sem`."""
    if kind == "sem":
        _check(_libc.semctl(number, 0, _IPC_RMID))
    else:
        _check((_libc.shmctl if kind == "shm" else _libc.msgctl)(number, _IPC_RMID, None))


def io_priority(pid: int) -> int:
    """The priority of a process for input and output; -1 where the kernel does not tell."""
    try:
        return _call(_IOPRIO_GET, ctypes.c_int(_IOPRIO_WHO_PROCESS), ctypes.c_int(pid))
    except ProcessLookupError:
        raise
    except OSError:
        return -1


# Calls without a function of their own here, holding the interpreter lock


def call(function: str, *args: int | bytes | None, name: str = "") -> int:
    """Call a function of libc. Bytes are passed by their address. The `OSError` has the name in its text."""
    passed = [ctypes.c_long(each) if isinstance(each, int) else each for each in args]
    return _check(getattr(_held, function)(*passed), name or function)


def system_call(name: str, number: int, *args: int | bytes | None) -> int:
    """Make a system call that libc has no function for."""
    return call("syscall", number, *args, name=name)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    call("prctl", option, value, 0, 0, 0, name=f"prctl {option}")


def hide_from_children() -> int:
    """Keep child processes from tracing this one; return a descriptor that still sets its OOM score."""
    prctl(_PR_SET_DUMPABLE, 1)  # the owner of /proc/self follows it
    descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    prctl(_PR_SET_DUMPABLE, 0)
    return descriptor


def filter_system_calls(program: bytes) -> None:
    """Apply a filter program to this thread and all it will start, for good. Sets no_new_privs first."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("@HP", len(program) // _FILTER_INSTRUCTION, address_of(program))
    call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0, name="seccomp")


def capabilities(number: int, header: bytes) -> bytes:
    """Return the capabilities of this process, as `capset` takes them; `number` is that of `capget`."""
    found = ctypes.create_string_buffer(24)
    _check(_held.syscall(ctypes.c_long(number), header, found), "capget")
    return found.raw


def address_of(data: bytes) -> int:
    """Return where bytes are in memory; they are there for as long as the object exists."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def hide_arguments() -> None:
    """Overwrite the command line that `ps` shows for this process and its forks: it has paths of the host.

    Where it is in memory is found from the name of the program, which is one of its words: not every kernel tells.
    """
    with open("/proc/self/cmdline", "rb") as file:
        shown = file.read()
    address = ctypes.c_void_p.in_dll(_libc, "program_invocation_name").value or 0
    start = address - max(0, shown.find(ctypes.string_at(address) + b"\0"))
    if ctypes.string_at(start, len(shown)) != shown:
        raise OSError("the command line of this process cannot be found")
    ctypes.memmove(start, b"carrel"[: len(shown) - 1].ljust(len(shown), b"\0"), len(shown))
