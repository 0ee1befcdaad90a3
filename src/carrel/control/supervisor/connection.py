"""HTTP to one supervisor over its link: pooled, streaming, with back-pressure in both directions.

Answers come from hostile code: sizes and times are bounded, and an answer that is not HTTP is `SandboxLost`. Knows no
route.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from carrel.control.http_wire import MAX_PROBLEM, HttpWire
from carrel.errors import CarrelError, LimitExceeded, PortNotOpen, SandboxLost, from_problem
from carrel.providers.links import SupervisorLink
from carrel.tracing import span

Json = dict[str, Any]

MAX_JSON = 64 * 1024 * 1024
MAX_OPEN = 512
MAX_IDLE = 16
SMALL_BODY = 32 * 1024
CONNECT_TIMEOUT = 5.0
_HEADS = {method: f"{method} ".encode() for method in ("GET", "POST", "PUT", "DELETE")}
_HOST = b" HTTP/1.1\r\nhost: supervisor\r\n"

run: ContextVar[str | None] = ContextVar("carrel_run", default=None)
"""The approved run that every request of this task belongs to; the supervisor remembers that it was begun."""


def _host() -> bytes:
    name = run.get()
    return _HOST if name is None else b"%scarrel-run: %s\r\n" % (_HOST, name.encode("ascii"))


def _shown(path: str) -> str:
    """Return the part of a path that names no file and no command."""
    return "/" + path.partition("?")[0].split("/", 2)[1]


def _lost(why: str) -> SandboxLost:
    return SandboxLost(f"the sandbox {why}", hint="deploy_or_resume starts it again on the same workspace")


def _unsent(why: str) -> SandboxLost:
    error = _lost(why)
    error.sent = False
    return error


def problem_from(status: int, body: bytes) -> CarrelError:
    """Return the error of a problem answer; its contents are bounded."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return _lost(f"answered {status} without a reason")
    if status < 400 or not isinstance(value, dict) or not isinstance(value.get("code"), str):
        return _lost(f"answered {status} without a reason")
    bounded: Json = {}
    for key, each in list(value.items())[:32]:
        if isinstance(each, str):
            bounded[key[:64]] = each[:4096]
        elif each is None or isinstance(each, bool | int | float):
            bounded[key[:64]] = each
        elif isinstance(each, list) and len(each) <= 64:
            bounded[key[:64]] = [str(item)[:256] for item in each]
    error = from_problem(bounded, status)
    # A sandbox may report failures of its own commands and files, not those that only the control plane can know.
    return _lost("claimed a failure it cannot know of") if error.status in {401, 403, 503} else error


class SupervisorDownload:
    """An answer that is being read. `length` is None if the supervisor did not give it."""

    def __init__(self, wire: HttpWire, idle: float | None):
        self._wire = wire
        self._idle = idle
        self.status = wire.status
        self.length = wire.length

    async def __aiter__(self) -> AsyncIterator[bytes]:
        body = self._wire.body(self._idle)
        try:
            async for chunk in body:
                yield chunk
        finally:
            await body.aclose()  # type: ignore[attr-defined]
            self.close()

    def close(self) -> None:
        wire, self._wire = self._wire, _CLOSED
        if wire is not _CLOSED:
            wire.release()


