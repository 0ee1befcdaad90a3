"""Downloads of package files into the cache: each file is fetched once for everybody who waits for it.

A file is passed on while it arrives, except for its last part, which waits until the whole is verified. The limit on
downloads is shared fairly between sandboxes. Also measures wheels; nothing inside a file is trusted.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from carrel.egress.index.cache import CacheDraft, OpenFile, PackageCache
from carrel.egress.index.client import FairLimit, IndexClient, SharedPermit, Unreachable
from carrel.egress.plan import PackageIndex
from carrel.primitives.tasks import cancel
from carrel.threads import run_to_end

MOST_DIRECTORY = 32 << 20
"""A zip directory over this size is not read: each entry costs many times its length in memory."""

MOST_METADATA = 16 << 20

_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")
_BAD = (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error, OSError)
_END, _END64, _LOCATOR64 = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_END_SIZE, _END64_SIZE, _LOCATOR64_SIZE = 22, 56, 20
_SEE_LONGER_RECORD = 0xFFFFFFFF
_MOST_TAIL = 65_535 + _END_SIZE + _LOCATOR64_SIZE + _END64_SIZE


def unpacked_size(descriptor: int) -> int | None:
    """Return the size of a zip file's content, or of the file itself if that is larger or not a zip file; None when the
    zip directory is too long.
    """
    size = os.fstat(descriptor).st_size
    if _directory_size(descriptor, size) > MOST_DIRECTORY:
        return None
    try:
        with open(f"/proc/self/fd/{descriptor}", "rb") as file, zipfile.ZipFile(file) as archive:
            return max(size, sum(entry.file_size for entry in archive.infolist()))
    except _BAD:
        return size


def wheel_metadata(descriptor: int) -> bytes | None:
    """Return the metadata in a wheel, or None."""
    if _directory_size(descriptor, os.fstat(descriptor).st_size) > MOST_DIRECTORY:
        return None
    try:
        with open(f"/proc/self/fd/{descriptor}", "rb") as file, zipfile.ZipFile(file) as archive:
            found = [each for each in archive.infolist() if _METADATA.fullmatch(each.filename)]
            return archive.read(found[0]) if len(found) == 1 and found[0].file_size <= MOST_METADATA else None
    except (*_BAD, RuntimeError, zlib.error):
        return None


def _directory_size(descriptor: int, size: int) -> int:
    """Return the size of the longest directory that a reader could find, by any of the records at the end."""
    tail = os.pread(descriptor, _MOST_TAIL, max(0, size - _MOST_TAIL))
    longest = 0
    for at in _places(tail, _END):
        listed = _number("<L", tail[at : at + _END_SIZE], 12)
        longest = max(longest, 0 if listed == _SEE_LONGER_RECORD else listed)
    for at in _places(tail, _LOCATOR64):
        where = _number("<Q", tail[at : at + _LOCATOR64_SIZE], 8)
        record = os.pread(descriptor, _END64_SIZE, where) if where < size else b""
        longest = max(longest, _number("<Q", record, 40))
    for at in _places(tail, _END64):
        longest = max(longest, _number("<Q", tail[at : at + _END64_SIZE], 40))
    return longest


def _places(tail: bytes, signature: bytes) -> Iterator[int]:
    at = tail.find(signature)
    while at >= 0:
        yield at
        at = tail.find(signature, at + 1)


def _number(form: str, record: bytes, at: int) -> int:
    return int(struct.unpack_from(form, record, at)[0]) if len(record) >= at + struct.calcsize(form) else 0


log = logging.getLogger(__name__)

TAIL = 64 << 10
"""The part held back until a file is verified. The directory of a wheel is in it."""
MOST_AT_ONCE = 32
"""How many files are fetched at the same time, from all indexes and for everybody."""
LINGER_S = 10.0
"""How long a download continues when nobody waits for it any more."""
_CHUNK = 256 << 10
_HEADERS = {"accept-encoding": "identity", "accept": "*/*"}


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file, with what the index says about it."""

    index: PackageIndex
    url: str
    digest: tuple[str, str] | None
    sealed: bool
    size: int | None = None
    most: int | None = None
    """The size limit; None: the size of the cache."""
    at_hand: Callable[[], bytes | None] | None = None
    """Returns the content without asking the index, or None; may block. The hash is checked all the same."""


