"""The pages of projects: fetched once for everybody, cached, and fetched again when they are old.

Requests are counted per sandbox, so that no sandbox uses all of them. It is cached too that an index does not have a
project, so that a search over several indexes asks each only once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from carrel.egress.index import pages
from carrel.egress.index.cache import PackageCache, key
from carrel.egress.index.client import FairLimit, IndexClient, SharedPermit, Unreachable, plain
from carrel.egress.index.pages import BadPage, ProjectPage
from carrel.egress.plan import PackageIndex
from carrel.primitives.cache import Cache
from carrel.primitives.tasks import cancel

log = logging.getLogger(__name__)

FRESH_S = 600.0
"""How long a page is fresh."""
RETRY_S = 30.0
"""After an index failed, an old page is used this long before the index is asked again."""
MOST_AT_ONCE = 32
"""How many pages are fetched at the same time, from all indexes and for everybody."""
_MOST_TIME_S = 60.0
_MOST_LINKS_IN_MEMORY = 200_000
_MOST_FAILED = 10_000


@dataclass(frozen=True, slots=True)
class CachedPage:
    """A cached page. `page` is None when the index does not have the project."""

    page: ProjectPage | None
    asked: float
    etag: str | None = None
    modified: str | None = None


class PageCatalogue:
    """The pages of every index."""

    def __init__(self, cache: PackageCache, fetch: IndexClient, clock: Callable[[], float] = time.time):
        self._cache, self._fetch, self._clock = cache, fetch, clock
        self._memory: OrderedDict[str, CachedPage] = OrderedDict()
        self._links = 0
        self._failed: Cache[str, bool] = Cache(_MOST_FAILED, RETRY_S, clock=clock)
        self._requests: dict[str, tuple[asyncio.Task[CachedPage], SharedPermit]] = {}
        self._limit = FairLimit(MOST_AT_ONCE)

    async def page(
        self, index: PackageIndex, project: str, who: Hashable = None, *, any_age: bool = False
    ) -> ProjectPage | None:
        """Return the page of a project; None when the index does not have it. Raises `Unreachable` or `BadPage`.

        When the index fails, an old page is used; but not the knowledge that it did not have the project.
        """
        name = scope(index, "page", project)
        entry = self._memory.get(name) or await self._load(name, project)
        if entry is not None:
            age = self._clock() - entry.asked
            failed = entry.page is not None and self._failed.get(name) is not None
            if 0 <= age < FRESH_S or failed or (any_age and entry.page is not None):
                self._remember(name, entry)
                return entry.page
        if name not in self._requests:
            permit = self._limit.permit()
            task = asyncio.get_running_loop().create_task(self._ask(name, index, project, entry, permit))
            task.add_done_callback(lambda done: self._finished(name, done))
            self._requests[name] = task, permit
        task, permit = self._requests[name]
        permit.join(who)
        return (await asyncio.shield(task)).page

    async def aclose(self) -> None:
        """Cancel all requests."""
        await cancel([task for task, _ in self._requests.values()])

    def _finished(self, name: str, task: asyncio.Task[CachedPage]) -> None:
        del self._requests[name]
        if not task.cancelled():
            task.exception()  # marks it as seen if nobody waits any more

    async def _ask(
        self, name: str, index: PackageIndex, project: str, known: CachedPage | None, permit: SharedPermit
    ) -> CachedPage:
        try:
            async with asyncio.timeout(_MOST_TIME_S) as limit, permit:
                # Somebody may have joined while another waited for the permit; both get the full time.
                limit.reschedule(asyncio.get_running_loop().time() + _MOST_TIME_S)
                entry = await self._get(name, index, project, known)
        except (Unreachable, BadPage, TimeoutError) as error:
            if known is None or known.page is None:
                raise Unreachable("it did not answer in time") if isinstance(error, TimeoutError) else error from None
            log.warning("an old page of %s is used, because index %s failed: %s", project, index.name, error)
            self._failed.put(name, True)
            entry = known
        else:
            self._failed.pop(name)
        self._remember(name, entry)
        return entry

    async def _get(self, name: str, index: PackageIndex, project: str, known: CachedPage | None) -> CachedPage:
        headers = {"accept": pages.ACCEPT, "accept-encoding": "gzip, deflate"}
        if known is not None and known.page is not None:
            if known.etag:
                headers["if-none-match"] = known.etag
            if known.modified:
                headers["if-modified-since"] = known.modified
        async with self._fetch.get(index, page_url(index, project), headers) as response:
            now = self._clock()
            if response.status_code == 304 and known is not None:
                await asyncio.to_thread(self._cache.confirm_page, name, now)
                return CachedPage(known.page, now, known.etag, known.modified)
            if response.status_code in {404, 410}:
                entry = CachedPage(None, now)
            elif response.status_code == 200:
                body = await _body(response)
                kind, base = response.headers.get("content-type", ""), str(response.url)
                page = await asyncio.to_thread(pages.read, body, kind, project, base)
                entry = CachedPage(page, now, _short(response, "etag"), _short(response, "last-modified"))
            else:
                raise Unreachable(f"it answered {response.status_code}")
        try:
            await asyncio.to_thread(lambda: self._cache.put_page(name, _pack(entry), now))
        except OSError as error:
            log.warning("the package cache cannot be written: %s", error.strerror)
        return entry

    async def _load(self, name: str, project: str) -> CachedPage | None:
        return await asyncio.to_thread(self._read, name, project)

    def _read(self, name: str, project: str) -> CachedPage | None:
        kept = self._cache.page(name)
        if kept is None:
            return None
        try:
            return _unpack(*kept, project)
        except (BadPage, ValueError, KeyError, TypeError):  # damaged, or written by another version
            self._cache.drop_page(name)
            return None

    def _remember(self, name: str, entry: CachedPage) -> None:
        self._forget(name)
        self._memory[name] = entry
        self._links += _weight(entry)
        while self._links > _MOST_LINKS_IN_MEMORY and len(self._memory) > 1:
            self._forget(next(iter(self._memory)))

    def _forget(self, name: str) -> None:
        former = self._memory.pop(name, None)
        if former is not None:
            self._links -= _weight(former)


def scope(index: PackageIndex, kind: str, *parts: str | None) -> str:
    """Return the cache key of something on an index. It depends on the credentials and on the trust in the index, so
    that the cache never shows one sandbox what only another may see.
    """
    return key(kind, index.url.rstrip("/"), "trusted" if index.trusted else index.cert, *parts)


def page_url(index: PackageIndex, project: str) -> str:
    """Return the URL of a project's page."""
    parts = urlsplit(index.url)
    return parts._replace(path=f"{parts.path.rstrip('/')}/{project}/", fragment="").geturl()


