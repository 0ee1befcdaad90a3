"""A small HTTP/1.1 server on asyncio and httptools, for one trusted caller on a Unix socket.

It parses, routes, streams bodies both ways with back-pressure, and turns errors into problem answers. It knows nothing
of commands or files. Everything it needs is imported with it: the file system it came from is gone when it runs.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

import httptools

from carrel.errors import CarrelError, InvalidRequest, NotFound, PlatformError, TooLarge

MAX_HEADERS = 16 * 1024
MAX_JSON = 32 * 1024 * 1024
HIGH_WATER = 256 * 1024
RUN = b"carrel-run"

Json = dict[str, Any]


@dataclass(slots=True)
class HttpRequest:
    """One request. Read the body with `json`, `read` or by iterating over `chunks`. `run` is the run it belongs to."""

    method: str
    path: str
    query: dict[str, str]
    args: tuple[str, ...] = ()
    run: str | None = None
    _connection: HttpConnection | None = None
    _chunks: list[bytes] = field(default_factory=list)
    _waiter: asyncio.Future[None] | None = None
    _complete: bool = False

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Reading from the socket pauses while the caller is behind."""
        connection = self._connection
        while True:
            while self._chunks:
                chunk = self._chunks.pop(0)
                if connection is not None:
                    connection.consumed(len(chunk))
                yield chunk
            if self._complete:
                return
            if connection is None or connection.closed:
                raise ConnectionResetError("the caller went away in the middle of a body")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def read(self, limit: int = MAX_JSON) -> bytes:
        """Return the whole body, at most `limit` bytes."""
        if self._complete and len(self._chunks) <= 1:
            body = self._chunks[0] if self._chunks else b""
            if len(body) > limit:
                raise TooLarge(f"the body is larger than {limit} bytes", field="body")
            return body
        parts, size = [], 0
        async for chunk in self.chunks():
            size += len(chunk)
            if size > limit:
                raise TooLarge(f"the body is larger than {limit} bytes", field="body")
            parts.append(chunk)
        return b"".join(parts)

    async def json(self) -> Json:
        try:
            value = json.loads(await self.read())
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the body is not JSON: {error}", field="body") from None
        if not isinstance(value, dict):
            raise InvalidRequest("the body must be a JSON object", field="body")
        return value

    def flag(self, name: str) -> bool:
        """Return a query parameter that is 0 or 1."""
        return self.query.get(name, "0") not in {"0", "", "false"}

    def number(self, name: str, default: int) -> int:
        """Return a query parameter that is a number of at least 0."""
        text = self.query.get(name)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise InvalidRequest(f"'{name}' must be a whole number, not {text[:40]!r}", field=name)
        return int(text)

    def _feed(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._wake()

    def _finish(self) -> None:
        self._complete = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True)
class HttpResponse:
    """One response: JSON, bytes, or a stream of chunks (with `length` if that is known in advance)."""

    status: int = 200
    body: bytes = b""
    stream: AsyncIterator[bytes | memoryview] | None = None
    length: int | None = None
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()


def json_response(value: object, status: int = 200) -> HttpResponse:
    return HttpResponse(status, json.dumps(value, separators=(",", ":")).encode())


def problem_response(error: CarrelError) -> HttpResponse:
    """Return the problem response (RFC 9457) of an error."""
    response = json_response(error.problem(), error.status)
    response.content_type = b"application/problem+json"
    return response


def decode_base64(text: object, what: str, field: str) -> bytes:
    """Decode a value of a body that must be base64 text."""
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except ValueError:
        pass
    raise InvalidRequest(f"{what} is not base64", field=field)


def require_known(given: Iterable[str], known: Collection[str], kind: str) -> None:
    """Refuse names of parameters or fields that are not known."""
    for name in sorted(set(given).difference(known)):
        hint = f"known: {', '.join(sorted(known))}"
        raise InvalidRequest(f"unknown {kind} {name[:40]!r}", field=name[:40], hint=hint)


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


class HttpRouter:
    """Routes by method and path; `{}` in a pattern matches one segment, given to the handler in `request.args`."""

    def __init__(self, on_run: Callable[[str], None]) -> None:
        """`on_run` is called with the run of each request before it is handled; it may refuse it by raising."""
        self._exact: dict[tuple[str, str], Handler] = {}
        self._patterns: list[tuple[str, list[str], Handler]] = []
        self.on_run = on_run

    def add(self, method: str, pattern: str, handler: Handler) -> None:
        if "{}" in pattern:
            self._patterns.append((method, pattern.split("/"), handler))
        else:
            self._exact[method, pattern] = handler

    def find(self, request: HttpRequest) -> Handler:
        """Return the handler of a request, or raise `NotFound`."""
        handler = self._exact.get((request.method, request.path))
        if handler is not None:
            return handler
        parts = request.path.split("/")
        for method, pattern, candidate in self._patterns:
            if method == request.method and len(parts) == len(pattern):
                args = [got for want, got in zip(pattern, parts, strict=True) if want == "{}"]
                if all(want in {"{}", got} for want, got in zip(pattern, parts, strict=True)):
                    request.args = tuple(args)
                    return candidate
        raise NotFound(f"no such resource: {request.method} {request.path[:200]}")


_REASONS = {200: b"OK", 201: b"Created", 204: b"No Content", 206: b"Partial Content", 400: b"Bad Request"}
_HEADS = {status: b"HTTP/1.1 %d %s\r\n" % (status, reason) for status, reason in _REASONS.items()}


