"""The routes of files of E2B: reading, and uploads as they are, compressed, or as forms with many files."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import Response

from carrel.api.e2b.answers import Failure, as_json
from carrel.api.e2b.filesystem import entry, inside
from carrel.api.e2b.inner import Json
from carrel.api.e2b.sandboxes import Box
from carrel.api.e2b.users import require_user
from carrel.api.parts import ClosingStream
from carrel.primitives import tasks

_PIECE = 256 * 1024
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")
MOST_FILES, MOST_HEADER = 1000, 16 * 1024


async def read(request: Request, box: Box) -> Response:
    require_user(request.query_params.get("username"))
    path = inside(request.query_params.get("path"))
    info = entry((await box.ask("GET", "/files/stat", query={"path": path})).json())
    if info["type"] == "FILE_TYPE_DIRECTORY":
        raise Failure(400, f"'{path}' is a directory")
    query: dict[str, object] = {"path": path}
    status, headers = (
        200,
        {"content-disposition": f"inline; filename*=utf-8''{quote(info['name'], safe='', errors='surrogateescape')}"},
    )
    size = int(info["size"])
    found = _RANGE.fullmatch(request.headers.get("range", ""))
    if found is not None and int(found[1]) < size:
        first = int(found[1])
        last = min(size - 1, int(found[2])) if found[2] else size - 1
        query |= {"offset": first, "length": last - first + 1}
        status, headers["content-range"] = 206, f"bytes {first}-{last}/{size}"

    opening = box.stream("GET", "/files/content", query=query)
    stream = await opening.__aenter__()
    if "content-length" in stream.headers:
        headers["content-length"] = stream.headers["content-length"]

    async def content() -> AsyncIterator[bytes]:
        try:
            async for chunk in stream.chunks:
                yield chunk
        finally:
            await opening.__aexit__(None, None, None)

    return ClosingStream(content(), status, headers, "application/octet-stream")


async def write(request: Request, box: Box) -> Response:
    require_user(request.query_params.get("username"))
    if any(name.startswith("x-metadata-") for name in request.headers):
        raise Failure(501, "metadata of files is not kept here: leave `metadata` out")
    await box.running()
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind == b"multipart/form-data":
        if b"boundary" not in options:
            raise Failure(400, "the form has no boundary")
        found = await _Form(box, request.query_params.get("path")).read(request, options[b"boundary"])
        return as_json(found)
    path = inside(request.query_params.get("path"))
    content: AsyncIterator[bytes] = request.stream()
    match request.headers.get("content-encoding", "identity").lower():
        case "identity":
            pass
        case "gzip":
            content = _unzipped(content)
        case other:
            raise Failure(400, f"content-encoding '{other[:40]}' is not served: use gzip or none")
    return as_json([await put(box, path, content)])


async def put(box: Box, path: str, content: AsyncIterator[bytes]) -> Json:
    """Write one file as its content comes; it appears when it is complete."""
    # The sandbox runs: a body that was begun cannot be sent again.
    await box.inner.ask("PUT", f"{box.path}/files/content", query={"path": path}, content=content)
    info = entry({"path": path, "kind": "file", "size": 0, "mode": "644", "modified_at": ""})
    return {"name": info["name"], "path": info["path"], "type": "file"}


async def _unzipped(content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    unpacking = zlib.decompressobj(wbits=31)
    try:
        async for chunk in content:
            rest = chunk
            while rest:
                yield unpacking.decompress(rest, _PIECE)
                rest = unpacking.unconsumed_tail
    except zlib.error:
        raise Failure(400, "the content is not gzip") from None
    if not unpacking.eof:
        raise Failure(400, "the content broke off")


class _Form:
    """Writes the files of a form one after the other while it comes. Nothing of it is kept in memory."""

    def __init__(self, box: Box, path: str | None):
        self._box = box
        self._path = path
        self._found: list[Json] = []
        self._happened: list[tuple[str, bytes]] = []

    async def read(self, request: Request, boundary: bytes) -> list[Json]:
        parser = MultipartParser(boundary, self._callbacks())
        writing: asyncio.Task[Json] | None = None
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue(2)
        name = value = b""
        files = 0
        disposition = b""
        try:
            async for chunk in request.stream():
                try:
                    parser.write(chunk)
                except Exception as error:
                    raise Failure(400, f"the form is not readable: {error}") from None
                happened, self._happened = self._happened, []
                for what, data in happened:
                    if what == "field":
                        name += data
                    elif what == "value":
                        value += data
                    elif what == "header":
                        if name.lower() == b"content-disposition":
                            disposition = value
                        name = value = b""
                    elif what == "begun":
                        destination = self._destination(disposition)
                        disposition = b""
                        if destination is None:
                            continue
                        files += 1
                        if files > MOST_FILES:
                            raise Failure(413, f"a form has at most {MOST_FILES} files")
                        pieces = asyncio.Queue(2)
                        writing = asyncio.create_task(put(self._box, destination, _pieces(pieces)))
                    elif what == "data" and writing is not None:
                        await _give(pieces, data, writing)
                    elif what == "ended" and writing is not None:
                        await _give(pieces, None, writing)
                        self._found.append(await writing)
                        writing = None
                    if len(name) + len(value) > MOST_HEADER:
                        raise Failure(413, "a header of the form is too long")
            if writing is not None:
                raise Failure(400, "the form broke off")
        finally:
            await tasks.cancel([writing])
        if not self._found:
            raise Failure(400, "the form has no part named `file`")
        return self._found

    def _destination(self, disposition: bytes) -> str | None:
        """Return where a part belongs; None for a part that is no file."""
        _, options = parse_options_header(disposition)
        if options.get(b"name") != b"file":
            return None
        named = options.get(b"filename", b"").decode("utf-8", "surrogateescape")
        return inside(self._path if self._path and not self._found else named)

    def _callbacks(self) -> Any:
        def data(what: str) -> Callable[[bytes, int, int], None]:
            return lambda data, start, end: self._happened.append((what, data[start:end]))

        def mark(what: str) -> Callable[[], None]:
            return lambda: self._happened.append((what, b""))

        return {
            "on_header_field": data("field"),
            "on_header_value": data("value"),
            "on_header_end": mark("header"),
            "on_headers_finished": mark("begun"),
            "on_part_data": data("data"),
            "on_part_end": mark("ended"),
        }


async def _pieces(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (piece := await queue.get()) is not None:
        yield piece


async def _give(queue: asyncio.Queue[bytes | None], piece: bytes | None, writing: asyncio.Task[Json]) -> None:
    """Give a piece to the task that writes it; raise its error if it has failed."""
    giving = asyncio.ensure_future(queue.put(piece))
    try:
        await asyncio.wait({giving, writing}, return_when=asyncio.FIRST_COMPLETED)
        if writing.done() and not giving.done():
            writing.result()
    finally:
        if not giving.done():
            giving.cancel()
            with suppress(asyncio.CancelledError):
                await giving
