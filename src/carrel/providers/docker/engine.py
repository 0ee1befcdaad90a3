"""The client of a Docker Engine, or of podman's compatible service, over its Unix socket.

It knows requests and answers, not sandboxes. Paths have no version: a daemon then speaks its newest one, and what is
used here has been the same for years.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from carrel.errors import PlatformError, ProviderUnavailable

if TYPE_CHECKING:
    import httpx

REQUEST_S, IMPORT_S, PROBE_S = 60.0, 1800.0, 1.0
MOST_LOG = 16 * 1024
_MOST_ANSWER = 4 * 1024 * 1024


class EngineRefusal(PlatformError):
    """The daemon has refused a request; `number` is the HTTP status."""

    def __init__(self, number: int, words: str):
        super().__init__(f"the Docker daemon refused: {words}"[:1000], hint="see the log of the Docker daemon")
        self.number = number


class Engine:
    """One daemon. For one event loop."""

    def __init__(self, path: str):
        self.path = path
        self._client: httpx.AsyncClient | None = None

    async def get(self, path: str, **query: str) -> Any:
        """Return the JSON answer; None when there is no such object."""
        try:
            return json.loads(await self._send("GET", path, query))
        except EngineRefusal as refusal:
            if refusal.number == 404:
                return None
            raise

    async def post(self, path: str, body: object = None, *, patience_s: float = REQUEST_S, **query: str) -> Any:
        answer = await self._send("POST", path, query, body, patience_s=patience_s)
        return json.loads(answer) if answer.strip() else None

    async def delete(self, path: str, **query: str) -> bool:
        """Delete an object; False if it was gone already."""
        try:
            await self._send("DELETE", path, query)
        except EngineRefusal as refusal:
            if refusal.number == 404:
                return False
            raise
        return True

    async def import_image(self, archive: AsyncGenerator[bytes], name: str, labels: Mapping[str, str]) -> None:
        """Make an image of one layer from an uncompressed tar archive, which is closed in any case."""
        changes = [("changes", f"LABEL {key}={json.dumps(value)}") for key, value in labels.items()]
        query = [("fromSrc", "-"), ("repo", name), *changes]  # podman would ignore a tag of its own
        async with aclosing(archive):
            answer = await self._send("POST", "/images/create", query, archive, patience_s=IMPORT_S)
        for line in answer.splitlines():  # a failure in the middle comes with status 200
            if line.strip() and (error := json.loads(line).get("error")):
                raise PlatformError(f"the Docker daemon could not import a root file system: {error}"[:1000])

    async def log(self, container: str) -> str:
        """Return the end of what PID 1 of a container printed."""
        raw = await self._send("GET", f"/containers/{container}/logs", {"stdout": "1", "stderr": "1", "tail": "20"})
        return _text(raw[-MOST_LOG:])

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | list[tuple[str, str]],
        body: object = None,
        *,
        patience_s: float = REQUEST_S,
    ) -> bytes:
        import httpx

        if self._client is None:
            transport = httpx.AsyncHTTPTransport(uds=self.path, limits=httpx.Limits(max_connections=None))
            self._client = httpx.AsyncClient(transport=transport, base_url="http://docker", trust_env=False)
        url = f"{path}?{urlencode(query)}" if query else path
        given: dict[str, Any] = {}
        if isinstance(body, AsyncIterator):
            given = {"content": body, "headers": {"Content-Type": "application/x-tar"}}
        elif body is not None:
            given = {"json": body}
        try:
            async with (
                asyncio.timeout(patience_s),
                self._client.stream(method, url, timeout=patience_s, **given) as response,
            ):
                answer = bytearray()
                async for chunk in response.aiter_bytes():
                    answer += chunk
                    if len(answer) > _MOST_ANSWER:
                        raise PlatformError("the answer of the Docker daemon is too large")
        except httpx.ConnectError as error:
            raise ProviderUnavailable(
                f"the Docker daemon at {self.path} cannot be reached: {error}", hint="run `carrel doctor`"
            ) from error
        except httpx.HTTPError as error:
            raise PlatformError(f"the Docker daemon failed: {type(error).__name__}: {error}"[:500]) from error
        except TimeoutError:
            raise PlatformError(f"the Docker daemon did not answer in {patience_s:.0f} s: {method} {path}") from None
        if response.status_code >= 400:
            raise EngineRefusal(response.status_code, _message(bytes(answer)))
        return bytes(answer)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def probe(path: str) -> dict[str, Any]:
    """Ask a daemon about itself. Raises `OSError` or `ValueError`. Blocking, for a second or two at most."""
    status, text = _ask(path, "GET /info")
    if status != b"200":
        raise ValueError(_message(text) or "it does not speak HTTP")
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("its answer is not an object")  # noqa: TRY004 - not a mistake of the caller
    return found


def changes_limits(path: str) -> bool:
    """Whether a daemon can change the limits of a running container. Some versions of podman do not know the request;
    others answer that there is no such container. Raises and blocks as `probe` does.
    """
    _, text = _ask(path, "POST /containers/carrel-none/update", b"{}")
    return "no such container" in _message(text).lower() or "no container with" in _message(text).lower()


def _ask(path: str, what: str, body: bytes = b"") -> tuple[bytes, bytes]:
    """Make a request; return the status and the body of the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(PROBE_S)
        connection.connect(path)
        head = f"{what} HTTP/1.0\r\nHost: docker\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        answer = bytearray()
        while len(answer) < _MOST_ANSWER and (part := connection.recv(65536)):
            answer += part
    first, _, text = bytes(answer).partition(b"\r\n\r\n")
    return b"".join(first.split(b" ")[1:2]), text


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["message"])[:500]
    except (ValueError, TypeError, KeyError):
        return answer[:500].decode(errors="replace")


def _text(raw: bytes) -> str:
    """Return the text of a log, whose chunks have a header of 8 bytes each."""
    found, at = bytearray(), 0
    while at + 8 <= len(raw):
        (size,) = struct.unpack(">I", raw[at + 4 : at + 8])
        found += raw[at + 8 : at + 8 + size]
        at += 8 + size
    return found.decode(errors="replace").strip()
