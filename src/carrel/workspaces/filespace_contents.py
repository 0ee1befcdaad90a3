"""The contents of one filespace, in the archive's storage: each under the hash of its bytes, and verified when read.

A content is stored before an entry names it, and stays for a while after no entry names it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from blake3 import blake3

from carrel.errors import NotFound, PlatformError, SnapshotDamaged
from carrel.primitives.atomic import write_all
from carrel.workspaces.remote import Remote
from carrel.workspaces.synced_tree import PIECE, pieces

GRACE_S = 24 * 3600.0
"""How long a content stays without an entry: longer than any writer takes between storing it and naming it."""
_SMALL = 1 << 20
_TOP = "filespace"


@dataclass(slots=True)
class HashedContent:
    """Bytes that were read and hashed: in memory if small, else in a temporary file. `drop` it when done."""

    hash: str
    size: int
    data: bytes = b""
    path: str | None = None

    def drop(self) -> None:
        """Remove the temporary file."""
        if self.path is not None:
            with suppress(OSError):
                os.unlink(self.path)


class Drafting:
    """Collects bytes into a draft; `drop` it when it is not finished."""

    def __init__(self, spool: str):
        self._spool = spool
        self._hasher = blake3()
        self._size = 0
        self._kept: list[bytes] = []
        self._path: str | None = None
        self._fd = -1

    def add(self, data: bytes) -> None:
        """Add the next bytes."""
        self._hasher.update(data)
        self._size += len(data)
        try:
            if self._path is None and self._size > _SMALL:
                self._path = os.path.join(self._spool, secrets.token_hex(16))
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                for piece in self._kept:
                    write_all(self._fd, piece)
                self._kept.clear()
            if self._path is None:
                self._kept.append(data)
            else:
                write_all(self._fd, data)
        except OSError as error:
            raise PlatformError(
                f"a file for the filespace cannot be written to the disk: {error.strerror}", field="data_dir"
            ) from None

    @property
    def size(self) -> int:
        """The number of bytes so far."""
        return self._size

    def finish(self) -> HashedContent:
        """Return the draft of all bytes."""
        self._close()
        path, self._path = self._path, None
        return HashedContent(self._hasher.hexdigest(), self._size, b"".join(self._kept), path)

    def drop(self) -> None:
        """Remove an unfinished draft."""
        self._close()
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Contents:
    """The contents of the filespace of one volume. `spool` is a directory for temporary files."""

    def __init__(self, remote: Remote, volume: str, spool: str):
        self._remote = remote
        self._prefix = f"{_TOP}/{volume}"
        self._spool = spool

    def drafting(self) -> Drafting:
        """Return a new draft to fill in pieces."""
        return Drafting(self._spool)

    def draft(self, fd: int, size: int) -> HashedContent:
        """Make a draft of an open file, of at most `size` bytes."""
        drafting = self.drafting()
        try:
            for piece in pieces(fd, size):
                drafting.add(piece)
            return drafting.finish()
        finally:
            drafting.drop()

    def keep(self, draft: HashedContent) -> None:
        """Store a draft. A content that is stored already is stored again, which makes it recent."""
        name = f"{self._prefix}/{draft.hash}"
        if draft.path is None:
            self._remote.put(name, draft.data)
        else:
            self._remote.put_file(name, draft.path)

    def recent(self) -> set[str]:
        """Return the hashes of contents that are recent enough to be named without storing them again."""
        oldest = time.time() - GRACE_S / 2
        return {_hash(entry.name) for entry in self._remote.entries(self._prefix) if entry.modified > oldest}

    def read(self, key: str, size: int) -> Iterator[bytes]:
        """Yield the bytes of a content in pieces; `SnapshotDamaged` at the end when they are not the right ones."""
        name = f"{self._prefix}/{key}"
        hasher = blake3()
        count = 0
        try:
            if size <= PIECE:
                data = self._remote.get(name)
                count = len(data)
                hasher.update(data)
                if count == size:
                    yield data
            else:
                while count < size and (data := self._remote.get_range(name, count, min(PIECE, size - count))):
                    hasher.update(data)
                    count += len(data)
                    yield data
        except NotFound:
            raise _damaged(key, "is missing") from None
        if count != size or hasher.hexdigest() != key:
            raise _damaged(key, "was changed")

    def collect(self, named: Callable[[], set[str]]) -> int:
        """Delete old contents that no entry names, and return how many. Calls `named` after listing the contents."""
        oldest = time.time() - GRACE_S
        old = [entry.name for entry in self._remote.entries(self._prefix) if entry.modified < oldest]
        if not old:
            return 0
        kept = named()
        unnamed = [name for name in old if _hash(name) not in kept]
        self._remote.delete(unnamed)
        return len(unnamed)

    def forget(self) -> None:
        """Delete everything."""
        self._remote.delete(list(self._remote.list(self._prefix)))


def _hash(name: str) -> str:
    return name.rpartition("/")[2]


def _damaged(key: str, what: str) -> SnapshotDamaged:
    return SnapshotDamaged(
        f"content {key} of the filespace {what}",
        hint="write the file again, or delete it from the filespace",
        objects=[key],
    )