class SupervisorStream:
    """Bytes to and from a server in the sandbox. One task reads, one writes."""

    def __init__(self, wire: HttpWire, port: int):
        self._wire = wire
        self._port = port
        self._chunks = wire.body(None)

    @property
    def ended(self) -> bool:
        """Whether the server sends no more, or the stream broke."""
        return self._wire.complete or self._wire.closed

    async def read(self) -> bytes:
        """Wait for the next bytes; empty when the server sends no more."""
        try:
            return await anext(self._chunks, b"")
        except SandboxLost:
            raise self._broken() from None

    async def write(self, data: bytes) -> None:
        """Send bytes, and wait while the server is behind."""
        wire = self._wire
        if wire.closed or wire.complete or wire.transport is None:
            raise self._broken()
        if data:
            wire.transport.writelines((b"%x\r\n" % len(data), data, b"\r\n"))
            await wire.drain(None)

    def end(self) -> None:
        """Tell the server that no more comes."""
        if not self._wire.closed and self._wire.transport is not None:
            self._wire.transport.write(b"0\r\n\r\n")

    def close(self) -> None:
        """End both directions at once. May be repeated."""
        wire, self._wire = self._wire, _ENDED
        if wire is not _ENDED:
            wire.closed = True  # a connection that carried a stream is not used again
            if wire.transport is not None:
                wire.transport.abort()
            wire.release()

    def _broken(self) -> PortNotOpen:
        return PortNotOpen(
            f"the server on port {self._port} broke the connection off", hint="see its output", port=self._port
        )


