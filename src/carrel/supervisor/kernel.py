"""The few system calls that Python's `os` lacks: resolving beneath a directory, renaming without replacing,
changing a mode without following a link, the priority of input and output. Descriptors and names in, `OSError` out; it
knows no workspace.
"""

from __future__ import annotations

import ctypes
import errno
import os

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_BENEATH = 0x08

_OPENAT2 = 437
_FCHMODAT2 = 452
_RENAMEAT2 = {"x86_64": 316, "aarch64": 276}.get(os.uname().machine)
_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}.get(os.uname().machine)
_RENAME_NOREPLACE = 1
_IOPRIO_WHO_PROCESS = 1
_AT_SYMLINK_NOFOLLOW = 0x100
_ATTEMPTS = 500


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


def _call(number: int | None, *args: object) -> int:
    if number is None:
        raise OSError(errno.ENOSYS, f"the system call is not known on {os.uname().machine}")
    result = int(_syscall(ctypes.c_long(number), *args))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def open_beneath(directory: int, path: bytes, flags: int) -> int:
    """Open what is at `path` beneath `directory`, whatever `..`, symlinks and renames try; never creates.

    `EXDEV` says that the path leads outside. The kernel answers `EAGAIN` when it cannot tell because of a
    rename at that very moment; that is tried again a bounded number of times.
    """
    how = _OpenHow(flags | os.O_CLOEXEC, 0, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)
    size = ctypes.c_size_t(ctypes.sizeof(how))
    name = ctypes.c_char_p(path)
    for attempt in range(_ATTEMPTS):
        try:
            return _call(_OPENAT2, ctypes.c_int(directory), name, ctypes.byref(how), size)
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EINTR} or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def rename_new(from_dir: int, from_name: bytes, to_dir: int, to_name: bytes) -> None:
    """Rename, or fail with `EEXIST` if anything has the new name."""
    _call(
        _RENAMEAT2,
        ctypes.c_int(from_dir),
        ctypes.c_char_p(from_name),
        ctypes.c_int(to_dir),
        ctypes.c_char_p(to_name),
        ctypes.c_uint(_RENAME_NOREPLACE),
    )


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


def io_priority(pid: int) -> int:
    """The priority of a process for input and output; -1 where the kernel does not tell."""
    try:
        return _call(_IOPRIO_GET, ctypes.c_int(_IOPRIO_WHO_PROCESS), ctypes.c_int(pid))
    except ProcessLookupError:
        raise
    except OSError:
        return -1
