"""Notifications of the kernel about names that appear in directories, names that go, and files that change."""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from typing import Literal

from carrel.primitives import libc

_EVENT = struct.Struct("=iIII")
_READ = 64 * 1024
_MODIFY, _ATTRIBUTES = 0x2, 0x4
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_OVERFLOW, _IGNORED = 0x4000, 0x8000
_ONLY_DIRECTORIES, _IS_DIRECTORY = 0x01000000, 0x40000000


EventKind = Literal["appeared", "gone", "changed", "lost", "ended"]


@dataclass(frozen=True, slots=True)
class NameEvent:
    """A name that appeared in a watched directory, or is gone from it; or a watched file that `changed`, which has no
    name here.

    `lost`: events were lost. `ended`: the directory or the file is gone, and its watch with it.
    """

    kind: EventKind
    watch: int
    name: bytes
    directory: bool
    move: int
    """The same number for both events of a rename; 0 for anything else."""


class Inotify:
    """One queue of the kernel. `fd` is readable when something has happened. Names that go are reported if `gone`."""

    def __init__(self, *, gone: bool = False) -> None:
        self.fd = libc.inotify_init()
        self._wanted = _CREATE | _MOVED_TO | _ONLY_DIRECTORIES | (_DELETE | _MOVED_FROM if gone else 0)

    def watch(self, directory: int) -> int:
        """Watch an open directory; return the number of the watch, which is the same if it was watched already.

        `ENOSPC` when this user has no watches left.
        """
        return libc.inotify_add_watch(self.fd, f"/proc/self/fd/{directory}".encode(), self._wanted)

    def watch_file(self, file: int) -> int:
        """Watch an open file for changes by whatever name it has; those through a mapping are not seen."""
        return libc.inotify_add_watch(self.fd, f"/proc/self/fd/{file}".encode(), _MODIFY | _ATTRIBUTES)

    def read(self) -> list[NameEvent]:
        """Return what has happened since the last call, at most some thousand names."""
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
            watch, mask, move, size = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + size].rstrip(b"\0")
            at += _EVENT.size + size
            kind: EventKind = "appeared" if mask & (_CREATE | _MOVED_TO) else "gone"
            if mask & (_OVERFLOW | _IGNORED):
                kind = "lost" if mask & _OVERFLOW else "ended"
            elif mask & (_MODIFY | _ATTRIBUTES):
                kind = "changed"
            elif not name:
                continue
            found.append(NameEvent(kind, watch, name, bool(mask & _IS_DIRECTORY), move))
        return found

    def close(self) -> None:
        """End all watches."""
        os.close(self.fd)
