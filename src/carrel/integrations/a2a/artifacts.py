"""Files in `output/` of a workspace as artifacts: those a task made or changed, small ones whole, large ones as a URL.

What a sandbox says about its files is hostile input: names are escaped, sizes are counted as bytes arrive.
"""

from __future__ import annotations

import hashlib
import logging
import mimetypes
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from a2a.helpers import new_raw_part, new_text_part, new_url_part
from a2a.types.a2a_pb2 import Artifact

from carrel.client import AsyncSandbox
from carrel.errors import CarrelError, Denied, FileMissing, InvalidPath, NotFound, TooLarge
from carrel.integrations.text import printable
from carrel.models import FileInfo, FileKind

log = logging.getLogger("carrel.a2a")

DIRECTORY = "output"
MOST_LISTED = 1000
MOST_FILES = 32
MOST_BYTES = 1024 * 1024
"""The size of one file; for a larger one the artifact has its URL."""
MOST_TOGETHER = 4 * 1024 * 1024
_GONE = (FileMissing, InvalidPath, NotFound, TooLarge)

Listing = dict[str, str]
"""Path → size and time of the last change."""


@dataclass(frozen=True)
class OutputFiles:
    """The files in `output/` that are new or changed, and whether there were too many to list."""

    files: list[FileInfo]
    truncated: bool = False


async def listing(box: AsyncSandbox) -> tuple[list[FileInfo], bool]:
    """List the files in `output/`, without links; none if the directory is missing or policy denies it."""
    try:
        found = await box.files.list(DIRECTORY, recursive=True, limit=MOST_LISTED)
    except Denied as refusal:
        log.info("policy denies the files in output/ of %s as artifacts: %s", box.context_id, refusal.detail)
        return [], False
    except _GONE:
        return [], False
    return [info for info in found if info.kind is FileKind.FILE], found.truncated


def marks(files: list[FileInfo]) -> Listing:
    """Record size and time of each file, to see later whether it has changed."""
    return {printable(info.path): f"{info.size} {info.modified_at.timestamp():.6f}" for info in files}


async def changed(box: AsyncSandbox, before: Listing) -> OutputFiles:
    """List the files that were made or changed since `before`."""
    files, truncated = await listing(box)
    now = marks(files)
    return OutputFiles(
        [info for info in files if before.get(printable(info.path)) != now[printable(info.path)]], truncated
    )


async def artifacts(box: AsyncSandbox, url: str, found: OutputFiles) -> AsyncIterator[Artifact]:
    """Yield one artifact per file up to a limit; the last one says how many files are left."""
    together = 0
    for info in sorted(found.files, key=lambda info: info.path)[:MOST_FILES]:
        artifact = Artifact(artifact_id=_id(info.path), name=printable(info.path))
        artifact.metadata.update({"path": printable(info.path), "bytes": info.size})
        data = None
        if info.size <= MOST_BYTES and together + info.size <= MOST_TOGETHER:
            try:
                data = await _read(box, info.path)
            except CarrelError as error:  # it was deleted, or policy allows to list it but not to read it
                artifact.parts.append(new_text_part(f"{printable(info.path)} cannot be read: {error.detail}"))
                yield artifact
                continue
        name, kind = printable(info.path).rpartition("/")[2], _kind(info.path)
        if data is not None:
            together += len(data)
            artifact.parts.append(new_raw_part(data, media_type=kind, filename=name))
        else:
            artifact.description = "too large to be sent here: download it from the URL with the same token"
            artifact.parts.append(new_url_part(_address(box, url, info.path), media_type=kind, filename=name))
        yield artifact
    left = len(found.files) - MOST_FILES
    if left > 0 or found.truncated:
        words = f"{left} more files in {DIRECTORY}/" if not found.truncated else f"there are more files in {DIRECTORY}/"
        yield Artifact(artifact_id="more-files", name="more files", parts=[new_text_part(words)])


async def _read(box: AsyncSandbox, path: str) -> bytes | None:
    """Read a file; None if it has become too large meanwhile."""
    data = await box.files.read(path, length=MOST_BYTES + 1)
    return data if len(data) <= MOST_BYTES else None


def _id(path: str) -> str:
    return "file-" + hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _kind(path: str) -> str:
    return mimetypes.guess_type(printable(path))[0] or "application/octet-stream"


def _address(box: AsyncSandbox, url: str, path: str) -> str:
    query = urlencode({"path": path.encode("utf-8", "surrogateescape")})
    return f"{url}/v1/sandboxes/{quote(box.context_id or box.id, safe='')}/files/content?{query}"
