"""Notifications of the kernel about names that appear in directories."""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass

from carrel.primitives import libc

_EVENT = struct.Struct("=iIII")
_READ = 64 * 1024
_CREATE, _MOVED_TO, _OVERFLOW = 0x100, 0x80, 0x4000
_ONLY_DIRECTORIES = 0x01000000


@dataclass(frozen=True, slots=True)
class Appeared:
    """A name that appeared in a watched directory. Without a name: events were lost."""

    watch: int
    name: bytes


class Inotify:
    """One queue of the kernel. `fd` is readable when something has appeared."""

    def __init__(self) -> None:
        self.fd = libc.inotify_init()

    def watch(self, directory: int) -> int:
        """Watch an open directory; return the number of the watch, which is the same if it was watched already.

        `ENOSPC` when this user has no watches left.
        """
        place = f"/proc/self/fd/{directory}".encode()
        return libc.inotify_add_watch(self.fd, place, _CREATE | _MOVED_TO | _ONLY_DIRECTORIES)

    def read(self) -> list[Appeared]:
        """Return what has appeared since the last call, at most some thousand names."""
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return []
        except OSError as error:
            if error.errno == errno.EBADF:
                return []
            raise
        found, at = [], 0
        while at < len(data):
            watch, mask, _cookie, size = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + size].rstrip(b"\0")
            at += _EVENT.size + size
            if mask & _OVERFLOW or name:
                found.append(Appeared(watch, b"" if mask & _OVERFLOW else name))
        return found

    def close(self) -> None:
        """End all watches."""
        os.close(self.fd)