class HttpConnection(asyncio.Protocol):
    """One keep-alive connection; requests on it are answered one after the other."""

    def __init__(self, router: HttpRouter, tasks: set[asyncio.Task[None]]):
        self._router = router
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()  # asked once: before Python 3.12 that is a system call
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._run: str | None = None
        self._request: HttpRequest | None = None
        self._queue: list[HttpRequest] = []
        self._task: asyncio.Task[None] | None = None
        self._buffered = 0
        self._header_bytes = 0
        self._in_head = False
        self._head_bytes = 0
        self._paused = False
        self._can_write = asyncio.Event()
        self._can_write.set()
        self.closed = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio: wake every handler that waits for this connection."""
        self.closed = True
        self._can_write.set()
        for request in [self._request, *self._queue]:
            if request is not None:
                request._wake()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """Called by asyncio when the caller reads too slowly."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """Called by asyncio when there is room again."""
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(InvalidRequest("protocol upgrades are not supported"))
        except httptools.HttpParserError as error:
            cause = error.__context__  # the parser wraps what its callbacks raise
            self._refuse(cause if isinstance(cause, CarrelError) else InvalidRequest(f"not HTTP: {error}"))
        else:
            # The parser reports a header only when it is complete, so it would buffer one that never ends.
            self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
            if self._head_bytes > 4 * MAX_HEADERS:
                self._refuse(TooLarge(f"the headers are longer than {MAX_HEADERS} bytes"))

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._url = b""
        self._run = None
        self._header_bytes = 0
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > MAX_HEADERS:
            raise TooLarge(f"the request line is longer than {MAX_HEADERS} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser: one header has a meaning here; the size of all is limited."""
        self._header_bytes += len(name) + len(value)
        if name == RUN:
            self._run = value.decode("latin-1")
        if self._header_bytes > MAX_HEADERS:
            raise TooLarge(f"the headers are longer than {MAX_HEADERS} bytes")

    def on_headers_complete(self) -> None:
        self._in_head = False
        path, _, query = self._url.decode("latin-1").partition("?")
        pairs = dict(parse_qsl(query, keep_blank_values=True, errors="surrogateescape")) if query else {}
        if "%" in path:
            path = "/".join(unquote(part) for part in path.split("/"))
        self._request = HttpRequest(self._parser.get_method().decode(), path, pairs, run=self._run, _connection=self)
        self._queue.append(self._request)
        if self._task is None:
            self._task = self._loop.create_task(self._serve())
            self._tasks.add(self._task)
            self._task.add_done_callback(self._tasks.discard)

    def on_body(self, body: bytes) -> None:
        if self._request is not None:
            self._buffered += len(body)
            if self._buffered > HIGH_WATER and not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
            self._request._feed(body)

    def on_message_complete(self) -> None:
        if self._request is not None:
            self._request._finish()

    def consumed(self, size: int) -> None:
        """Resume reading, if a handler has taken enough of the body."""
        self._buffered -= size
        if self._paused and self._buffered <= HIGH_WATER and self._transport is not None and not self.closed:
            self._paused = False
            self._transport.resume_reading()

    # answering

    async def _serve(self) -> None:
        try:
            while self._queue and not self.closed:
                request = self._queue[0]
                try:
                    handler = self._router.find(request)
                    if request.run is not None:
                        self._router.on_run(request.run)
                    response = await handler(request)
                except CarrelError as error:
                    response = problem_response(error)
                except (ConnectionError, asyncio.CancelledError):
                    raise
                except Exception as error:
                    response = problem_response(
                        PlatformError(f"the supervisor failed: {type(error).__name__}: {error}")
                    )
                if not request._complete:
                    response.headers += ((b"connection", b"close"),)
                await self._send(response)
                if not request._complete:  # an unread body cannot be distinguished from the next request
                    self._end_unread()
                    return
                self._buffered -= sum(map(len, request._chunks))
                request._chunks.clear()
                self.consumed(0)
                self._queue.pop(0)
        except ConnectionError:
            self._close()
        finally:
            self._task = None

    async def _send(self, response: HttpResponse) -> None:
        transport = self._transport
        if transport is None or self.closed:
            return
        head = _HEADS.get(response.status) or b"HTTP/1.1 %d Problem\r\n" % response.status
        head += b"content-type: " + response.content_type + b"\r\n"
        for name, value in response.headers:
            head += name + b": " + value + b"\r\n"
        if response.stream is None:
            transport.write(head + b"content-length: %d\r\n\r\n" % len(response.body) + response.body)
            if not self._can_write.is_set():
                await self._can_write.wait()
            return
        chunked = response.length is None
        length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % (response.length or 0)
        transport.write(head + length + b"\r\n\r\n")
        try:
            async for chunk in response.stream:
                if transport.is_closing():
                    return
                if not chunk:  # an empty chunk would be the end
                    continue
                if chunked:
                    transport.writelines((b"%x\r\n" % len(chunk), chunk, b"\r\n"))
                else:
                    transport.write(chunk)
                if not self._can_write.is_set():
                    await self._can_write.wait()
        except Exception as error:
            transport.abort()  # the status is already sent: only a broken body can report the failure
            raise ConnectionAbortedError(str(error)) from error
        if chunked:
            transport.write(b"0\r\n\r\n")

    def _refuse(self, error: CarrelError) -> None:
        if self._transport is not None and not self.closed:
            response = problem_response(error)
            head = b"HTTP/1.1 %d Problem\r\ncontent-type: application/problem+json\r\n" % response.status
            self._transport.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(response.body))
            self._transport.write(response.body)
        self._end_unread()

    def _end_unread(self) -> None:
        """Close after an answer to a request that was not read to its end."""
        self._close()

    def _close(self) -> None:
        if self._transport is not None and not self.closed:
            self._transport.close()
