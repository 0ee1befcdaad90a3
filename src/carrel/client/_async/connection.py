"""One HTTP connection pool to a carrel server: sends, maps failures to the error tree, parses answers.

Knows transport and errors; knows no resource.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator, Mapping
from typing import TypeVar
from urllib.parse import quote, urlencode

import httpx
from pydantic import BaseModel, ValidationError

from carrel.client._io_async import Progress, Source, pieces
from carrel.client.locate import START_HINT, Address
from carrel.errors import CarrelError, InvalidRequest, PlatformError, ServerUnreachable, from_problem

Model = TypeVar("Model", bound=BaseModel)
Query = Mapping[str, str | int | None]

CONNECT_S = 10.0
# What the server needs on top of a command's own deadline: to kill the tree and to send the output.
GRACE_S = 30.0
READ_SIZE = 256 * 1024
_JSON = {"content-type": "application/json"}
_LOST = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.CloseError)


def encoded(body: Mapping[str, object]) -> bytes:
    """A request body without the fields that were not given."""
    try:
        return json.dumps({key: value for key, value in body.items() if value is not None}).encode()
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
        self._default = httpx.Timeout(timeout, connect=min(CONNECT_S, timeout))
        self._http = httpx.AsyncClient(
            base_url=address.url,
            headers=self.headers,
            timeout=self._default,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=60),
            # A proxy of the environment has no way to a server on this machine.
            trust_env=not address.loopback,
        )

    def carrying(self, headers: Mapping[str, str], *, wait_s: float = 0.0) -> AsyncConnection:
        """The same pool for requests that carry these headers too, and may take `wait_s` longer to be answered."""
        view = copy.copy(self)
        view.carried = {**self.carried, **headers}
        view.wait_s = wait_s or self.wait_s
        return view

    async def close(self) -> None:
        """Close every connection of the pool."""
        await self._http.aclose()

    def patience(self, deadline: float | None) -> httpx.Timeout:
        """Timeouts for a request that waits for a command; without a deadline the server decides how long."""
        read = None if deadline is None else deadline + GRACE_S + self.wait_s
        return httpx.Timeout(self._default.write, connect=self._default.connect, read=read)

    async def get(self, model: type[Model], path: str, query: Query | None = None) -> Model:
        """GET a model."""
        return self._parsed(model, await self._send("GET", path, query=query))

    async def post(
        self,
        model: type[Model],
        path: str,
        body: bytes,
        *,
        timeout: httpx.Timeout | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Model:
        """POST JSON, get a model."""
        response = await self._send("POST", path, body=body, timeout=timeout, headers=headers)
        return self._parsed(model, response)

    async def put(self, model: type[Model], path: str, body: bytes) -> Model:
        """PUT JSON, get a model."""
        return self._parsed(model, await self._send("PUT", path, body=body))

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
    ) -> None:
        """Send a request whose answer does not matter beyond success."""
        await self._send(method, path, query=query, body=body, json=json)

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
        request = self._http.build_request(
            method,
            _target(path, query),
            content=source if whole else pieces(source, progress),  # type: ignore[arg-type,unused-ignore]
            headers={"content-type": "application/octet-stream", **self.carried},
            timeout=self._usual(),
        )
        return self._parsed(model, await self._open(request, stream=False))

    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: bytes | None = None,
        timeout: httpx.Timeout | None = None,
    ) -> httpx.Response:
        """Send a request and leave the body of the answer to be read; the caller closes the response."""
        return await self._open(self._request(method, path, query=query, body=body, timeout=timeout), stream=True)

    async def pieces(
        self, path: str, query: Query | None = None, timeout: httpx.Timeout | None = None
    ) -> AsyncGenerator[bytes, None]:
        """GET bytes of any size as they arrive."""
        response = await self.stream("GET", path, query=query, timeout=timeout)
        try:
            async for piece in response.aiter_raw(READ_SIZE):
                yield piece
        except httpx.HTTPError as error:
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
        timeout: httpx.Timeout | None = None,
        headers: Mapping[str, str] | None = None,
        json: bool = True,
    ) -> httpx.Response:
        return await self._open(
            self._request(method, path, query=query, body=body, timeout=timeout, headers=headers, json=json),
            stream=False,
        )

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None,
        body: bytes | None,
        timeout: httpx.Timeout | None,
        headers: Mapping[str, str] | None = None,
        json: bool = True,
    ) -> httpx.Request:
        sent: Mapping[str, str] | None = headers
        if body is not None and json:
            sent = {**_JSON, **headers} if headers else _JSON
        if self.carried:
            sent = {**(sent or {}), **self.carried}
        return self._http.build_request(
            method,
            _target(path, query),
            content=body,
            headers=sent,
            timeout=timeout or self._usual(),
        )

    def _usual(self) -> httpx.Timeout:
        """The timeouts of a request without a deadline of its own, and with the time that it may wait for a person."""
        usual = self._default
        if not self.wait_s or usual.read is None:
            return usual
        return httpx.Timeout(usual.write, connect=usual.connect, read=usual.read + self.wait_s)

    async def _open(self, request: httpx.Request, *, stream: bool) -> httpx.Response:
        try:
            try:
                response = await self._http.send(request, stream=stream)
            except _LOST:
                # The server may close an idle connection just as it is reused; only a GET can be sent twice.
                if request.method != "GET":
                    raise
                response = await self._http.send(request, stream=stream)
            if response.is_success:
                return response
            if stream:
                try:
                    await response.aread()
                finally:
                    await response.aclose()
        except httpx.HTTPError as error:
            raise self.unreachable(error) from None
        raise refused(response)

    def unreachable(self, error: Exception) -> CarrelError:
        """The error for a failed transport, in words that help."""
        url = self.address.url
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | OSError):
            return ServerUnreachable(f"no carrel server answers at {url}", hint=START_HINT)
        if isinstance(error, httpx.TimeoutException | TimeoutError):
            return ServerUnreachable(
                f"the server at {url} did not answer in time",
                hint="is it busy? Client(timeout=…) waits longer",
            )
        return ServerUnreachable(
            f"the connection to {url} broke: {error}", hint="see the server's own output for the reason"
        )

    @staticmethod
    def _parsed(model: type[Model], response: httpx.Response) -> Model:
        try:
            return model.model_validate_json(response.content)
        except ValidationError:
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


def refused(response: httpx.Response) -> CarrelError:
    """The error a response that is no success stands for."""
    return problem_of(response.status_code, response.content)


def problem_of(status: int, body: bytes | bytearray) -> CarrelError:
    """The error of a status and a problem body."""
    try:
        problem = json.loads(body)
    except ValueError:
        problem = None
    return from_problem(problem if isinstance(problem, dict) else {}, status)