class Wrong(Exception):
    """A file is not what its index says, or too long for the cache."""


class Missing(Exception):
    """The index lists a file that it does not have."""


class FileDownload:
    """The download of one file, for everybody who waits for it. Each `join` needs one `leave`."""

    def __init__(self, cache: PackageCache, fetch: IndexClient, name: str, wanted: IndexedFile, permit: SharedPermit):
        self._cache, self._fetch, self._name, self._wanted, self._permit = cache, fetch, name, wanted, permit
        self._changed = asyncio.Event()
        self._descriptor = -1
        self._failure: Exception | None = None
        self._waiting = 0
        self.written = 0
        self.total: int | None = None
        """The complete size, once it is known."""
        self.digest: str | None = None
        """The SHA-256, once the file is complete and verified."""
        self.task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        """Whether the file is complete and verified."""
        return self.digest is not None

    @property
    def known_size(self) -> int:
        """The size as far as it is known."""
        return max(self.written, self.total or 0)

    # --- waiting

    def join(self, who: Hashable) -> None:
        """Add somebody who waits."""
        self._waiting += 1
        self._permit.join(who)

    def leave(self, *, for_good: bool = False) -> None:
        """Remove somebody who waits. Without anybody, the download is cancelled: after a while, because a client that
        lost patience may come back, or at once if it left `for_good` or nothing has arrived.
        """
        self._waiting -= 1
        if not self._waiting:
            if self.task is None or self.task.done():
                self._close()
            elif for_good or self._descriptor < 0:
                self._abandon()
            else:
                self.task.get_loop().call_later(LINGER_S, self._abandon)

    def _abandon(self) -> None:
        if not self._waiting and self.task is not None:
            self.task.cancel()

    async def until(self, enough: Callable[[], bool]) -> None:
        """Wait until `enough` returns True. Raises the error of the download."""
        while not enough():
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()

    def open(self) -> int:
        """Return a descriptor of the bytes so far. The caller, who has joined, closes it."""
        return os.dup(self._descriptor)

    # --- the download

    async def run(self) -> None:
        """Get the file from the cache or the index."""
        try:
            kept = await run_to_end(lambda: self._cache.file(self._name), _close_file)
            if kept is not None:
                self._descriptor, self.written, self.total, self.digest = (
                    kept.descriptor,
                    kept.size,
                    kept.size,
                    kept.digest,
                )
            else:
                async with self._permit:
                    await self._get()
        except (Unreachable, Wrong, Missing) as error:
            self._failure = error
        except OSError as error:
            log.warning("the package cache cannot be written: %s", error.strerror)
            self._failure = Unreachable("carrel could not keep the file")
        except Exception:
            log.exception("a package could not be fetched")
            self._failure = Unreachable("carrel could not fetch the file")

    def ended(self) -> None:
        """Finish after the task has ended, even if it never began."""
        if not self.done and self._failure is None:
            self._failure = Unreachable("nobody waited for it any more")
        self._notify()
        if not self._waiting:
            self._close()

    async def _get(self) -> None:
        draft = await run_to_end(self._cache.draft, _close_draft)
        self._descriptor = draft.descriptor
        try:
            checked = hashlib.new(self._wanted.digest[0], usedforsecurity=False) if self._wanted.digest else None
            if await self._at_hand(draft):
                return
            async with self._fetch.get(
                self._wanted.index, self._wanted.url, _HEADERS, sealed=self._wanted.sealed
            ) as response:
                if response.status_code in {404, 410}:
                    raise Missing
                if response.status_code != 200:
                    raise Unreachable(f"it answered {response.status_code}")
                length = response.headers.get("content-length", "")
                self.total = int(length) if length.isdecimal() and len(length) < 19 else self._wanted.size
                self._check_size()
                self._notify()
                async for chunk in response.aiter_raw():
                    await run_to_end(partial(_write, draft, checked, chunk))
                    self.written = draft.size
                    self._check_size()
                    self._notify()
            if checked is not None and self._wanted.digest and checked.hexdigest() != self._wanted.digest[1]:
                raise Wrong("the file is not the one that its index lists: its hash is another")
            if self._wanted.size not in {None, draft.size}:
                raise Wrong("the file is shorter than its index says")
            await self._finish(draft)
        except BaseException:
            draft.drop()
            raise

    async def _at_hand(self, draft: CacheDraft) -> bool:
        if self._wanted.at_hand is None:
            return False
        data = await asyncio.to_thread(self._wanted.at_hand)
        expected = self._wanted.digest
        if data is None or (expected and hashlib.new(expected[0], data).hexdigest() != expected[1]):
            return False
        await run_to_end(partial(draft.write, data))
        await self._finish(draft)
        return True

    async def _finish(self, draft: CacheDraft) -> None:
        await run_to_end(partial(self._cache.finish, draft, self._name))
        self.written = self.total = draft.size
        self.digest = draft.digest

    def _check_size(self) -> None:
        most = self._cache.most_bytes if self._wanted.most is None else self._wanted.most
        if self.known_size > most:
            raise Wrong(f"the file has more than the {most} bytes that can be kept of it")
        if self._wanted.size is not None and self.written > self._wanted.size:
            raise Wrong("the file is longer than its index says")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _write(draft: CacheDraft, checked: hashlib._Hash | None, chunk: bytes) -> None:
    draft.write(chunk)
    if checked is not None:
        checked.update(chunk)


