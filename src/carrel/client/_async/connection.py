"""One HTTP connection pool to a carrel server: sends, maps failures to the error tree, parses answers.

Knows transport and errors; knows no resource.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from carrel.client._async.wire import FAILED, LATE, LOST, NOT_REACHED, AsyncReply, AsyncWire, Patience
from carrel.client._io_async import Progress, Source, pieces
from carrel.client.deadlines import seconds
from carrel.client.locate import START_HINT, Address
from carrel.errors import CarrelError, Denied, InvalidRequest, PlatformError, ServerUnreachable, from_problem

Model = TypeVar("Model", bound=BaseModel)
Item_co = TypeVar("Item_co", covariant=True)
Query = Mapping[str, str | int | None]

PAGE = 200
CONNECT_S = 10.0
# What the server needs on top of a command's own deadline: to kill the tree and to send the output.
GRACE_S = 30.0
NOT_FOR_AGENTS = frozenset({"scope(approve)", "scope(administer)"})
"""The rules by which a server refuses an agent what only a person or an administrator may do."""
ADMINISTRATOR_HINT = (
    "this is the agent's token, which programs on the server's machine use; "
    "Client(administrator=True) uses the administrator's"
)
_JSON = {"content-type": "application/json"}


class Page(Protocol[Item_co]):
    """A part of a list, and where the next part begins."""

    @property
    def items(self) -> Sequence[Item_co]:
        """The items of this part."""

    @property
    def next(self) -> str | None:
        """What to ask for the next part with; None at the end."""


def encoded(body: Mapping[str, object]) -> bytes:
    """A request body without the fields that were not given."""
    try:
        return json.dumps({key: value for key, value in body.items() if value is not None}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from None


class AsyncConnection:
    """Shared by everything one client makes."""

    def __init__(self, address: Address, timeout: float):
        self.address = address
        self.headers = {"user-agent": "carrel-python", "accept-encoding": "identity"}
        if address.token:
            self.headers["authorization"] = f"Bearer {address.token}"
        self.carried: dict[str, str] = {}
        self.wait_s = 0.0
        limit = seconds(timeout)
        connect = CONNECT_S if limit is None else min(CONNECT_S, limit)
        self._default: Patience = {"connect": connect, "read": limit, "write": limit, "pool": limit}
        # A proxy of the environment has no way to a server on this machine.
        self._wire = AsyncWire(address.url, self.headers, local=address.loopback)

    def carrying(self, headers: Mapping[str, str], *, wait_s: float = 0.0) -> AsyncConnection:
        """The same pool for requests that carry these headers too, and may take `wait_s` longer to be answered."""
        view = copy.copy(self)
        view.carried = {**self.carried, **headers}
        view.wait_s = wait_s or self.wait_s
        return view

    async def close(self) -> None:
        """Close every connection of the pool."""
        await self._wire.close()

    def patience(self, deadline: float | None) -> Patience:
        """Timeouts for a request that waits for a command; without a deadline the server decides how long."""
        limit = seconds(deadline)
        return {**self._default, "read": None if limit is None else limit + GRACE_S + self.wait_s}

    async def get(self, model: type[Model], path: str, query: Query | None = None) -> Model:
        """GET a model."""
        return self._parsed(model, await self._send("GET", path, query=query))

    async def post(
        self,
        model: type[Model],
        path: str,
        body: bytes,
        *,
        timeout: Patience | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Model:
        """POST JSON, get a model."""
        response = await self._send("POST", path, body=body, timeout=timeout, headers=headers)
        return self._parsed(model, response)

    async def put(self, model: type[Model], path: str, body: bytes, *, timeout: Patience | None = None) -> Model:
        """PUT JSON, get a model."""
        return self._parsed(model, await self._send("PUT", path, body=body, timeout=timeout))

    async def pages(
        self, model: type[Page[Item_co]], path: str, query: Query, *, limit: int = 200
    ) -> AsyncIterator[Item_co]:
        """The items of a list, page by page."""
        cursor: str | None = None
        while True:
            asked = {**query, "cursor": cursor, "limit": limit or PAGE}
            page: Page[Item_co] = self._parsed(cast(Any, model), await self._send("GET", path, query=asked))
            for item in page.items:
                yield item
            cursor = page.next
            if cursor is None:
                return

    async def wait(self, model: type[Model], path: str) -> Model:
        """GET a model that the server gives when something has ended."""
        return self._parsed(model, await self._send("GET", path, timeout=self.patience(None)))

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: bytes | None = None,
        json: bool = True,
        timeout: Patience | None = None,
    ) -> None:
        """Send a request whose answer does not matter beyond success."""
        await self._send(method, path, query=query, body=body, json=json, timeout=timeout)

    async def upload(
        self,
        model: type[Model],
        method: str,
        path: str,
        *,
        query: Query,
        source: Source,
        progress: Progress | None = None,
    ) -> Model:
        """Send bytes of any size, get a model."""
        whole = isinstance(source, bytes) and progress is None
        content = source if whole else pieces(source, progress)
        headers = {"content-type": "application/octet-stream", **self.carried}
        reply = await self._open(method, _target(path, query), headers, content, self._usual(), stream=False)  # type: ignore[arg-type,unused-ignore]
        return self._parsed(model, reply)

    async def exchange(self, path: str, source: Source, *, timeout: Patience | None = None) -> AsyncReply:
        """POST bytes of any size and leave the body of the answer to be read; the caller closes it."""
        headers = {"content-type": "application/octet-stream", **self.carried}
        return await self._open("POST", path, headers, pieces(source), timeout or self._usual(), stream=True)

    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: bytes | None = None,
        timeout: Patience | None = None,
    ) -> AsyncReply:
        """Send a request and leave the body of the answer to be read; the caller closes it."""
        headers = self._with(None, json=body is not None)
        return await self._open(method, _target(path, query), headers, body, timeout or self._usual(), stream=True)

    async def pieces(
        self, path: str, query: Query | None = None, timeout: Patience | None = None
    ) -> AsyncGenerator[bytes, None]:
        """GET bytes of any size as they arrive."""
        response = await self.stream("GET", path, query=query, timeout=timeout)
        try:
            async for piece in response.aiter_raw():
                yield piece
        except FAILED as error:
            raise self.unreachable(error) from None
        finally:
            await response.aclose()

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: bytes | None = None,
        timeout: Patience | None = None,
        headers: Mapping[str, str] | None = None,
        json: bool = True,
    ) -> AsyncReply:
        sent = self._with(headers, json=json and body is not None)
        return await self._open(method, _target(path, query), sent, body, timeout or self._usual(), stream=False)

    def _with(self, headers: Mapping[str, str] | None, *, json: bool) -> Mapping[str, str]:
        """The headers of one request, beyond those of all."""
        if not headers and not self.carried:
            return _JSON if json else {}
        return {**(_JSON if json else {}), **(headers or {}), **self.carried}

    def _usual(self) -> Patience:
        """The timeouts of a request without a deadline of its own, and with the time that it may wait for a person."""
        read = self._default["read"]
        if not self.wait_s or read is None:
            return self._default
        return {**self._default, "read": read + self.wait_s}

    async def _open(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        content: bytes | AsyncIterable[bytes] | None,
        patience: Patience,
        *,
        stream: bool,
    ) -> AsyncReply:
        try:
            try:
                reply = await self._wire.send(method, target, headers, content, patience)
            except LOST:
                # The server may close an idle connection just as it is reused; only a GET can be sent twice.
                if method != "GET":
                    raise
                reply = await self._wire.send(method, target, headers, content, patience)
            if not stream or not 200 <= reply.status < 300:
                await reply.aread()
        except FAILED as error:
            raise self.unreachable(error) from None
        if 200 <= reply.status < 300:
            return reply
        problem = refused(reply)
        if self.address.local_agent and isinstance(problem, Denied) and problem.rule in NOT_FOR_AGENTS:
            problem.hint = ADMINISTRATOR_HINT
        raise problem

    def unreachable(self, error: Exception) -> CarrelError:
        """The error for a failed transport, in words that help."""
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

    @staticmethod
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


def refused(response: AsyncReply) -> CarrelError:
    """The error a response that is no success stands for."""
    return problem_of(response.status, response.content)


def problem_of(status: int, body: bytes | bytearray) -> CarrelError:
    """The error of a status and a problem body."""
    try:
        problem = json.loads(body)
    except ValueError:
        problem = None
    return from_problem(problem if isinstance(problem, dict) else {}, status)
