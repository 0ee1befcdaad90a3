"""The page of one project on a package index: read from HTML or JSON, written as HTML or JSON.

An index is not trusted: sizes and counts are limited, and a file whose name does not belong to the project is left out.
Pure.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Literal
from urllib.parse import unquote, urljoin, urlsplit

from packaging.utils import InvalidName, InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion

MOST_BYTES = 64 << 20
"""Longer pages are refused."""
MOST_FILES = 100_000
JSON_TYPE = "application/vnd.pypi.simple.v1+json"
HTML_TYPE = "application/vnd.pypi.simple.v1+html"
ACCEPT = f"{JSON_TYPE}, {HTML_TYPE};q=0.2, text/html;q=0.1"
"""The `Accept` header for indexes."""

_MOST_URL = 4096
_MOST_NAME = 240
_MOST_WORDS = 1000
_SLICE = 32 << 10
_MOST_PENDING = 256 << 10
_MOST_PARSE_S = 20.0
_SDISTS = (".tar.gz", ".zip", ".tar.bz2", ".tgz", ".tar.xz", ".tar")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*")
_DIGESTS = {name: hashlib.new(name).digest_size * 2 for name in ("sha512", "sha384", "sha256", "sha224", "sha1", "md5")}
_STRONG = ("sha256", "sha512", "sha384")
_URL = re.compile(r"https?://[!-~]+")


class BadPage(Exception):
    """The response of an index is not a valid page. The message says why."""


@dataclass(frozen=True, slots=True)
class Link:
    """A file that a page offers."""

    filename: str
    url: str
    hashes: Mapping[str, str] = field(default_factory=dict)
    size: int | None = None
    requires_python: str | None = None
    yanked: bool | str = False
    metadata: bool | str = False
    """Whether the index serves the file's metadata separately; its SHA-256 if the index gives it."""
    upload_time: str | None = None

    @property
    def token(self) -> str:
        """The file's identifier in URLs of this index: its SHA-256, or a hash of what the index says about it."""
        if known := self.hashes.get("sha256"):
            return known
        known = json.dumps([self.url, self.size, self.upload_time, sorted(self.hashes.items())])
        return "x" + hashlib.sha256(known.encode()).hexdigest()

    @property
    def digest(self) -> tuple[str, str] | None:
        """The best hash that the index gives, as algorithm and value."""
        return next(((name, self.hashes[name]) for name in (*_STRONG, *_DIGESTS) if name in self.hashes), None)

    @property
    def sealed(self) -> bool:
        """Whether a strong hash protects the content."""
        return any(name in self.hashes for name in _STRONG)


@dataclass(frozen=True, slots=True)
class ProjectPage:
    """The files of one project on an index."""

    project: str
    links: tuple[Link, ...] = ()
    versions: tuple[str, ...] | None = None
    """Only if the index lists them."""

    def find(self, token: str, filename: str) -> Link | None:
        """Find the file of a URL of this index."""
        return next((link for link in self.links if link.filename == filename and link.token == token), None)


def project_name(text: str) -> str | None:
    """Return the normalised name of a project; None when it is not valid."""
    if len(text) > _MOST_NAME:
        return None
    try:
        return canonicalize_name(text, validate=True)
    except InvalidName:
        return None


def belongs(filename: str, project: str) -> bool:
    """Whether a file name is safe and names a wheel or source archive of the project."""
    if len(filename) > _MOST_NAME or not _PLAIN.fullmatch(filename):
        return False
    if filename.endswith(".whl"):
        try:
            return parse_wheel_filename(filename)[0] == project
        except (InvalidWheelFilename, InvalidVersion):
            return False
    stem = next((filename.removesuffix(suffix) for suffix in _SDISTS if filename.endswith(suffix)), None)
    return stem is not None and canonicalize_name(stem).startswith(f"{project}-")


# --- reading


def read(body: bytes, content_type: str, project: str, base: str) -> ProjectPage:
    """Parse the response of an index. `base` is its URL, without user and password."""
    if len(body) > MOST_BYTES:
        raise BadPage(f"the page has more than {MOST_BYTES} bytes")
    kind = content_type.partition(";")[0].strip().lower()
    if kind in {JSON_TYPE, "application/json"}:
        return read_json(body, project, base)
    if kind in {HTML_TYPE, "text/html", "application/xhtml+xml"}:
        return _read_html(body, project, base)
    raise BadPage(f"the page is of type '{kind[:80]}'")


