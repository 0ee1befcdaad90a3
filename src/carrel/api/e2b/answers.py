"""The answers that E2B's SDKs read: errors of the control API, of the proxy before a sandbox and of Connect;
and streams of Connect messages.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from carrel.api.e2b.inner import Json, Refused
from carrel.api.parts import ClosingStream
from carrel.errors import CarrelError
from carrel.primitives import tasks

MOST_BODY = 16 * 1024 * 1024
_END = 2
_CODES = {
    400: "invalid_argument",
    401: "unauthenticated",
    403: "permission_denied",
    404: "not_found",
    409: "failed_precondition",
    413: "resource_exhausted",
    422: "invalid_argument",
    429: "resource_exhausted",
    501: "unimplemented",
    502: "unavailable",
    503: "unavailable",
    504: "deadline_exceeded",
}
_STATUSES = {"already_exists": 409, "failed_precondition": 400, "not_found": 404, "unimplemented": 501}


class Failure(Exception):
    """A request that is refused here, before carrel's API sees it. `code` is the one of Connect."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or _CODES.get(status, "internal")


class SandboxGone(Failure):
    """The sandbox does not exist, or is paused. E2B's SDKs know this by the words of its proxy."""

    def __init__(self, sandbox: str):
        super().__init__(502, "The sandbox was not found", "unavailable")
        self.sandbox = sandbox


def failure_of(error: Exception) -> Failure:
    """Return an error of carrel as a failure."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, Refused):
        status = {422: 400}.get(error.status, error.status)
        code = "already_exists" if error.code == "already_exists" else _CODES.get(error.status)
        return Failure(status, error.text, code)
    if isinstance(error, CarrelError):
        return Failure(error.status, str(error))
    if isinstance(error, ClientDisconnect):
        return Failure(499, "the caller has gone", "canceled")
    raise error


def as_json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # File names may contain surrogate escapes, which only the `json` module encodes.
    return Response(json.dumps(value), status, headers, "application/json")


def plain(error: Exception) -> Response:
    """Return an error as the control API does, the routes of files and the proxy."""
    failure = failure_of(error)
    headers: dict[str, str] = {}
    if failure.status in {429, 502, 503, 504}:
        again = isinstance(error, Refused) and error.problem.get("retry") is not False and error.retry_after
        headers = {"retry-after": str(again)} if again else {"should-retry": "false"}
    body: Json = {"code": failure.status, "message": failure.message}
    if isinstance(failure, SandboxGone):
        body = {"sandboxId": failure.sandbox, **body}
    return as_json(body, failure.status, headers)


def connect_error(error: Exception) -> Response:
    """Return an error as a unary call of Connect does."""
    failure = failure_of(error)
    if isinstance(failure, SandboxGone):
        return plain(failure)
    status = _STATUSES.get(failure.code, failure.status)
    return as_json({"code": failure.code, "message": failure.message}, status)


def envelope(message: Json, flags: int = 0) -> bytes:
    """Return one message of a Connect stream."""
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


async def envelopes(request: Request) -> AsyncIterator[Json]:
    """Yield the messages of a request that is a stream, one for a request with one message."""
    rest = b""
    async for chunk in request.stream():
        rest += chunk
        while len(rest) >= 5:
            flags, size = struct.unpack(">BI", rest[:5])
            if size > MOST_BODY:
                raise Failure(413, f"a message is larger than {MOST_BODY} bytes")
            if len(rest) < 5 + size:
                break
            data, rest = rest[5 : 5 + size], rest[5 + size :]
            if flags & 1:
                raise Failure(501, "compressed messages are not served: send them as they are")
            if not flags & _END:
                yield object_of(data)


async def body_of(request: Request) -> Json:
    """Return the JSON object in a body; an empty body is an empty object."""
    parts, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MOST_BODY:
            raise Failure(413, f"the body is larger than {MOST_BODY} bytes")
        parts.append(chunk)
    return object_of(b"".join(parts))


def object_of(data: bytes) -> Json:
    try:
        value = json.loads(data) if data.strip() else {}
    except (ValueError, RecursionError):
        raise Failure(400, "the body is not JSON") from None
    if not isinstance(value, dict):
        raise Failure(400, "the body is not a JSON object")
    return value


def connect_stream(events: AsyncGenerator[Json, None], ping_s: float) -> Response:
    """Return events as a stream of Connect. Between them an event says every `ping_s` seconds that the stream lives."""
    return ClosingStream(_framed(events, ping_s), media_type="application/connect+json")


def failed_stream(error: Exception) -> Response:
    """Return an error as a stream of Connect that ends with it."""
    return Response(envelope(_end_of(error), _END), media_type="application/connect+json")


def _end_of(error: Exception) -> Json:
    failure = failure_of(error)
    return {"error": {"code": failure.code, "message": failure.message}}


async def _framed(events: AsyncGenerator[Json, None], ping_s: float) -> AsyncIterator[bytes]:
    end: Json = {}
    started = False
    async with aclosing(events):
        following: asyncio.Future[Json] | None = None
        try:
            while True:
                following = asyncio.ensure_future(anext(events))
                # No event comes before the first, which says that the work has begun.
                while not (await asyncio.wait({following}, timeout=ping_s if started else None))[0]:
                    yield envelope({"event": {"keepalive": {}}})
                yield envelope(following.result())
                started = True
        except StopAsyncIteration:
            pass
        except (Failure, Refused, CarrelError, ClientDisconnect) as error:
            end = _end_of(error)
        finally:
            if following is not None:
                await tasks.cancel([following])
    yield envelope(end, _END)
