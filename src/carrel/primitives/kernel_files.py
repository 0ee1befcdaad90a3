"""Reading and writing the small files of the kernel, as in `/proc` and cgroups: one call each, without buffers."""

from __future__ import annotations

import os

_PAGE = os.sysconf("SC_PAGE_SIZE")


def read(path: str, size: int = 4096, *, dir_fd: int | None = None) -> bytes:
    """Return at most `size` bytes of a file. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def read_if_there(path: str, size: int = 4096) -> bytes:
    """Return at most `size` bytes of a file, or nothing where it cannot be read: a process may end at any time."""
    try:
        return read(path, size)
    except OSError:
        return b""


def stat_fields(process: str) -> list[bytes]:
    """Return the fields of `stat` of a process (`/proc/PID`) after its name; none when the process is gone."""
    return read_if_there(f"{process}/stat").rpartition(b")")[2].split()


def private_bytes(process: str) -> int:
    """Return the memory of a process or thread (`/proc/PID`) that it does not share with others."""
    fields = read_if_there(f"{process}/statm").split()
    return max(0, int(fields[1]) - int(fields[2])) * _PAGE if len(fields) > 2 else 0


def write(path: str, text: str, *, dir_fd: int | None = None) -> None:
    """Write a whole text in one call. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
