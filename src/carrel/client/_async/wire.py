"""HTTP requests and answers over a pool of connections to one server. Knows nothing of carrel.

Uses httpcore directly: httpx on top of it would take longer than a warm Python interpreter needs to answer.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from urllib.parse import quote, urlsplit

import httpcore

from carrel.client.proxies import proxy_for, trust

Patience = dict[str, float | None]
"""Timeouts in seconds to connect, read, write; None is no timeout."""

FAILED = (
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    httpcore.UnsupportedProtocol,
)
"""Errors of a request, or of reading its answer, when the server cannot be reached or the connection breaks."""
LOST = (httpcore.RemoteProtocolError, httpcore.ReadError, httpcore.WriteError)
NOT_REACHED = (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.ProxyError)
LATE = (httpcore.TimeoutException,)

_KEPT, _KEPT_S = 64, 60.0
_SAFE = "/?#[]@!$&'()*+,;=:~-._%"
_PLAIN = re.compile(rf"[A-Za-z0-9{re.escape(_SAFE)}]*")


class AsyncReply:
    """An answer. Read its body with `aread`, or as it arrives with `aiter_raw` and then `aclose`."""

    def __init__(self, response: httpcore.Response):
        self.status = response.status
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        self.content = b""
        self._response = response

    async def aread(self) -> bytes:
        """Read the whole body and close the answer."""
        try:
            self.content = await self._response.aread()
        finally:
            await self._response.aclose()
        return self.content

    async def aiter_raw(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        stream = self._response.stream
        assert isinstance(stream, AsyncIterable)
        async for piece in stream:
            yield piece

    async def aclose(self) -> None:
        """Close the answer, read or not."""
        await self._response.aclose()


class AsyncWire:
    """A pool of connections. `local`: the server is on this machine, so no proxy is used."""

    def __init__(self, url: str, headers: Mapping[str, str], *, local: bool):
        parts = urlsplit(url)
        assert parts.hostname is not None
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self._headers = [(b"host", (host if parts.port is None else f"{host}:{parts.port}").encode("idna"))]
        self._headers += [(name.encode(), value.encode()) for name, value in headers.items()]
        self._prefix = parts.path
        self._scheme, self._host, self._port = parts.scheme.encode(), parts.hostname.encode("idna"), parts.port
        secure = trust() if parts.scheme == "https" else None
        proxy = None if local else proxy_for(parts.scheme, parts.hostname)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=secure,
            proxy=None if proxy is None else httpcore.Proxy(proxy.url, auth=proxy.login),
            max_connections=None,
            max_keepalive_connections=_KEPT,
            keepalive_expiry=_KEPT_S,
        )

    async def send(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        content: bytes | AsyncIterable[bytes] | None,
        patience: Patience,
    ) -> AsyncReply:
        """Send a request and return the answer before its body. Raises one of `FAILED`."""
        sent = [*self._headers, *((name.encode(), value.encode()) for name, value in headers.items())]
        if isinstance(content, bytes):
            sent.append((b"content-length", b"%d" % len(content)))
        elif content is not None:
            sent.append((b"transfer-encoding", b"chunked"))
        elif method not in ("GET", "HEAD"):
            sent.append((b"content-length", b"0"))
        url = httpcore.URL(scheme=self._scheme, host=self._host, port=self._port, target=self._target(target))
        request = httpcore.Request(method, url, headers=sent, content=content, extensions={"timeout": patience})
        return AsyncReply(await self._pool.handle_async_request(request))

    async def close(self) -> None:
        """Close every connection."""
        await self._pool.aclose()

    def _target(self, target: str) -> bytes:
        whole = self._prefix + target
        if not _PLAIN.fullmatch(whole):
            whole = quote(whole, safe=_SAFE, errors="surrogateescape")
        return whole.encode("ascii")
