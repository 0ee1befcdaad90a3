"""The connection to one carrel server: sends requests, turns failures into carrel's errors, parses answers.

Knows transport and errors; knows no resource.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, Protocol, TypeVar, cast
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from carrel.client._async.wire import FAILED, LATE, LOST, NOT_REACHED, AsyncReply, AsyncWire, Patience
from carrel.client._io_async import Progress, Source, pieces
from carrel.client.deadlines import checked_seconds
from carrel.client.locate import START_HINT, Address
from carrel.client.requests import trace_headers
from carrel.errors import CarrelError, Denied, InvalidRequest, PlatformError, ServerUnreachable, from_problem

Model = TypeVar("Model", bound=BaseModel)
Item_co = TypeVar("Item_co", covariant=True)
Query = Mapping[str, str | int | None]
Deadline = float | Literal["usual"] | None
"""How long the server may take: `usual` is the timeout of the client, None as long as it needs. A number is the
deadline of a command, to which the time to kill it and to send its output is added.
"""

PAGE = 200
CONNECT_S = 10.0
GRACE_S = 30.0
NOT_FOR_AGENTS = frozenset({"scope(approve)", "scope(administer)"})
"""The rules by which a server refuses an agent what only a person or an administrator may do."""
ADMINISTRATOR_HINT = (
    "this is the agent's token, which programs on the server's machine use; "
    "Client(administrator=True) uses the administrator's"
)


class Page(Protocol[Item_co]):
    """One page of a list. `next` is the cursor of the following page, None on the last."""

    @property
    def items(self) -> Sequence[Item_co]: ...

    @property
    def next(self) -> str | None: ...


def encoded(body: Mapping[str, object]) -> bytes:
    """Encode a request body as JSON, without the fields that are None."""
    given = {key: value for key, value in body.items() if value is not None}
    try:
        return json.dumps(given, allow_nan=False, default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from None


def _plain(value: object) -> object:
    """Callers may give any mapping or iterable; JSON knows only dict and list."""
    if isinstance(value, Mapping):
        return {**value}
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray | memoryview):
        return [*value]
    raise TypeError(f"{type(value).__name__} is not a JSON value")


class AsyncConnection:
    """A connection pool and the headers of its requests. One client and its sandboxes share it."""

    def __init__(self, address: Address, timeout: float):
        self.address = address
        self.carried: dict[str, str] = {}
        self.wait_s = 0.0
        limit = checked_seconds(timeout)
        connect = CONNECT_S if limit is None else min(CONNECT_S, limit)
        self._default: Patience = {"connect": connect, "read": limit, "write": limit, "pool": limit}
        headers = {"user-agent": "carrel-python", "accept-encoding": "identity"}
        if address.token:
            headers["authorization"] = f"Bearer {address.token}"
        # A proxy of the environment cannot reach a server on this machine.
        self._wire = AsyncWire(address.url, headers, local=address.loopback)

    def carrying(self, headers: Mapping[str, str], *, wait_s: float = 0.0) -> AsyncConnection:
        """Return a view of this connection that adds headers and allows `wait_s` more seconds for each answer."""
        view = copy.copy(self)
        view.carried = {**self.carried, **headers}
        view.wait_s = wait_s or self.wait_s
        return view

    async def close(self) -> None:
        """Close every connection of the pool."""
        await self._wire.close()

    def patience(self, deadline: Deadline) -> Patience:
        """Return the transport timeouts for a deadline."""
        if deadline != "usual":
            limit = checked_seconds(deadline)
            return {**self._default, "read": None if limit is None else limit + GRACE_S + self.wait_s}
        read = self._default["read"]
        return {**self._default, "read": read + self.wait_s} if self.wait_s and read is not None else self._default

    async def get(
        self, model: type[Model], path: str, query: Query | None = None, *, deadline: Deadline = "usual"
    ) -> Model:
        """Send GET and parse the answer."""
        return _parsed(model, await self.send("GET", path, query=query, deadline=deadline))

    async def post(
        self,
        model: type[Model],
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        deadline: Deadline = "usual",
        headers: Mapping[str, str] | None = None,
    ) -> Model:
        """Send POST with a JSON body and parse the answer."""
        return _parsed(model, await self.send("POST", path, body=body, deadline=deadline, headers=headers))

    async def put(
        self, model: type[Model], path: str, body: Mapping[str, object] | bytes, *, deadline: Deadline = "usual"
    ) -> Model:
        """Send PUT with a JSON body, which may be encoded already, and parse the answer."""
        json_type = {"content-type": "application/json"}
        return _parsed(model, await self.send("PUT", path, body=body, deadline=deadline, headers=json_type))

    async def pages(
        self, model: type[Page[Item_co]], path: str, query: Query | None = None, *, limit: int | None = None
    ) -> AsyncIterator[Item_co]:
        """Yield the items of a list and fetch the next page when one is used up."""
        cursor: str | None = None
        while True:
            asked = {**(query or {}), "cursor": cursor, "limit": limit or PAGE}
            page: Page[Item_co] = await self.get(cast(Any, model), path, asked)
            for item in page.items:
                yield item
            cursor = page.next
            if cursor is None:
                return

    async def upload(
        self,
        model: type[Model],
        method: str,
        path: str,
        *,
        query: Query | None = None,
        source: Source,
        progress: Progress | None = None,
        deadline: Deadline = "usual",
    ) -> Model:
        """Send bytes of any size and parse the answer."""
        content = source if isinstance(source, bytes) and progress is None else pieces(source, progress)
        return _parsed(model, await self.send(method, path, query=query, body=content, deadline=deadline))

    async def pieces(
        self,
        path: str,
        query: Query | None = None,
        *,
        method: str = "GET",
        body: Mapping[str, object] | AsyncIterable[bytes] | None = None,
        deadline: Deadline = "usual",
    ) -> AsyncGenerator[bytes, None]:
        """Yield an answer of any size as it arrives."""
        response = await self.send(method, path, query=query, body=body, deadline=deadline, stream=True)
        try:
            async for piece in response.aiter_raw():
                yield piece
        except FAILED as error:
            raise self.unreachable(error) from None
        finally:
            await response.aclose()

    async def lines(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: Mapping[str, object] | AsyncIterable[bytes] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of an answer that the server goes on writing, as they arrive."""
        held = b""
        async with aclosing(self.pieces(path, query, method=method, body=body, deadline=None)) as arriving:
            async for piece in arriving:
                *whole, held = (held + piece).split(b"\n")
                for line in whole:
                    yield line

    async def send(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Mapping[str, object] | bytes | AsyncIterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        deadline: Deadline = "usual",
        stream: bool = False,
    ) -> AsyncReply:
        """Send a request and raise the error that the answer stands for.

        A mapping is sent as JSON, bytes as they are. With `stream` the body of the answer is left to be read, and the
        caller closes it.
        """
        sent = {**trace_headers(), **(headers or {}), **self.carried}
        content = encoded(body) if isinstance(body, Mapping) else body
        if content is not None:
            sent.setdefault("content-type", "application/octet-stream" if content is body else "application/json")
        target, patience = _target(path, query), self.patience(deadline)
        try:
            try:
                reply = await self._wire.send(method, target, sent, content, patience)
            except LOST:
                # The server may close an idle connection just as it is reused; only a GET can be sent twice.
                if method != "GET":
                    raise
                reply = await self._wire.send(method, target, sent, content, patience)
            if not stream or not 200 <= reply.status < 300:
                await reply.aread()
        except FAILED as error:
            raise self.unreachable(error) from None
        if 200 <= reply.status < 300:
            return reply
        problem = problem_of(reply.status, reply.content)
        if self.address.local_agent and isinstance(problem, Denied) and problem.rule in NOT_FOR_AGENTS:
            problem.hint = ADMINISTRATOR_HINT
        raise problem

    def unreachable(self, error: Exception) -> CarrelError:
        """Return the error for a failed transport."""
        url = self.address.url
        if isinstance(error, (*NOT_REACHED, OSError)):
            return ServerUnreachable(f"no carrel server answers at {url}", hint=START_HINT)
        if isinstance(error, (*LATE, TimeoutError)):
            return ServerUnreachable(
                f"the server at {url} did not answer in time",
                hint="is it busy? Client(timeout=…) waits longer",
            )
        return ServerUnreachable(
            f"the connection to {url} broke: {error}", hint="see the server's own output for the reason"
        )


def _parsed(model: type[Model], response: AsyncReply) -> Model:
    try:
        return model.model_validate_json(response.content)
    except ValidationError:
        pass
    try:
        # Names that are not UTF-8 come with surrogate escapes, which only this parser takes.
        return model.model_validate(json.loads(response.content))
    except (ValueError, RecursionError):
        raise PlatformError(
            f"the server's answer is not a {model.__name__}",
            hint="client and server may be of different versions, or CARREL_URL names something else",
        ) from None


def _target(path: str, query: Query | None) -> str:
    if not query:
        return path
    given = {key: value for key, value in query.items() if value is not None}
    # Names that are not UTF-8 reach Python with surrogate escapes; the wire takes their bytes.
    return f"{path}?{urlencode(given, errors='surrogateescape', quote_via=quote)}" if given else path


def problem_of(status: int, body: bytes | bytearray) -> CarrelError:
    """Return the error that a refused request stands for."""
    try:
        problem = json.loads(body)
    except ValueError:
        problem = None
    return from_problem(problem if isinstance(problem, dict) else {}, status)
