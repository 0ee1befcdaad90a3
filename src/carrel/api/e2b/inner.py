"""Requests of carrel's own API from inside this process: through the gate, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from starlette.types import ASGIApp, Message, Receive, Scope

from carrel.identity import Identity
from carrel.primitives import tasks
from carrel.primitives.cache import Cache

IDENTIFIED = "carrel.identified"
"""The key of the ASGI scope under which the gate finds the identity of a caller that is known already."""
WAIT_S = 600
"""How long a request waits for a person, unless its caller disconnects."""
_WAITING = 8
"""Messages of a stream that wait for their reader."""
Json = dict[str, Any]
Watchers = Cache[str, tuple[int, str]]
"""How far the events of a watcher were read, and the directory, for callers that ask for them from time to time."""


class Refused(Exception):
    """An answer of carrel's API that is no success."""

    def __init__(self, status: int, problem: Json, retry_after: str | None = None):
        super().__init__(problem.get("detail"))
        self.status = status
        self.problem = problem
        self.retry_after = retry_after

    @property
    def code(self) -> str:
        """The stable code of the problem."""
        return str(self.problem.get("code", ""))

    @property
    def text(self) -> str:
        """What happened and what to do, for a person or an agent."""
        said = f"{self.problem.get('title')}: {self.problem.get('detail')}"
        if hint := self.problem.get("hint"):
            said += f" ({hint})"
        more = [f"{name} {self.problem[name]}" for name in ("rule", "approval") if self.problem.get(name)]
        return f"{said} [{', '.join(more)}]" if more else said


@dataclass(slots=True)
class InnerReply:
    """A complete answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body) if self.body else None


@dataclass(slots=True)
class InnerStream:
    """An answer whose body is read as it comes."""

    headers: dict[str, str]
    chunks: AsyncIterator[bytes]

    async def lines(self) -> AsyncIterator[Any]:
        """Yield the JSON values of a body that has one on each line."""
        rest = b""
        async for chunk in self.chunks:
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                if line:
                    yield json.loads(line)


class Inner:
    """Makes requests for one caller. `scope` and `receive` are those of the request that is translated: when its caller
    disconnects, so do these.
    """

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, identity: Identity, watchers: Watchers):
        self.watchers = watchers
        self._app = app
        self._scope = scope
        self._receive = receive
        self.identity = identity

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, object] | None = None,
        content: AsyncIterator[bytes] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> InnerReply:
        """Make a request and return its answer; `Refused` unless it succeeded."""
        found: dict[str, Any] = {"status": 500, "headers": {}}
        parts: list[bytes] = []

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                found.update(status=message["status"], headers=_texts(message))
            else:
                parts.append(message.get("body", b""))

        broken: list[Exception] = []
        scope, receive = self._request(method, path, body, query, content, headers, broken)
        await self._app(scope, receive, send)
        if broken:
            raise broken[0]
        return _checked(InnerReply(found["status"], found["headers"], b"".join(parts)))

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, object] | None = None,
    ) -> AsyncIterator[InnerStream]:
        """Make a request whose answer is a stream; it ends with the block."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue(_WAITING)
        scope, receive = self._request(method, path, body, query, None, None, [])

        async def serve() -> None:
            try:
                await self._app(scope, receive, messages.put)
            finally:
                if messages.full():
                    messages.get_nowait()
                messages.put_nowait(None)

        async def chunks() -> AsyncIterator[bytes]:
            while (message := await messages.get()) is not None:
                if message.get("body"):
                    yield message["body"]

        serving = asyncio.create_task(serve())
        try:
            first = await messages.get()
            if first is None:
                raise Refused(500, {"title": "carrel failed", "detail": "the request had no answer"})
            if first["status"] >= 300:
                whole = b"".join([chunk async for chunk in chunks()])
                _checked(InnerReply(first["status"], _texts(first), whole))
            yield InnerStream(_texts(first), chunks())
        finally:
            while not messages.empty():  # what waits for room must be able to end
                messages.get_nowait()
            await tasks.cancel([serving])

    def _request(
        self,
        method: str,
        path: str,
        body: object,
        query: Mapping[str, object] | None,
        content: AsyncIterator[bytes] | bytes | None,
        headers: Mapping[str, str] | None,
        broken: list[Exception],
    ) -> tuple[Scope, Receive]:
        given = [(b"host", b"localhost"), (b"carrel-wait", b"%d" % WAIT_S)]
        given += [(name, value) for name, value in self._scope["headers"] if name in _PASSED]
        given += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        if body is not None:
            content = json.dumps(body).encode()
            given.append((b"content-type", b"application/json"))
        if isinstance(content, bytes):
            given.append((b"content-length", b"%d" % len(content)))
        elif content is not None:
            given.append((b"transfer-encoding", b"chunked"))
        wanted = {name: value for name, value in (query or {}).items() if value is not None}
        scope = {
            **{name: value for name, value in self._scope.items() if name in _KEPT},
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": quote(path).encode(),
            "query_string": urlencode(wanted, errors="surrogateescape").encode(),
            "headers": given,
            IDENTIFIED: self.identity,
        }
        return scope, self._body(content, broken)

    def _body(self, content: AsyncIterator[bytes] | bytes | None, broken: list[Exception]) -> Receive:
        """Return a `receive` for a body. If its content fails, the body breaks off, and `broken` gets the error."""
        ended = False

        async def receive() -> Message:
            nonlocal ended
            if ended:
                return await self._receive()
            if isinstance(content, bytes) or content is None:
                ended = True
                return {"type": "http.request", "body": content or b"", "more_body": False}
            try:
                async for chunk in content:
                    return {"type": "http.request", "body": chunk, "more_body": True}
            except Exception as error:
                broken.append(error)
                return {"type": "http.disconnect"}
            ended = True
            return {"type": "http.request", "body": b"", "more_body": False}

        return receive


_KEPT = frozenset({"asgi", "http_version", "scheme", "server", "client", "root_path", "extensions", "state"})
_PASSED = frozenset({b"x-request-id", b"traceparent", b"tracestate"})


def _texts(message: Message) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in message.get("headers", ())}


def _checked(reply: InnerReply) -> InnerReply:
    if reply.status < 300:
        return reply
    try:
        problem = json.loads(reply.body)
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {"title": "carrel failed", "detail": reply.body[:500].decode("utf-8", "replace")}
    raise Refused(reply.status, problem, reply.headers.get("retry-after"))
