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

from carrel.egress.index.cache import Draft, Kept, PackageCache
from carrel.egress.index.client import FairLimit, IndexClient, Permit, Unreachable
from carrel.egress.plan import Index
from carrel.threads import run_to_end

MOST_DIRECTORY = 32 << 20
"""A longer directory is not read: each entry of it costs many times its length in memory."""

MOST_METADATA = 16 << 20

_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")
_BAD = (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error, OSError)
_END, _END64, _LOCATOR64 = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_END_SIZE, _END64_SIZE, _LOCATOR64_SIZE = 22, 56, 20
_SEE_LONGER_RECORD = 0xFFFFFFFF
_MOST_TAIL = 65_535 + _END_SIZE + _LOCATOR64_SIZE + _END64_SIZE


def unpacked_size(descriptor: int) -> int | None:
    """The sum of what a zip file holds; its own size when that is more or when it is no zip file; None when its
    directory is too long to be read.
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
    """The metadata in a wheel; None when it cannot be had."""
    if _directory_size(descriptor, os.fstat(descriptor).st_size) > MOST_DIRECTORY:
        return None
    try:
        with open(f"/proc/self/fd/{descriptor}", "rb") as file, zipfile.ZipFile(file) as archive:
            found = [each for each in archive.infolist() if _METADATA.fullmatch(each.filename)]
            return archive.read(found[0]) if len(found) == 1 and found[0].file_size <= MOST_METADATA else None
    except (*_BAD, RuntimeError, zlib.error):
        return None


def _directory_size(descriptor: int, size: int) -> int:
    """The longest directory that a reader could be made to read, whichever of the records at the end it goes by."""
    tail = os.pread(descriptor, _MOST_TAIL, max(0, size - _MOST_TAIL))
    longest = 0
    for at in _places(tail, _END):
        told = _number("<L", tail[at : at + _END_SIZE], 12)
        longest = max(longest, 0 if told == _SEE_LONGER_RECORD else told)
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
"""What is held back until a file is known to be right. The directory of a wheel lies in it."""
MOST_AT_ONCE = 32
"""Files that come at the same time, of all indexes and for everybody."""
LINGER_S = 10.0
"""For this long a file still comes when nobody waits for it any more."""
_CHUNK = 256 << 10
_HEADERS = {"accept-encoding": "identity", "accept": "*/*"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file of an index, and what the index said of it."""

    index: Index
    url: str
    digest: tuple[str, str] | None
    sealed: bool
    size: int | None = None
    most: int | None = None
    """Refused when it is longer; None: as long as the cache has room for."""
    at_hand: Callable[[], bytes | None] | None = None
    """A way to have the content without asking the index; it may block. Its hash counts all the same."""


class Wrong(Exception):
    """A file is not what its index says, or is too long to be kept."""


class Missing(Exception):
    """The index lists a file that it does not have."""


