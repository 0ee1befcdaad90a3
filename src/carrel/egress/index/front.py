"""The package index that sandboxes use: pages of projects, whose links point to this index, and their files.

Answers the requests of `pip` and `uv` in origin form. Each request comes with what its sandbox may install; what was
fetched is shared by all. Direct URLs and version control do not pass here.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import quote, unquote, urlsplit

from carrel.egress.access import AccessRefused
from carrel.egress.http.answers import PROBLEM, body_of, sentence_of
from carrel.egress.index import pages
from carrel.egress.index.cache import PackageCache
from carrel.egress.index.catalogue import PageCatalogue, describe, scope
from carrel.egress.index.client import IndexClient, Unreachable
from carrel.egress.index.downloads import (
    MOST_METADATA,
    DownloadBody,
    Downloads,
    FileDownload,
    IndexedFile,
    Missing,
    Wrong,
    unpacked_size,
    wheel_metadata,
)
from carrel.egress.index.pages import BadPage, Link, ProjectPage
from carrel.egress.plan import PackageIndex
from carrel.policy.verdict import Verdict
from carrel.primitives.cache import Cache

IDLE_S = 60.0
"""An install ends when no request comes for this long."""


class InstallBudget:
    """The size of the current install. One for each sandbox; a new policy does not reset it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._files: dict[str, int] = {}
        self._active = 0
        self._last = clock()

    @property
    def taken(self) -> int:
        """The size of the requested files."""
        return sum(self._files.values())

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Count a request to the current install, or to a new one after a pause."""
        if not self._active and self._clock() - self._last >= IDLE_S:
            self._files.clear()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            self.keep()

    def keep(self) -> None:
        """Extend the install: bytes are still flowing."""
        self._last = self._clock()

    def has(self, file: str) -> bool:
        """Whether a file is counted."""
        return file in self._files

    def fits(self, file: str, size: int, most: int | None) -> bool:
        """Whether a file of this size fits with the others."""
        return most is None or self._others(file) + size <= most

    def take(self, file: str, size: int, most: int | None) -> None:
        """Count a file, once and with its largest known size. Raises `AccessRefused` when it does not fit."""
        if most is not None and not self.fits(file, size, most):
            raise _too_much(size, self._others(file), most)
        self._files[file] = max(size, self._files.get(file, 0))

    def give_back(self, file: str) -> None:
        """Uncount a file that was not delivered."""
        self._files.pop(file, None)

    def _others(self, file: str) -> int:
        return self.taken - self._files.get(file, 0)


@dataclass(frozen=True, slots=True)
class AllowedPackages:
    """The packages that one sandbox may install. Names are normalised; `allowed` None allows every package."""

    indexes: tuple[PackageIndex, ...]
    """In order: a project of an earlier index is never taken from a later one."""
    blocked: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None
    max_install_bytes: int | None = None
    enabled: bool = True
    budget: InstallBudget = field(default_factory=InstallBudget)

    def check(self, project: str) -> None:
        """Raise `AccessRefused` when the project may not be installed."""
        self.check_enabled()
        if project in self.blocked:
            raise _denied(f"the package {project} is blocked for this agent", f"blocked_packages: {project}")
        if self.allowed is not None and project not in self.allowed:
            raise _denied(f"the package {project} is not among those this agent may install", "allowed_packages")

    def check_enabled(self) -> None:
        """Raise `AccessRefused` when nothing may be installed."""
        if not self.enabled:
            raise _denied("this agent may not install packages", "enabled: false")


def _denied(reason: str, rule: str) -> AccessRefused:
    return AccessRefused(Verdict("deny", reason, f"package_managers.pip.{rule}", "sources.json"))


def _too_much(size: int, taken: int, most: int) -> AccessRefused:
    before, more, limit = map(_megabytes, (taken, size, most))
    reason = f"this install has taken {before}; {more} more is over the {limit} it may take"
    rule, hint = "package_managers.pip.max_install_size_mb", "install fewer or smaller packages"
    return AccessRefused(Verdict("deny", reason, rule, "sources.json", hint), code="limit_exceeded")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size} bytes"


log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""A file that takes longer is passed on while it arrives. `pip` waits 15 s for the first byte."""
_MOST_TARGET = 2048
_MOST_SIZES = 10_000
_MOST_WRITTEN = 32 << 20
_TOKEN = re.compile(r"x?[0-9a-f]{64}")
_TYPES = {"json": pages.JSON_TYPE, "html": pages.HTML_TYPE, "plain": "text/html; charset=utf-8"}


