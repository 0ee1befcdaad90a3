"""The package cache on disk: files by content, pages by origin. The least recently used are dropped first.

A file is written as a draft and renamed to a name with its SHA-256 once it is complete; each process verifies it once
before it is used. A kill at any time leaves only drafts, which the next start removes. Two processes may share a
directory. Blocking and thread-safe; knows nothing of the network.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

MOST_ENTRIES = 100_000
"""The limit on files and pages, however small they are."""
_CHUNK = 1 << 20
_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{64}")
_KEY = re.compile(r"[0-9a-f]{64}")
_TOUCH_S = 60.0


def key(*parts: str | None) -> str:
    """Return the key for these parts."""
    return hashlib.sha256("\0".join("" if part is None else f"={part}" for part in parts).encode()).hexdigest()


@dataclass(slots=True)
class OpenFile:
    """An open file of the cache: it can be read to its end even if the cache drops it. The caller closes it."""

    descriptor: int
    size: int
    digest: str


class CacheDraft:
    """A file that is being written. Call `finish` or `drop`."""

    def __init__(self, directory: str):
        while True:
            self.path = os.path.join(directory, secrets.token_hex(16))
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self.descriptor = os.open(self.path, flags, 0o600)
            # Held while the draft is written: a draft without a lock was left by a killed process.
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
            if os.fstat(self.descriptor).st_nlink:
                break
            os.close(self.descriptor)  # another process removed it just before it was locked
        self.size = 0
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """The SHA-256 of the bytes so far."""
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._hash.update(data)
        view = memoryview(data)
        while view:
            written = os.pwrite(self.descriptor, view, self.size)
            self.size += written
            view = view[written:]

    def drop(self) -> None:
        """Remove the draft. The descriptor stays open; its reader closes it."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)


class PackageCache:
    """The cache in one directory, with at most `most_bytes` without drafts."""

    def __init__(self, directory: str, most_bytes: int):
        self.most_bytes = most_bytes
        self._files, self._pages, self._drafts = (
            os.path.join(directory, name) for name in ("files", "pages", "drafts")
        )
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, int] = OrderedDict()  # size by path, the least recently used first
        self._names: dict[str, str] = {}  # path by key, of files
        self._verified: set[str] = set()  # paths of files whose content this process has verified
        self._touched: dict[str, float] = {}
        self._total = 0
        for path in (self._files, self._pages, self._drafts):
            os.makedirs(path, 0o700, exist_ok=True)
        self._remove_drafts()
        self._load()

    @property
    def total(self) -> int:
        """The size of all files and pages."""
        return self._total

    # --- files

    def draft(self) -> CacheDraft:
        """Create a draft."""
        return CacheDraft(self._drafts)

    def finish(self, draft: CacheDraft, name: str) -> None:
        """Store a draft, which the caller has verified, under a key. Its descriptor stays open."""
        path = os.path.join(self._files, f"{_checked(name)}-{draft.digest}")
        with self._lock:
            self._make_room(draft.size)
            os.rename(draft.path, path)
            former = self._names.get(name)
            if former is not None and former != path:
                self._remove(former)
            self._verified.add(path)
            self._add(path, draft.size)
        fcntl.flock(draft.descriptor, fcntl.LOCK_UN)

    def file(self, name: str) -> OpenFile | None:
        """Return the file of a key. A file whose content does not match its name is removed."""
        with self._lock:
            path = self._names.get(_checked(name))
        if path is None:
            return None
        digest = path[-64:]
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            self._forget(path)
            return None
        if path not in self._verified and _digest(descriptor) != digest:
            os.close(descriptor)
            self._forget(path)
            return None
        self._verified.add(path)
        self._used(path)
        return OpenFile(descriptor, os.fstat(descriptor).st_size, digest)

    # --- pages

    def page(self, name: str) -> tuple[bytes, float] | None:
        """Return the page of a key, and when its index was last asked for it."""
        path = os.path.join(self._pages, _checked(name))
        with self._lock:
            if path not in self._entries:
                return None
            self._entries.move_to_end(path)
        try:
            with open(path, "rb") as file:
                return file.read(), os.fstat(file.fileno()).st_mtime
        except OSError:
            self._forget(path)
            return None

    def put_page(self, name: str, data: bytes, now: float) -> None:
        """Store a page."""
        path = os.path.join(self._pages, _checked(name))
        draft = self.draft()
        try:
            draft.write(data)
            os.utime(draft.descriptor, (now, now))
            with self._lock:
                self._make_room(draft.size)
                os.rename(draft.path, path)
                self._add(path, draft.size)
        except BaseException:
            draft.drop()
            raise
        finally:
            os.close(draft.descriptor)

    def confirm_page(self, name: str, now: float) -> None:
        """Record that the index confirmed the page."""
        with suppress(OSError):
            os.utime(os.path.join(self._pages, _checked(name)), (now, now))

    def drop_page(self, name: str) -> None:
        """Remove a page."""
        self._forget(os.path.join(self._pages, _checked(name)))

    # --- maintenance

    def _remove_drafts(self) -> None:
        for name in os.listdir(self._drafts):
            path = os.path.join(self._drafts, name)
            with suppress(OSError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                finally:
                    os.close(descriptor)

    def _load(self) -> None:
        found = []
        for directory, shape in ((self._files, _NAME), (self._pages, _KEY)):
            with os.scandir(directory) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        if shape.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                            status = entry.stat(follow_symlinks=False)
                            found.append((status.st_mtime, entry.path, status.st_size))
        with self._lock:
            for _used, path, size in sorted(found):
                self._add(path, size)
            self._make_room(0)

    def _add(self, path: str, size: int) -> None:
        self._total += size - self._entries.pop(path, 0)
        self._entries[path] = size
        if path.startswith(self._files):
            self._names[os.path.basename(path)[:64]] = path

    def _make_room(self, size: int) -> None:
        while self._entries and (self._total + size > self.most_bytes or len(self._entries) >= MOST_ENTRIES):
            self._remove(next(iter(self._entries)))

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(path)
        self._total -= self._entries.pop(path, 0)
        self._verified.discard(path)
        self._touched.pop(path, None)
        name = os.path.basename(path)[:64]
        if self._names.get(name) == path:
            del self._names[name]

    def _forget(self, path: str) -> None:
        with self._lock:
            self._remove(path)

    def _used(self, path: str) -> None:
        """Mark a file as used; from time to time on disk too, for the next process."""
        now = time.monotonic()
        with self._lock:
            if path in self._entries:
                self._entries.move_to_end(path)
            due = now - self._touched.get(path, -_TOUCH_S) >= _TOUCH_S
            if due:
                self._touched[path] = now
        if due:
            with suppress(OSError):
                os.utime(path)


def _checked(name: str) -> str:
    assert _KEY.fullmatch(name), name
    return name


def _digest(descriptor: int) -> str:
    found, at = hashlib.sha256(), 0
    while data := os.pread(descriptor, _CHUNK, at):
        found.update(data)
        at += len(data)
    return found.hexdigest()