class Download:
    """One file, and those who wait for it. Whoever joined it leaves it once."""

    def __init__(self, cache: PackageCache, fetch: IndexClient, name: str, wanted: Wanted, permit: Permit):
        self._cache, self._fetch, self._name, self._wanted, self._permit = cache, fetch, name, wanted, permit
        self._changed = asyncio.Event()
        self._descriptor = -1
        self._failure: Exception | None = None
        self._guests = 0
        self.written = 0
        self.total: int | None = None
        """The whole size, once it is known."""
        self.digest: str | None = None
        """The SHA-256, once the file is whole and right."""
        self.task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        """Whether the file is whole and right."""
        return self.digest is not None

    @property
    def known_size(self) -> int:
        """How long the file is at least, as far as is known."""
        return max(self.written, self.total or 0)

    # --- those who wait

    def join(self, who: Hashable) -> None:
        """One more waits."""
        self._guests += 1
        self._permit.join(who)

    def leave(self, *, for_good: bool = False) -> None:
        """One waits no more. A file nobody waits for is not fetched on; but who lost his patience may come back soon,
        unless he left `for_good` or the file has not begun to come.
        """
        self._guests -= 1
        if not self._guests:
            if self.task is None or self.task.done():
                self._close()
            elif for_good or self._descriptor < 0:
                self._abandon()
            else:
                self.task.get_loop().call_later(LINGER_S, self._abandon)

    def _abandon(self) -> None:
        if not self._guests and self.task is not None:
            self.task.cancel()

    async def until(self, enough: Callable[[], bool]) -> None:
        """Wait until enough is there. Raises what the download failed with."""
        while not enough():
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()

    def open(self) -> int:
        """A descriptor of what is there so far, for who joined; the caller closes it."""
        return os.dup(self._descriptor)

    # --- the download

    async def run(self) -> None:
        """Take the file from the cache or the index."""
        try:
            kept = await run_to_end(lambda: self._cache.file(self._name), _close_kept)
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
        """The task is over, however it ended, even before it began."""
        if not self.done and self._failure is None:
            self._failure = Unreachable("nobody waited for it any more")
        self._tell()
        if not self._guests:
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
                self._tell()
                async for chunk in response.aiter_raw():
                    await run_to_end(partial(_write, draft, checked, chunk))
                    self.written = draft.size
                    self._check_size()
                    self._tell()
            if checked is not None and self._wanted.digest and checked.hexdigest() != self._wanted.digest[1]:
                raise Wrong("the file is not the one that its index lists: its hash is another")
            if self._wanted.size not in {None, draft.size}:
                raise Wrong("the file is shorter than its index says")
            await self._finish(draft)
        except BaseException:
            draft.drop()
            raise

    async def _at_hand(self, draft: Draft) -> bool:
        if self._wanted.at_hand is None:
            return False
        data = await asyncio.to_thread(self._wanted.at_hand)
        expected = self._wanted.digest
        if data is None or (expected and hashlib.new(expected[0], data).hexdigest() != expected[1]):
            return False
        await run_to_end(partial(draft.write, data))
        await self._finish(draft)
        return True

    async def _finish(self, draft: Draft) -> None:
        await run_to_end(partial(self._cache.finish, draft, self._name))
        self.written = self.total = draft.size
        self.digest = draft.digest

    def _check_size(self) -> None:
        most = self._cache.most_bytes if self._wanted.most is None else self._wanted.most
        if self.known_size > most:
            raise Wrong(f"the file has more than the {most} bytes that can be kept of it")
        if self._wanted.size is not None and self.written > self._wanted.size:
            raise Wrong("the file is longer than its index says")

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _write(draft: Draft, checked: hashlib._Hash | None, chunk: bytes) -> None:
    draft.write(chunk)
    if checked is not None:
        checked.update(chunk)


def _close_kept(kept: Kept | None) -> None:
    if kept is not None:
        os.close(kept.descriptor)


def _close_draft(draft: Draft) -> None:
    draft.drop()
    os.close(draft.descriptor)


_Flight = tuple[str, str, bool, str | None]


class Downloads:
    """All files that are on their way."""

    def __init__(self, cache: PackageCache, fetch: IndexClient):
        self._cache, self._fetch = cache, fetch
        # By index too: a slow or wrong one is waited for only by who chose it.
        self._running: dict[_Flight, Download] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit = FairLimit(MOST_AT_ONCE)

    def join(self, name: str, wanted: Wanted, who: Hashable = None) -> Download:
        """The download of the file under a key, begun if it is not under way: as soon as one of those who wait for it
        may have one more. The caller leaves it.
        """
        flight = (name, wanted.index.url, wanted.index.trusted, wanted.index.cert)
        found = self._running.get(flight)
        if found is None or found.task is None or found.task.done() or found.task.cancelling():
            found = self._running[flight] = Download(self._cache, self._fetch, name, wanted, self._limit.permit())
            task = found.task = asyncio.get_running_loop().create_task(found.run())
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, flight, found))
        found.join(who)
        return found

    def _ended(self, flight: _Flight, download: Download, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._running.get(flight) is download:
            del self._running[flight]
        download.ended()

    async def aclose(self) -> None:
        """Break every download off."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Body:
    """The bytes of a download, as they come. Closing it leaves the download; it is closed at its end by itself."""

    def __init__(self, download: Download, size: int, settle: Callable[[], Awaitable[None]], alive: Callable[[], None]):
        """`settle` is awaited before the last part is given and may raise; `alive` is told of each part."""
        self._download, self._size, self._settle, self._alive = download, size, settle, alive
        self._descriptor = download.open()
        self._at = 0
        self._settled = False

    def __aiter__(self) -> Body:
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
        """Let go of the file."""
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._download.leave()

    def __del__(self) -> None:
        if self._descriptor >= 0 and self._download.task is not None:  # forgotten, and in whichever thread
            os.close(self._descriptor)
            with suppress(RuntimeError):
                self._download.task.get_loop().call_soon_threadsafe(self._download.leave)

    def _enough(self) -> bool:
        return self._download.done or min(self._download.written, self._size - 1) - TAIL > self._at
