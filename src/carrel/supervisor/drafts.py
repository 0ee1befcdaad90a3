"""Writing a file so that it appears whole or not at all. It knows open directories and names, no callers."""

from __future__ import annotations

import os

from carrel.primitives.libc import rename_new
from carrel.supervisor.paths import Place
from carrel.supervisor.trees import Entry

CHUNK = 256 * 1024


class Draft:
    """A new file beside its place, under a name nobody can guess, that takes the place or vanishes."""

    def __init__(self, place: Place, mode: int):
        self._place = place
        self._name = b".carrel-" + os.urandom(16).hex().encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._handle = os.open(self._name, flags, 0o600, dir_fd=place.directory)
        self._mode = mode

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes at the end."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._handle, view[:CHUNK]) :]

    def publish(self, *, exclusive: bool) -> Entry:
        """Give the file its mode and its place."""
        os.fchmod(self._handle, self._mode)
        place = self._place
        if exclusive:
            rename_new(place.directory, self._name, place.directory, place.name)
        else:
            os.rename(self._name, place.name, src_dir_fd=place.directory, dst_dir_fd=place.directory)
        self._name = b""
        return Entry(place.path, os.fstat(self._handle), None)

    def discard(self) -> None:
        """Close; what was not published is removed."""
        os.close(self._handle)
        if self._name:
            try:
                os.unlink(self._name, dir_fd=self._place.directory)
            except FileNotFoundError:
                pass
