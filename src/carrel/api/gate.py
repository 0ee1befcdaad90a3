"""What every request passes first: the Host check, the token, the size of the body, and the last catch for
failures.

Plain ASGI, because it is on the way of every command. Knows no route but those that are open or stream their
body.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.api.problems import MEDIA_TYPE, UNEXPECTED, encode
from carrel.errors import CarrelError, InvalidRequest, TooLarge, Unauthorized

log = logging.getLogger("carrel.api")

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
STREAMED = re.compile(r"/v1/(sandboxes/[^/]+/files|filespaces/[^/]+)/content")
SUBPROTOCOL = "carrel"
TOKEN_SUBPROTOCOL = b"carrel.token."
_MAX_DISCARD, _MAX_DISCARD_S = 64 * 1024 * 1024, 2.0
_BODY_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_WANTED = frozenset({b"authorization", b"host", b"origin", b"content-length", b"sec-websocket-protocol"})


def _host_of(value: bytes) -> str:
    text = value.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text.partition("]")[0] + "]"
    return text.partition(":")[0]


class Gate:
    """Wraps the application. `token` None means no token is asked for; `hosts` None takes any Host."""

    def __init__(self, app: ASGIApp, *, token: str | None, max_body: int, hosts: frozenset[str] | None):
        self._app = app
        self._token = None if token is None else token.encode()
        self._max_body = max_body
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            headers = {name: value for name, value in scope["headers"] if name in _WANTED}
            self._admit(scope, headers)
            if scope["type"] == "http" and scope["method"] in _BODY_METHODS and not self._streams(scope):
                body = await self._body(headers, receive)
                if body is None:
                    return
                receive = _replay(body, receive)
            await self._app(scope, receive, watched)
        except CarrelError as error:
            if started:  # the status is gone already: a broken body is all that can tell of it
                log.warning("%s broke off: %s", scope["path"], error)
            else:
                if isinstance(error, TooLarge) and scope["type"] == "http":
                    await _discard(receive)
                await _refuse(scope, send, error)
        except Exception:
            log.exception("%s failed", scope["path"])
            if not started:
                await _refuse(scope, send, UNEXPECTED)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if self._hosts is not None:
            # A page of another site whose name was made to point here still names that site.
            if _host_of(headers.get(b"host", b"")) not in self._hosts:
                raise InvalidRequest(
                    "the Host header names another host",
                    field="Host",
                    hint="use the address the server printed",
                )
            origin = headers.get(b"origin")
            if origin is not None and _host_of(urlsplit(origin).netloc) not in self._hosts:
                raise InvalidRequest(
                    "requests from other sites are refused", field="Origin", hint="use the API directly"
                )
        if self._token is None or (scope["type"] == "http" and scope["path"] in OPEN_PATHS):
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = b""
            if scope["type"] == "websocket":
                for offer in headers.get(b"sec-websocket-protocol", b"").split(b","):
                    if offer.strip().startswith(TOKEN_SUBPROTOCOL):
                        given = offer.strip()[len(TOKEN_SUBPROTOCOL) :]
        if not hmac.compare_digest(given.strip(), self._token):
            raise Unauthorized(
                "the token is missing or wrong",
                field="Authorization",
                hint="send `Authorization: Bearer TOKEN`; the server printed where its token is kept",
            )

    @staticmethod
    def _streams(scope: Scope) -> bool:
        return scope["method"] == "PUT" and STREAMED.fullmatch(scope["path"]) is not None

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self._max_body:
            raise self._too_large()
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if len(body) > self._max_body:
                raise self._too_large()
            return body
        parts, size = [body], len(body)
        while message.get("more_body", False):
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"the body is larger than {self._max_body} bytes",
            field="body",
            hint="send files with PUT …/files/content, or raise CARREL_MAX_BODY_MB",
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _discard(receive: Receive) -> None:
    """Take some more of a body that is too large: a caller cut off while sending would not see the answer."""
    left = _MAX_DISCARD
    try:
        async with asyncio.timeout(_MAX_DISCARD_S):
            while left > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))
    except TimeoutError:
        return


async def _refuse(scope: Scope, send: Send, error: CarrelError) -> None:
    body = encode(error.problem())
    headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", b"%d" % len(body))]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 413:
        headers.append((b"connection", b"close"))
    prefix = "http"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008, "reason": error.code})
            return
        prefix = "websocket.http"
    await send({"type": f"{prefix}.response.start", "status": error.status, "headers": headers})
    await send({"type": f"{prefix}.response.body", "body": body})