class SupervisorConnection:
    """A pool of connections to one supervisor."""

    def __init__(self, link: SupervisorLink):
        self.loop = asyncio.get_running_loop()
        self._link = link
        self._idle: list[HttpWire] = []
        self._open: set[HttpWire] = set()
        self._closed = False

    async def request_json(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        deadline: float | None = 30.0,
        max_bytes: int = MAX_JSON,
    ) -> Json:
        """Send a request with a JSON body; return the JSON object of the answer, empty for an answer without a body."""
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        answer = await self.request(method, path, data, deadline=deadline, max_bytes=max_bytes)
        return self._object(answer)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        deadline: float | None = 30.0,
        max_bytes: int = MAX_JSON,
    ) -> bytes:
        """Send a request, return the body of a successful answer; a problem answer is raised as its error. Without a
        deadline it waits until the sandbox answers or ends.
        """
        with span("supervisor", method=method, path=_shown(path)):
            return await self._request(method, path, body, deadline=deadline, max_bytes=max_bytes)

    async def _request(
        self, method: str, path: str, body: bytes | None, *, deadline: float | None, max_bytes: int
    ) -> bytes:
        wire = self._idle.pop() if self._idle else await self._connect()
        wire.begin(max_bytes)
        spare = wire.duplicate() if body is not None and len(body) > SMALL_BODY else -1
        try:
            transport = wire.transport
            assert transport is not None
            if body is None:
                transport.write(_HEADS[method] + path.encode("ascii") + _host() + b"\r\n")
            else:
                head = _HEADS[method] + path.encode("ascii") + _host()
                transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            answer = await wire.finish(deadline, spare)
            if not 200 <= wire.status < 300:
                raise problem_from(wire.status, answer[:MAX_PROBLEM])
            return answer
        finally:
            if spare >= 0:
                os.close(spare)
            wire.release()

    async def upload(
        self, method: str, path: str, chunks: AsyncIterator[bytes], *, stall: float = 60.0, max_bytes: int = MAX_JSON
    ) -> Json:
        """Send a body of any length as it comes; `stall` bounds how long the supervisor may read nothing."""
        first = bytearray()
        async for chunk in chunks:
            first += chunk
            if len(first) > SMALL_BODY:
                break
        else:
            return self._object(await self.request(method, path, bytes(first), deadline=stall, max_bytes=max_bytes))
        wire = self._idle.pop() if self._idle else await self._connect()
        wire.begin(max_bytes)
        spare = wire.duplicate()
        try:
            transport = wire.transport
            assert transport is not None
            head = _HEADS[method] + path.encode("ascii") + _host() + b"transfer-encoding: chunked\r\n\r\n"
            transport.writelines((head, b"%x\r\n" % len(first), bytes(first), b"\r\n"))
            await wire.drain(stall)
            async for chunk in chunks:
                if wire.complete or wire.failure is not None:
                    break
                if chunk:
                    transport.writelines((b"%x\r\n" % len(chunk), chunk, b"\r\n"))
                    await wire.drain(stall)
            else:
                if not wire.closed:
                    transport.write(b"0\r\n\r\n")
            early = wire.complete
            answer = await wire.finish(stall, spare)
            if early:
                wire.closed = True  # the rest of the body was not sent: this connection cannot be used again
                transport.abort()
            if not 200 <= wire.status < 300:
                raise problem_from(wire.status, answer[:MAX_PROBLEM])
            return self._object(answer)
        finally:
            if spare >= 0:
                os.close(spare)
            wire.release()

    async def download(
        self,
        path: str,
        body: bytes = b"",
        *,
        method: str = "GET",
        deadline: float = 30.0,
        idle: float | None = 60.0,
    ) -> SupervisorDownload:
        """Open a stream. The caller reads it to the end or closes it; `idle` bounds the time between two chunks."""
        wire = self._idle.pop() if self._idle else await self._connect()
        wire.begin(0)
        try:
            assert wire.transport is not None
            size = b"" if method == "GET" else b"content-length: %d\r\n" % len(body)
            wire.transport.write(_HEADS[method] + path.encode("ascii") + _host() + size + b"\r\n" + body)
            await wire.head(deadline)
            await _require_success(wire, deadline)
        except BaseException:
            wire.release()
            raise
        return SupervisorDownload(wire, idle)

    async def stream(self, path: str, port: int, *, deadline: float) -> SupervisorStream:
        """Open a stream of bytes in both directions. The caller closes it."""
        wire = self._idle.pop() if self._idle else await self._connect()
        wire.begin(0)
        try:
            assert wire.transport is not None
            wire.transport.write(b"POST %s%stransfer-encoding: chunked\r\n\r\n" % (path.encode("ascii"), _host()))
            await wire.head(deadline)
            await _require_success(wire, deadline)
        except BaseException:
            wire.closed = True
            wire.release()
            raise
        return SupervisorStream(wire, port)

    @staticmethod
    def _object(answer: bytes) -> Json:
        if not answer:
            return {}
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError):
            raise _lost("answered something that is not JSON") from None
        if not isinstance(value, dict):
            raise _lost("answered something that is not an object")
        return value

    async def _connect(self) -> HttpWire:
        if self._closed:
            raise _unsent("has ended")
        if len(self._open) >= MAX_OPEN:
            raise LimitExceeded(
                f"more than {MAX_OPEN} requests to this sandbox at once", hint="wait for some of them to finish"
            )
        wire = HttpWire(self, _lost)
        self._open.add(wire)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await self._link.connect(lambda: wire)
        except (OSError, TimeoutError):
            self._open.discard(wire)
            raise _unsent("does not answer") from None
        except BaseException:
            self._open.discard(wire)
            raise
        return wire

    def keep(self, wire: HttpWire) -> None:
        if self._closed or len(self._idle) >= MAX_IDLE:
            self._open.discard(wire)
            if wire.transport is not None:
                wire.transport.close()
        else:
            self._idle.append(wire)

    def forget(self, wire: HttpWire) -> None:
        self._open.discard(wire)
        if wire in self._idle:
            self._idle.remove(wire)

    def close(self) -> None:
        """Close every connection; a request that waits gets `SandboxLost`."""
        self._closed = True
        self._idle.clear()
        for wire in list(self._open):
            wire.fail(_lost("has ended"))
        self._open.clear()


async def _require_success(wire: HttpWire, deadline: float) -> None:
    """Raise the problem that an answer tells of, unless it succeeded. No more than the largest problem is read."""
    if 200 <= wire.status < 300:
        return
    problem = bytearray()
    async for chunk in wire.body(deadline):
        problem += chunk
        if len(problem) > MAX_PROBLEM:
            break
    raise problem_from(wire.status, bytes(problem[:MAX_PROBLEM]))


class _Ended:
    """Stands for the connection of a stream that was closed."""

    complete, closed, transport = True, True, None


_CLOSED: Any = object()
_ENDED: Any = _Ended()