def read_json(body: bytes, project: str, base: str = "") -> ProjectPage:
    """Parse a JSON page, of an index or of `pack`."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise BadPage("the page is not JSON") from None
    files = value.get("files") if isinstance(value, dict) else None
    if not isinstance(files, list):
        raise BadPage("the page lists no files")
    meta = value.get("meta")
    _check_version(meta.get("api-version", "1.0") if isinstance(meta, dict) else "1.0")
    if len(files) > MOST_FILES:
        raise BadPage(f"the page lists more than {MOST_FILES} files")
    links = [link for each in files if isinstance(each, dict) and (link := _from_json(each, project, base))]
    listed = value.get("versions")
    versions = None
    if isinstance(listed, list):
        versions = tuple(each for each in listed[:MOST_FILES] if isinstance(each, str) and len(each) <= _MOST_NAME)
    return ProjectPage(project, tuple(links), versions)


def _check_version(version: object) -> None:
    if not isinstance(version, str) or version.partition(".")[0].strip() != "1":
        raise BadPage(f"the page is of version {str(version)[:20]!r}, which is not known here")


def _from_json(each: Mapping[str, object], project: str, base: str) -> Link | None:
    url, filename = each.get("url"), each.get("filename")
    if not isinstance(url, str) or not isinstance(filename, str) or not belongs(filename, project):
        return None
    absolute = _absolute(base, url)
    if absolute is None:
        return None
    size, yanked = each.get("size"), each.get("yanked", False)
    listed = next((each[key] for key in ("core-metadata", "dist-info-metadata") if key in each), False)
    metadata = _hashes(listed).get("sha256", True) if isinstance(listed, dict) else listed is True
    return Link(
        filename,
        absolute[0],
        _hashes(each.get("hashes")) or absolute[1],
        size if isinstance(size, int) and not isinstance(size, bool) and size >= 0 else None,
        _words(each.get("requires-python")),
        yanked if isinstance(yanked, bool) else _words(yanked) or True,
        metadata,
        _words(each.get("upload-time")),
    )


def _hashes(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {
        name: digest.lower()
        for name, digest in value.items()
        if isinstance(digest, str) and re.fullmatch(r"[0-9a-fA-F]+", digest) and _DIGESTS.get(name) == len(digest)
    }


def _words(value: object) -> str | None:
    return value if isinstance(value, str) and value.isprintable() and 0 < len(value) <= _MOST_WORDS else None


def _absolute(base: str, url: str) -> tuple[str, dict[str, str]] | None:
    """Return the absolute URL of a link without its fragment, and the hash in the fragment."""
    if len(url) > _MOST_URL:
        return None
    try:
        whole, _, fragment = urljoin(base, url.strip()).partition("#")
        parts = urlsplit(whole)
        parts.port  # noqa: B018 -- raises when it is not valid
    except ValueError:
        return None
    if not parts.hostname or not _URL.fullmatch(whole):
        return None
    name, _, digest = fragment.partition("=")
    return whole, _hashes({name: digest.partition("&")[0]})


class _LinkCollector(HTMLParser):
    """Collects the links of an HTML page."""

    def __init__(self, project: str, base: str):
        super().__init__()
        self.links: list[Link] = []
        self._seen = 0
        self._project = project
        self._base = base
        self._based = False

    @property
    def pending(self) -> int:
        """The length of the input that is not parsed yet."""
        return len(self.rawdata)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Read links, the base and the version; ignore all else."""
        given = dict(reversed(attrs))
        if tag == "a" and (href := given.get("href")):
            self._seen += 1
            if self._seen > MOST_FILES:
                raise BadPage(f"the page lists more than {MOST_FILES} files")
            if link := self._link(href, given):
                self.links.append(link)
        elif tag == "base" and not self._based and (href := given.get("href")):
            self._based = True
            if found := _absolute(self._base, href):
                self._base = found[0]
        elif tag == "meta" and given.get("name") == "pypi:repository-version":
            _check_version(given.get("content"))

    def _link(self, href: str, given: Mapping[str, str | None]) -> Link | None:
        absolute = _absolute(self._base, href)
        if absolute is None:
            return None
        filename = unquote(urlsplit(absolute[0]).path.rpartition("/")[2])
        if not belongs(filename, self._project):
            return None
        listed = next(
            (given[key] for key in ("data-core-metadata", "data-dist-info-metadata") if key in given), "false"
        )
        name, _, digest = (listed or "true").partition("=")
        return Link(
            filename,
            absolute[0],
            absolute[1],
            requires_python=_words(given.get("data-requires-python")),
            yanked=(_words(given["data-yanked"]) or True) if "data-yanked" in given else False,
            metadata=_hashes({name: digest}).get("sha256", name != "false"),
        )


