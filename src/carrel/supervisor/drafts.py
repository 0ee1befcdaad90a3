"""Writing a file so that it appears whole or not at all, and so that a kill leaves nothing half-written behind.

A draft has no name (`O_TMPFILE`) until it is published, so a kill leaves nothing of it. Two cases need a name all the
same: replacing a file, because the kernel cannot link over an existing name, and file systems without nameless files.
That name is always `RESERVED`, at the top of what can be written. So a kill leaves at most one entry, in a known place,
and the next sandbox removes it when it starts (see `leftovers`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress

from carrel.primitives.leftovers import RESERVED
from carrel.primitives.libc import open_beneath, rename_new
from carrel.supervisor.paths import DirectoryEntry, Root
from carrel.supervisor.trees import TreeEntry

CHUNK = 256 * 1024
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_NAMELESS_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL}


class FileDraft:
    """A new file that takes its place or vanishes."""

    def __init__(self, root: Root, place: DirectoryEntry, mode: int):
        self._root = root
        self._place = place
        self._mode = mode
        self._name = b""  # only of a draft that has one, in `_folder`
        self._folder = -1
        try:
            self._handle = os.open(b".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=place.directory)
        except OSError as error:
            if error.errno not in _NO_NAMELESS_FILES:
                raise
            self._open_named()

    def write(self, data: bytes | memoryview) -> None:
        """Add bytes at the end."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._handle, view[:CHUNK]) :]

    def publish(self, *, exclusive: bool) -> TreeEntry:
        """Give the file its mode and its place; `FileExistsError` when it is `exclusive` and the name is taken."""
        os.fchmod(self._handle, self._mode)
        if self._name:
            self._move_named(exclusive=exclusive)
        else:
            try:
                self._link(self._place.directory, self._place.name)
            except FileExistsError:
                if exclusive:
                    raise
                self._replace()
        return TreeEntry(self._place.path, os.fstat(self._handle), None)

    def discard(self) -> None:
        """Close the file; it is removed unless it was published."""
        os.close(self._handle)
        if self._folder >= 0:
            if self._name:
                with suppress(OSError):
                    os.unlink(self._name, dir_fd=self._folder)
            with suppress(OSError):  # other drafts may be in it
                os.rmdir(RESERVED, dir_fd=self._root.fd)
            os.close(self._folder)

    def _link(self, directory: int, name: bytes) -> None:
        os.link(f"/proc/self/fd/{self._handle}", name, dst_dir_fd=directory, follow_symlinks=True)

    def _replace(self) -> None:
        """Take the place of an existing file. Nothing waits between the two steps, so one reserved name is enough."""
        place = self._place
        refused: OSError | None = None
        for directory, name in self._stages():
            try:
                try:
                    self._link(directory, name)
                except FileExistsError:
                    os.unlink(name, dir_fd=directory)
                    self._link(directory, name)
            except OSError as error:  # read-only, on another mount, or a directory that an agent made
                refused = error
                continue
            try:
                os.rename(name, place.name, src_dir_fd=directory, dst_dir_fd=place.directory)
            except OSError:
                os.unlink(name, dir_fd=directory)
                raise
            return
        assert refused is not None
        raise refused

    def _stages(self) -> Iterator[tuple[int, bytes]]:
        """Yield directories and names for the second name, best first: from the top of the workspace downwards.

        If masks leave only some directories writable, the first that works is one of those, and the next sandbox
        removes a leftover there too. The last name is random, so that no agent can block all of them.
        """
        yield self._root.fd, RESERVED
        parts = self._place.path.split(b"/")[:-1]
        for depth in range(1, len(parts)):
            with suppress(OSError):
                directory = open_beneath(self._root.fd, b"/".join(parts[:depth]), os.O_PATH | os.O_DIRECTORY)
                try:
                    yield directory, RESERVED
                finally:
                    os.close(directory)
        yield self._place.directory, RESERVED
        yield self._place.directory, _unguessable()

    # on a file system without nameless files

    def _open_named(self) -> None:
        try:
            with suppress(FileExistsError):
                os.mkdir(RESERVED, 0o700, dir_fd=self._root.fd)
            folder = os.open(RESERVED, _FOLDER, dir_fd=self._root.fd)
        except OSError:  # the top cannot be written: a kill may leave this draft beside its place
            folder = os.dup(self._place.directory)
        try:
            self._handle = self._name_in(folder)
        except OSError:
            os.close(folder)
            raise
        self._folder = folder

    def _name_in(self, folder: int) -> int:
        name = _unguessable()
        handle = os.open(name, _NEW, 0o600, dir_fd=folder)
        self._name = name
        return handle

    def _move_named(self, *, exclusive: bool) -> None:
        try:
            self._move(exclusive=exclusive)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            # The place is on another mount, or Landlock is of version 1, where no file may change its directory.
            os.unlink(self._name, dir_fd=self._folder)
            os.close(self._folder)
            self._folder, old = os.dup(self._place.directory), self._handle
            self._handle = self._name_in(self._folder)
            try:
                offset = 0
                while sent := os.sendfile(self._handle, old, offset, CHUNK):
                    offset += sent
            finally:
                os.close(old)
            os.fchmod(self._handle, self._mode)
            self._move(exclusive=exclusive)

    def _move(self, *, exclusive: bool) -> None:
        place = self._place
        if exclusive:
            rename_new(self._folder, self._name, place.directory, place.name)
        else:
            os.rename(self._name, place.name, src_dir_fd=self._folder, dst_dir_fd=place.directory)
        self._name = b""


def _unguessable() -> bytes:
    return RESERVED + b"-" + os.urandom(16).hex().encode()