def _close_file(kept: OpenFile | None) -> None:
    if kept is not None:
        os.close(kept.descriptor)


def _close_draft(draft: CacheDraft) -> None:
    draft.drop()
    os.close(draft.descriptor)


_Flight = tuple[str, str, bool, str | None]


class Downloads:
    """All running downloads."""

    def __init__(self, cache: PackageCache, fetch: IndexClient):
        self._cache, self._fetch = cache, fetch
        # By index too: only those who chose a slow or wrong index wait for it.
        self._running: dict[_Flight, FileDownload] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit = FairLimit(MOST_AT_ONCE)

    def join(self, name: str, wanted: IndexedFile, who: Hashable = None) -> FileDownload:
        """Return the download of a file, which is started if it is not running; it begins when somebody who waits for
        it gets a permit. The caller calls `leave`.
        """
        flight = (name, wanted.index.url, wanted.index.trusted, wanted.index.cert)
        found = self._running.get(flight)
        if found is None or found.task is None or found.task.done() or found.task.cancelling():
            found = self._running[flight] = FileDownload(self._cache, self._fetch, name, wanted, self._limit.permit())
            task = found.task = asyncio.get_running_loop().create_task(found.run())
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, flight, found))
        found.join(who)
        return found

    def _ended(self, flight: _Flight, download: FileDownload, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._running.get(flight) is download:
            del self._running[flight]
        download.ended()

    async def aclose(self) -> None:
        """Cancel all downloads."""
        await cancel(list(self._tasks))


class DownloadBody:
    """The bytes of a download as they arrive. `close` leaves the download; the end does so too."""

    def __init__(
        self, download: FileDownload, size: int, settle: Callable[[], Awaitable[None]], alive: Callable[[], None]
    ):
        """`settle` is awaited before the last part and may raise; `alive` is called after each part."""
        self._download, self._size, self._settle, self._alive = download, size, settle, alive
        self._descriptor = download.open()
        self._at = 0
        self._settled = False

    def __aiter__(self) -> DownloadBody:
        return self

    async def __anext__(self) -> bytes:
        try:
            await self._download.until(self._enough)
            if self._download.done and not self._settled:
                await self._settle()
                self._settled = True
            ready = self._size if self._settled else min(self._download.written, self._size - 1) - TAIL
            data = await run_to_end(partial(os.pread, self._descriptor, min(_CHUNK, ready - self._at), self._at))
        except BaseException:
            self.close()
            raise
        if not data:
            self.close()
            raise StopAsyncIteration
        self._at += len(data)
        self._alive()
        return data

    async def aclose(self) -> None:
        """Call `close`."""
        self.close()

    def close(self) -> None:
        """Close the file and leave the download."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._download.leave()

    def __del__(self) -> None:
        if self._descriptor >= 0 and self._download.task is not None:  # it was never closed; this may be any thread
            os.close(self._descriptor)
            with suppress(RuntimeError):
                self._download.task.get_loop().call_soon_threadsafe(self._download.leave)

    def _enough(self) -> bool:
        return self._download.done or min(self._download.written, self._size - 1) - TAIL > self._at