@dataclass(slots=True)
class IndexAnswer:
    """An HTTP response; `headers` include `content-length`. A body that is not bytes is iterated once; if it raises,
    the connection must be cut. Call `aclose` in any case.
    """

    status: int
    headers: list[tuple[str, str]]
    body: bytes | AsyncIterator[bytes] = b""
    reason: str = "OK"
    """Plain ASCII, one line."""
    refused: AccessRefused | None = None
    """The refusal, for the access log."""

    async def aclose(self) -> None:
        """Close the body, whether it was iterated or not."""
        if isinstance(self.body, DownloadBody):
            await self.body.aclose()


_EXPLAINING = "-"
"""In place of the name of an index: the file of a page that only explains a refusal."""
_SHOWN_AS_VERSION = {403: "denied.by.policy", 502: "index.unavailable"}
"""Refusals of a page that are shown as a version: for a page that fails, `pip` and `uv` say only that there is no such
package.
"""


@dataclass(slots=True)
class _Request:
    method: str
    segments: list[str]
    headers: Mapping[str, str]
    packages: AllowedPackages
    project: str | None = None


@dataclass(frozen=True, slots=True)
class _Written:
    page: ProjectPage
    body: bytes
    etag: str


class Front:
    """The package index of one process."""

    def __init__(self, cache: PackageCache, *, fetch: IndexClient, clock: Callable[[], float] = time.time):
        self._cache, self._fetch = cache, fetch
        self._catalogue = PageCatalogue(cache, fetch, clock)
        self._downloads = Downloads(cache, fetch)
        self._written: OrderedDict[tuple[str, str, pages.Form], _Written] = OrderedDict()
        self._sizes: Cache[str, int] = Cache(_MOST_SIZES)

    def decide(self, target: str, packages: AllowedPackages) -> Verdict:
        """Return the verdict on a request by the name of its package, before it is answered."""
        match _segments(target):
            case ["simple", name] | ["simple", name, ""] | ["files", _, name, _, _]:
                project = pages.project_name(name) if len(target) <= _MOST_TARGET else None
                try:
                    packages.check_enabled() if project is None else packages.check(project)
                except AccessRefused as refused:
                    return refused.verdict
        return Verdict("allow", "the package index decides")

    async def answer(
        self, method: str, target: str, headers: Mapping[str, str], packages: AllowedPackages
    ) -> IndexAnswer:
        """Answer a request of one sandbox. Header names are in lower case. Never raises."""
        request = _Request(method, [], headers, packages)
        try:
            with packages.budget.asking():
                answer = await self._route(request, target)
        except AccessRefused as refused:
            answer = _refusal(refused)
        except Exception:
            log.exception("a request to the package index failed")
            answer = _refusal(
                AccessRefused("carrel failed to answer this", code="platform_error", status=500, retry=True)
            )
        if method == "HEAD":
            await answer.aclose()
            answer.body = b""
        return answer

    async def aclose(self) -> None:
        """Cancel everything and close connections."""
        await self._catalogue.aclose()
        await self._downloads.aclose()
        await self._fetch.aclose()

    async def _route(self, request: _Request, target: str) -> IndexAnswer:
        if request.method not in {"GET", "HEAD"}:
            refusal = _refusal(AccessRefused("a package index is only read", code="invalid_request", status=405))
            refusal.headers.append(("allow", "GET, HEAD"))
            return refusal
        if len(target) > _MOST_TARGET:
            raise AccessRefused("the path is too long", code="invalid_request", status=414)
        request.segments = _segments(target)
        match request.segments:
            case ["simple"] | ["simple", ""]:
                request.packages.check_enabled()
                return _root(request.packages)
            case ["simple", name] | ["simple", name, ""]:
                try:
                    return await self._page(request, name)
                except AccessRefused as refused:
                    tool = request.headers.get("user-agent", "").startswith(("pip/", "uv/"))
                    if request.project and tool and refused.status in _SHOWN_AS_VERSION:
                        return _explaining(request.project, refused)
                    raise
            case ["files", index, project, token, filename]:
                try:
                    return await self._file(request, index, project, token, filename)
                except AccessRefused as refused:
                    if index == _EXPLAINING and refused.status == HTTPStatus.BAD_GATEWAY:
                        # pip repeats requests that get 502, and then does not show the reason.
                        refused.status = HTTPStatus.FAILED_DEPENDENCY
                    raise
        raise _unknown("there is nothing here", "the package index is at /simple/")

    # --- pages

    async def _page(self, request: _Request, text: str) -> IndexAnswer:
        project = self._project(request, text)
        index, page = await self._locate(request.packages, project)
        form = pages.form(request.headers.get("accept", ""))
        body, etag = await self._write(index, page, form)
        common = [("etag", etag), ("vary", "Accept"), ("cache-control", "no-cache")]
        if etag in request.headers.get("if-none-match", ""):
            return IndexAnswer(304, [*common, ("content-length", "0")], reason="Not Modified")
        return IndexAnswer(200, [("content-type", _TYPES[form]), ("content-length", str(len(body))), *common], body)

    async def _write(self, index: PackageIndex, page: ProjectPage, form: pages.Form) -> tuple[bytes, str]:
        """Return a page with links to this index, and its tag. Writing long pages takes long, so the last ones are
        cached.
        """
        place = (index.name, scope(index, "page", page.project), form)
        known = self._written.pop(place, None)
        if known is None or known.page is not page:
            write = pages.write_json if form == "json" else pages.write_html
            body = await asyncio.to_thread(write, page, lambda link: _place(index, page.project, link))
            known = _Written(page, body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
        self._written[place] = known
        while sum(len(each.body) for each in self._written.values()) > _MOST_WRITTEN:
            self._written.popitem(last=False)
        return known.body, known.etag

    def _project(self, request: _Request, text: str) -> str:
        project = pages.project_name(text)
        if project is None:
            raise _unknown("this cannot be the name of a package")
        request.project = project
        request.packages.check(project)
        return project

    async def _locate(
        self, packages: AllowedPackages, project: str, asked: str | None = None
    ) -> tuple[PackageIndex, ProjectPage]:
        """Return the first index that has the project, and its page. An index that fails ends the search: its projects
        must not be taken from a later index. The page of the index `asked` may be old.
        """
        for index in packages.indexes:
            try:
                page = await self._catalogue.page(index, project, packages.budget, any_age=index.name == asked)
            except (Unreachable, BadPage) as error:
                raise _failed(index, error) from None
            if page is not None:
                return index, page
        raise _unknown(f"no index has the package {project}")

    # --- files

    async def _file(self, request: _Request, name: str, text: str, token: str, filename: str) -> IndexAnswer:
        project = self._project(request, text)
        plain = filename.removesuffix(".metadata")
        if not _TOKEN.fullmatch(token) or not pages.belongs(plain, project):
            raise _unknown("there is no such file")
        index, page = await self._locate(request.packages, project, name)
        link = page.find(token, plain) if index.name == name else None
        if link is None:
            index, page = await self._locate(request.packages, project)
            link = page.find(token, plain) if index.name == name else None
        if link is None:
            raise _unknown("there is no such file on the index any more", "look at the package's page again")
        if plain != filename:
            return await self._metadata(request, index, link)
        return await self._content(request, index, link)

    async def _metadata(self, request: _Request, index: PackageIndex, link: Link) -> IndexAnswer:
        if not link.metadata:
            raise _unknown("the index does not give this file's metadata by itself")
        known = link.metadata if isinstance(link.metadata, str) else None
        path, mark, query = link.url.partition("?")
        wanted = IndexedFile(
            index,
            f"{path}.metadata{mark}{query}",
            ("sha256", known) if known else None,
            known is not None,
            most=MOST_METADATA,
            at_hand=lambda: self._metadata_at_hand(index, link),
        )
        download = self._downloads.join(_name(index, link, f"metadata {known}"), wanted, request.packages.budget)
        try:
            with _failures(index):
                await download.until(lambda: download.done)
            return _stream(download, "text/plain; charset=utf-8", _nothing, _ignore)
        except BaseException:
            download.leave()
            raise

    def _metadata_at_hand(self, index: PackageIndex, link: Link) -> bytes | None:
        kept = self._cache.file(_name(index, link))
        if kept is None:
            return None
        try:
            return wheel_metadata(kept.descriptor)
        finally:
            os.close(kept.descriptor)

    async def _content(self, request: _Request, index: PackageIndex, link: Link) -> IndexAnswer:
        name = _name(index, link)
        budget, most = request.packages.budget, request.packages.max_install_bytes
        counted = budget.has(name)
        budget.take(name, link.size or 0, most)
        wanted = IndexedFile(index, link.url, link.digest, link.sealed, link.size)
        download = self._downloads.join(name, wanted, budget)

        async def settle() -> None:
            budget.take(name, await self._installed_size(download, link), most)

        try:
            with _failures(index):
                await _arrival(download, lambda: budget.fits(name, download.known_size, most))
            budget.take(name, download.known_size, most)
            if download.done:
                await settle()
            return _stream(download, "application/octet-stream", settle, budget.keep)
        except BaseException as error:
            if not counted:
                budget.give_back(name)
            download.leave(for_good=isinstance(error, AccessRefused))
            raise

    async def _installed_size(self, download: FileDownload, link: Link) -> int:
        """Return the installed size of a file: for a wheel that of its content, else its own."""
        size = download.known_size
        if not link.filename.endswith(".whl") or download.digest is None:
            return size
        found = self._sizes.get(download.digest)
        if found is None:
            found = await asyncio.to_thread(_unpacked, download)
            if found is None:
                raise AccessRefused("the wheel's directory is too long to be read", code="limit_exceeded")
            self._sizes.put(download.digest, found)
        return found


def _segments(target: str) -> list[str]:
    return [unquote(each) for each in target.partition("?")[0].split("/")[1:]]


async def _arrival(download: FileDownload, fits: Callable[[], bool]) -> None:
    """Wait until the file is complete, or until its size is known and the client would lose patience, or until it is
    known not to fit.
    """
    try:
        async with asyncio.timeout(PATIENCE_S):
            await download.until(lambda: download.done or not fits())
    except TimeoutError:
        await download.until(lambda: download.done or download.total is not None or not fits())


def _unpacked(download: FileDownload) -> int | None:
    descriptor = download.open()
    try:
        return unpacked_size(descriptor)
    finally:
        os.close(descriptor)


def _stream(
    download: FileDownload, kind: str, settle: Callable[[], Awaitable[None]], alive: Callable[[], None]
) -> IndexAnswer:
    """Return a response with the bytes of a download. Closing it leaves the download."""
    size = download.known_size
    headers = [
        ("content-type", kind),
        ("content-length", str(size)),
        ("cache-control", "max-age=31536000, immutable"),
        ("accept-ranges", "none"),
    ]
    return IndexAnswer(200, headers, DownloadBody(download, size, settle, alive))


async def _nothing() -> None:
    pass


def _ignore() -> None:
    pass


def _name(index: PackageIndex, link: Link, part: str | None = None) -> str:
    """Return the cache key of a file. Files are shared between indexes by content only if the index is open to
    everybody.
    """
    open_to_all = "@" not in urlsplit(index.url).netloc
    if part is None and open_to_all and (known := link.hashes.get("sha256")):
        return known
    return scope(index, "file", link.token, link.url if "sha256" not in link.hashes else None, part)


def _place(index: PackageIndex, project: str, link: Link) -> str:
    return f"/files/{quote(index.name, safe='')}/{project}/{link.token}/{quote(link.filename)}"


def _root(packages: AllowedPackages) -> IndexAnswer:
    """Return a page for people; tools ask for projects by name."""
    lines = [f"<li>{html.escape(describe(index))}</li>" for index in packages.indexes]
    body = (
        "<!DOCTYPE html><html><head><title>Packages</title></head><body><h1>Packages</h1>"
        "<p>Ask for a package by name: <code>/simple/NAME/</code>. They come from, in this order:</p>"
        f"<ol>{''.join(lines)}</ol></body></html>"
    ).encode()
    return IndexAnswer(200, [("content-type", _TYPES["plain"]), ("content-length", str(len(body)))], body)


def _explaining(project: str, refused: AccessRefused) -> IndexAnswer:
    """Return a page with one file that cannot be downloaded: `pip` and `uv` show the reason or at least the version."""
    link = Link(f"{project}-0+{_SHOWN_AS_VERSION[refused.status]}.tar.gz", "")
    place = f"/files/{_EXPLAINING}/{project}/x{'0' * 64}/{quote(link.filename)}"
    body = pages.write_html(ProjectPage(project, (link,)), lambda _link: place)
    headers = [("content-type", _TYPES["plain"]), ("content-length", str(len(body))), ("cache-control", "no-store")]
    return IndexAnswer(200, headers, body, refused=refused)


def _unknown(reason: str, hint: str | None = None) -> AccessRefused:
    return AccessRefused(reason, code="not_found", status=404, hint=hint)


def _failed(index: PackageIndex, error: Exception) -> AccessRefused:
    return AccessRefused(
        f"the package index {index.name} failed: {error}", code="index_unavailable", status=502, retry=True
    )


@contextmanager
def _failures(index: PackageIndex) -> Iterator[None]:
    """Turn the errors of a download into refusals."""
    try:
        yield
    except Missing:
        raise _unknown("the index lists this file and does not have it") from None
    except Unreachable as error:
        raise _failed(index, error) from None
    except Wrong as error:
        raise AccessRefused(
            f"the package index {index.name} gave a wrong file: {error}", code="index_unavailable", status=502
        ) from None


def _refusal(refused: AccessRefused) -> IndexAnswer:
    body = body_of(refused)
    headers = [("content-type", PROBLEM.decode()), ("content-length", str(len(body))), ("cache-control", "no-store")]
    phrase = "".join(each if " " <= each <= "~" else "?" for each in sentence_of(refused))[:300]
    return IndexAnswer(refused.status, headers, body, phrase, refused)