def describe(index: PackageIndex) -> str:
    """Return the name and URL of an index for people."""
    return f"{index.name} ({plain(index)})"


def _weight(entry: CachedPage) -> int:
    return 10 + (len(entry.page.links) if entry.page else 0)


async def _body(response: httpx.Response) -> bytes:
    data = bytearray()
    async for chunk in response.aiter_bytes():
        data += chunk
        if len(data) > pages.MOST_BYTES:
            raise BadPage(f"the page has more than {pages.MOST_BYTES} bytes")
    return bytes(data)


def _short(response: httpx.Response, name: str) -> str | None:
    value = response.headers.get(name)
    return value if value and len(value) <= 512 and value.isascii() and value.isprintable() else None


def _pack(entry: CachedPage) -> bytes:
    head = {"v": 1, "etag": entry.etag, "modified": entry.modified, "missing": entry.page is None}
    return json.dumps(head).encode() + b"\n" + (pages.pack(entry.page) if entry.page else b"")


def _unpack(data: bytes, asked: float, project: str) -> CachedPage:
    first, _, rest = data.partition(b"\n")
    head = json.loads(first)
    if head["v"] != 1:
        raise BadPage("the page is of another version")
    return CachedPage(
        None if head["missing"] else pages.read_json(rest, project), asked, head["etag"], head["modified"]
    )