def _read_html(body: bytes, project: str, base: str) -> ProjectPage:
    reader = _LinkCollector(project, base)
    text = body.decode("utf-8", "replace")
    until = time.monotonic() + _MOST_PARSE_S
    # In slices: the parser rescans input that it cannot parse yet, which is slow when that is long.
    try:
        for at in range(0, len(text), _SLICE):
            reader.feed(text[at : at + _SLICE])
            if reader.pending > _MOST_PENDING or time.monotonic() > until:
                raise BadPage("the page cannot be read as HTML")
        reader.close()
    except AssertionError:  # some versions of the parser raise it for an invalid declaration
        raise BadPage("the page cannot be read as HTML") from None
    return ProjectPage(project, tuple(reader.links))


# --- writing

Place = Callable[[Link], str]
"""Returns the URL of a file on this index."""


def pack(page: ProjectPage) -> bytes:
    """Return the page for the cache, with the URLs of the index; `read_json` reads it."""
    return write_json(page, lambda link: link.url)


def write_json(page: ProjectPage, place: Place) -> bytes:
    """Return the page as JSON."""
    whole = page.versions is not None and all(link.size is not None for link in page.links)
    value: dict[str, object] = {
        "meta": {"api-version": "1.1" if whole else "1.0"},
        "name": page.project,
        "files": [_to_json(link, place) for link in page.links],
    }
    if page.versions is not None:
        value["versions"] = page.versions
    return json.dumps(value, separators=(",", ":")).encode()


def _to_json(link: Link, place: Place) -> dict[str, object]:
    value: dict[str, object] = {"filename": link.filename, "url": place(link), "hashes": dict(link.hashes)}
    if link.size is not None:
        value["size"] = link.size
    if link.requires_python:
        value["requires-python"] = link.requires_python
    if link.yanked:
        value["yanked"] = link.yanked
    if link.metadata:
        value["core-metadata"] = {"sha256": link.metadata} if isinstance(link.metadata, str) else True
    if link.upload_time:
        value["upload-time"] = link.upload_time
    return value


def write_html(page: ProjectPage, place: Place) -> bytes:
    """Return the page as HTML."""
    lines = [
        "<!DOCTYPE html>",
        f'<html><head><meta name="pypi:repository-version" content="1.0"><title>{page.project}</title></head><body>',
        *(_anchor(link, place) for link in page.links),
        "</body></html>",
    ]
    return "\n".join(lines).encode()


def _anchor(link: Link, place: Place) -> str:
    fragment = f"#{link.digest[0]}={link.digest[1]}" if link.digest else ""
    given = [("href", place(link) + fragment)]
    if link.requires_python:
        given.append(("data-requires-python", link.requires_python))
    if link.yanked:
        given.append(("data-yanked", link.yanked if isinstance(link.yanked, str) else ""))
    if link.metadata:
        value = f"sha256={link.metadata}" if isinstance(link.metadata, str) else "true"
        given += [("data-core-metadata", value), ("data-dist-info-metadata", value)]
    attributes = " ".join(f'{name}="{html.escape(value)}"' for name, value in given)
    return f"<a {attributes}>{html.escape(link.filename)}</a><br>"


# --- negotiation


Form = Literal["json", "html", "plain"]


def form(accept: str) -> Form:
    """Choose the form for an `Accept` header: `plain` is HTML with its usual type."""
    best: tuple[float, int, Form] = (0.0, 0, "plain")
    for name, weight in _accepted(accept):
        found: tuple[int, Form] | None = None
        if name in {JSON_TYPE, "application/vnd.pypi.simple.latest+json"}:
            found = (3, "json")
        elif name in {HTML_TYPE, "application/vnd.pypi.simple.latest+html"}:
            found = (2, "html")
        elif name in {"text/html", "text/*", "*/*"}:
            found = (1, "plain")
        if found and weight and (weight, *found) > best:
            best = (weight, *found)
    return best[2]


def _accepted(accept: str) -> Iterator[tuple[str, float]]:
    for part in accept[:2000].split(","):
        name, *parameters = (each.strip().lower() for each in part.split(";"))
        weight = 1.0
        for each in parameters:
            if each.startswith("q="):
                weight = float(each[2:]) if re.fullmatch(r"[01](\.\d{0,3})?", each[2:]) else 0.0
        yield name, weight
