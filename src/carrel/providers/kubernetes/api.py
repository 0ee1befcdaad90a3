"""A client of the Kubernetes API. It knows requests, answers and watches, not sandboxes. For one event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from carrel.errors import PlatformError, ProviderUnavailable
from carrel.providers.kubernetes.access import ClusterAccess

if TYPE_CHECKING:
    import httpx

Resource = dict[str, Any]
"""An object of the API, as JSON."""

REQUEST_S = 30.0
_MOST_ANSWER = 64 * 1024 * 1024
_MOST_EVENT = 4 * 1024 * 1024
_GONE = 410
_JSON = "application/json"


class ApiRefusal(PlatformError):
    """The API server has refused a request; `number` is the HTTP status, `reason` one of its words."""

    def __init__(self, number: int, reason: str, words: str):
        super().__init__(f"Kubernetes refused: {words}"[:1000], hint=_HINTS.get(number, "run `carrel doctor`"))
        self.number = number
        self.reason = reason


_HINTS = {
    401: "the credentials of this server are not valid in the cluster",
    403: "the service account of this server lacks a right: see docs/how-to/run-on-kubernetes.md",
}


class KubernetesApi:
    """The API of one cluster."""

    def __init__(self, access: ClusterAccess):
        self._access = access
        self._client: httpx.AsyncClient | None = None
        self._unwanted: set[asyncio.Task[None]] = set()
        """Requests that were cancelled before their answer began."""

    async def get(self, path: str, **query: str) -> Resource | None:
        """Return an object or a list; None when there is no such thing."""
        try:
            return await self._send("GET", path, query)
        except ApiRefusal as refusal:
            if refusal.number == 404:
                return None
            raise

    async def create(self, path: str, body: Resource, **query: str) -> Resource:
        return await self._send("POST", path, query, body)

    async def patch(self, path: str, body: Resource) -> Resource:
        """Merge a change into an object."""
        return await self._send("PATCH", path, {}, body, kind="application/merge-patch+json")

    async def delete(self, path: str, **options: object) -> bool:
        """Ask for the end of an object; False if it was gone already."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", **options}
        try:
            await self._send("DELETE", path, {}, body)
        except ApiRefusal as refusal:
            if refusal.number == 404:
                return False
            raise
        return True

    async def watch(self, path: str, since: str, **query: str) -> AsyncGenerator[tuple[str, Resource]]:
        """Yield what happens to the objects of a list after a version of it: `ADDED`, `MODIFIED` or `DELETED`, and the
        object. Ends when the server ends it, also because the version is too old: then list again.
        """
        query |= {"watch": "1", "resourceVersion": since, "allowWatchBookmarks": "false"}
        async with self._stream("GET", path, query, None, _JSON, None) as response:
            if response.status_code >= 400:
                answer = await _bounded(response)
                if response.status_code != _GONE:
                    raise _refusal(response.status_code, answer)
                return
            line = bytearray()
            async for chunk in response.aiter_bytes():
                line += chunk
                if len(line) > _MOST_EVENT:
                    raise PlatformError("an event of the Kubernetes API is too large")
                *whole, rest = bytes(line).split(b"\n")
                line = bytearray(rest)
                for each in whole:
                    event = _object(each)
                    if event.get("type") == "ERROR":
                        return
                    yield str(event.get("type")), event.get("object") or {}

    async def _send(
        self, method: str, path: str, query: Mapping[str, str], body: Resource | None = None, *, kind: str = _JSON
    ) -> Resource:
        try:
            async with (
                asyncio.timeout(REQUEST_S),
                self._stream(method, path, query, body, kind, REQUEST_S) as response,
            ):
                answer = await _bounded(response)
        except TimeoutError:
            raise ProviderUnavailable(f"the Kubernetes API did not answer {method} {path}") from None
        if response.status_code >= 400:
            raise _refusal(response.status_code, answer)
        return _object(answer)

    @asynccontextmanager
    async def _stream(
        self, method: str, path: str, query: Mapping[str, str], body: Resource | None, kind: str, patience: float | None
    ) -> AsyncGenerator[httpx.Response]:
        import httpx  # late: it takes long

        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
            self._client = httpx.AsyncClient(
                verify=self._access.tls, base_url=self._access.server, limits=limits, trust_env=False
            )
        try:
            headers = {"accept": "application/json", "content-type": kind, **self._access.headers()}
        except OSError as error:
            raise ProviderUnavailable(f"the token for Kubernetes cannot be read: {error}") from error
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        timeout = httpx.Timeout(REQUEST_S, read=patience)
        request = self._client.build_request(
            method, path, params=dict(query), content=content, headers=headers, timeout=timeout
        )
        try:
            response = await self._to_its_head(self._client.send(request, stream=True))
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise ProviderUnavailable(
                f"the Kubernetes API cannot be reached: {type(error).__name__}: {error}"[:500],
                hint="run `carrel doctor`",
            ) from error

    async def _to_its_head(self, sending: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
        """Wait for the head of an answer. A request whose caller is cancelled goes on until then: httpcore would leave
        a connection open that is cancelled in its handshake.
        """
        task = asyncio.ensure_future(sending)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            dropping = asyncio.ensure_future(_drop(task))
            self._unwanted.add(dropping)
            dropping.add_done_callback(self._unwanted.discard)
            raise

    async def close(self) -> None:
        await asyncio.gather(*self._unwanted)
        if self._client is not None:
            await self._client.aclose()
            self._client = None


async def _drop(sending: asyncio.Task[httpx.Response]) -> None:
    await asyncio.wait((sending,))
    if not sending.cancelled() and sending.exception() is None:
        await sending.result().aclose()


async def _bounded(response: httpx.Response) -> bytes:
    answer = bytearray()
    async for chunk in response.aiter_bytes():
        answer += chunk
        if len(answer) > _MOST_ANSWER:
            raise PlatformError("the answer of the Kubernetes API is too large")
    return bytes(answer)


def _object(answer: bytes) -> Resource:
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        raise PlatformError("the answer of the Kubernetes API is not JSON") from None
    if not isinstance(found, dict):
        raise PlatformError("the answer of the Kubernetes API is not an object")
    return found


def _refusal(number: int, answer: bytes) -> ApiRefusal:
    try:
        found = json.loads(answer)
        return ApiRefusal(number, str(found["reason"])[:100], str(found["message"])[:900])
    except (ValueError, RecursionError, TypeError, KeyError):
        return ApiRefusal(number, "", f"status {number}: {answer[:500].decode(errors='replace')}")


async def put(api: KubernetesApi, path: str, body: Resource) -> None:
    """Create an object, or change the one that is there."""
    try:
        await api.create(path, body)
    except ApiRefusal as refusal:
        if refusal.number != 409:
            raise
        await api.patch(f"{path}/{body['metadata']['name']}", body)
