"""The requests inside a tunnel whose TLS was opened: each is decided, logged and written anew, and credentials are put
in and kept from coming back.

HTTP/1.1 on both sides, read as strictly as what is not encrypted. Knows nothing of certificates.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from carrel.egress.access import Access, Refused, Target
from carrel.egress.http import answers
from carrel.egress.http.credentials import Credentials
from carrel.egress.http.messages import (
    Header,
    Request,
    Response,
    chunk,
    read_request,
    read_response,
    write_request,
    write_response,
)
from carrel.egress.http.streams import Body, Stream
from carrel.egress.outbound.budget import Meter
from carrel.egress.outbound.connections import Outbound
from carrel.egress.outbound.names import read_authority
from carrel.egress.plan import Injected
from carrel.egress.sockets import Ended
from carrel.redaction.redact import StreamRedactor

log = logging.getLogger("carrel.egress")

_HTTPS = 443
_MOST_INTERIM = 16
_MOST_PATH = 2048
_QUIET_S = 0.05
"""When a server says nothing more for so long, the few bytes that may begin a secret are let go."""
_UPGRADE: list[Header] = [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]


@dataclass(slots=True)
class _Exchange:
    """One request and what belongs to it."""

    request: Request
    path: str
    access: Access
    meter: Meter
    chosen: tuple[Injected, ...]
    credentials: Credentials | None
    """Set where the host may send one back."""

    @property
    def websocket(self) -> bool:
        """Whether a WebSocket is asked for."""
        return self.request.websocket and self.request.method == "GET" and not self.request.body


class InspectedRelay:
    """The requests of one tunnel, one after the other."""

    def __init__(
        self,
        client: Stream,
        server: Stream | Refused,
        target: Target,
        outbound: Outbound,
        tunnel: Access,
        credentials: Callable[[], Credentials],
    ):
        """`server`: when there is none, what each request is told. `credentials` gives those that hold now."""
        self._client, self._given_server = client, server
        self._target, self._outbound, self._tunnel = target, outbound, tunnel
        self._credentials = credentials
        self._known = credentials()
        self._begun = False

    @property
    def _server(self) -> Stream:
        if isinstance(self._given_server, Refused):
            raise self._given_server
        return self._given_server

    async def serve(self) -> None:
        """Answer requests until one side has had enough. Returns when the client may be left in good order."""
        bodiless = False
        try:
            while await self._awaited():
                self._begun = bodiless = False
                request = await self._read()
                if request is None:
                    return
                bodiless = request.method == "HEAD"
                if not await self._answer(request):
                    return
        except Refused as refusal:
            await self._refuse(refusal, bodiless)
        except (OSError, asyncio.CancelledError):
            raise
        except Exception as error:
            # Neither its words nor where it happened: both may hold what was put into the request.
            what = type(error).__name__
            log.error("sandbox %s: an inspected request failed: %s", self._outbound.plan.sandbox, what)  # noqa: TRY400
            await self._refuse(answers.failed(), bodiless)

    async def _refuse(self, refusal: Refused, bodiless: bool) -> None:
        if self._begun:
            raise Ended("an answer was cut")  # in the middle of an answer, only the cut can say that it failed
        await self._client.write(answers.refusal(refusal, body=not bodiless))

    async def _awaited(self) -> bool:
        """Whether the client asks for more, before the server ends the connection."""
        if self._client.rest or isinstance(self._given_server, Refused):
            return True
        if self._server.rest:
            return False  # a server that speaks unasked
        ours = asyncio.ensure_future(self._client.more())
        theirs = asyncio.ensure_future(self._server.more())
        try:
            await asyncio.wait((ours, theirs), return_when=asyncio.FIRST_COMPLETED)
            return not theirs.done() and ours.result()
        finally:
            for each in (ours, theirs):
                each.cancel()
            await asyncio.gather(ours, theirs, return_exceptions=True)

    async def _read(self) -> Request | None:
        try:
            head = await self._client.head()
            return None if head is None else read_request(head)
        except Refused as refusal:
            self._outbound.refuse(self._access(), refusal)
            raise

    def _access(self) -> Access:
        before = self._tunnel
        return Access(
            before.sandbox, "http", self._target, address=before.address, upstream=before.upstream, inspected=True
        )

    async def _answer(self, request: Request) -> bool:
        """Whether the connection may go on."""
        outbound, access = self._outbound, self._access()
        access.method = request.method
        credentials = self._known = self._credentials()
        try:
            path = self._path(request)
            access.path = path.partition("?")[0][:_MOST_PATH]
            chosen = credentials.choose(self._target.host, request.method, path)
            access.credential = ", ".join(each.name for each in chosen) or None
            if chosen and request.websocket:
                raise Refused(
                    "a WebSocket cannot be given a credential: what comes back through it cannot be looked at",
                    hint="leave credentials of this host to requests",
                )
            _ = self._server
        except Refused as refusal:
            outbound.refuse(access, refusal)
            raise
        await outbound.within(access, self._target, self._tunnel)
        exchange = _Exchange(
            request,
            path,
            access,
            outbound.meter(access),
            chosen,
            credentials if credentials.concern(self._target.host) else None,
        )
        try:
            if self._credentials() is not credentials:
                raise _changed()
            return await self._relay(exchange)
        except BaseException as error:
            outbound.close(access, error)
            raise
        finally:
            outbound.close(access)

    def _path(self, request: Request) -> str:
        """The path and query of a request, which must be for the host that the tunnel is for. Raises `Refused`."""
        written = request.target
        hosts = [*request.all(b"host")]
        if request.method == "CONNECT":
            _bad("inside a tunnel there are no further ones")
        if "#" in written:
            _bad("the path of a request has no fragment")
        if not written.startswith("/") and not (written == "*" and request.method == "OPTIONS"):
            scheme, separator, rest = written.partition("://")
            if not separator or scheme.lower() != "https":
                _bad("inside a tunnel, a request names a path")
            authority = re.split("[/?]", rest, maxsplit=1)[0]
            hosts.append(authority.encode())
            written = rest[len(authority) :]
            written = written if written.startswith("/") else "/" + written
        for host in hosts:
            if read_authority(host, self._target.port) != self._target:
                raise Refused(
                    f"the tunnel is for {self._target}, and the request inside it is for another host",
                    status=421,
                    hint="open a tunnel for each host",
                )
        return written

    # one exchange

    async def _relay(self, exchange: _Exchange) -> bool:
        request = exchange.request
        headers = request.forwarded()
        if exchange.credentials is not None:
            headers = exchange.credentials.request_headers(headers, exchange.chosen)
        if exchange.websocket:
            headers += _UPGRADE
        host = str(self._target).removesuffix(f":{_HTTPS}")
        exchange.meter.sent(len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers))
        await self._to_server(write_request(request.method, exchange.path, host, headers, request))
        sending = asyncio.ensure_future(self._send(exchange))
        receiving = asyncio.ensure_future(self._receive(exchange, sending))
        try:
            await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                await sending  # raises when the client did not send as it must
            return await receiving and _whole(sending)
        finally:
            for each in (sending, receiving):
                each.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)

    async def _to_server(self, data: bytes) -> None:
        try:
            await self._server.write(data)
        except OSError:
            raise self._unanswered() from None

    def _unanswered(self) -> Refused:
        return Refused(
            f"{self._target} ended the connection without an answer", code="unreachable", status=502, retry=True
        )

    async def _send(self, exchange: _Exchange) -> bool:
        """The body of the request. Raises what is the client's fault. False: the server takes no more of it; it may
        have answered.
        """
        request = exchange.request
        if not request.body:
            return True
        body = Body(self._client, request)
        server = self._server
        while piece := await body.piece():
            exchange.meter.sent(len(piece))
            try:
                await server.write(chunk(piece) if request.chunked else piece)
            except OSError:
                return False
        if request.chunked:
            with suppress(OSError):
                await server.write(chunk(b""))
        return True

    async def _receive(self, exchange: _Exchange, sending: asyncio.Future[bool]) -> bool:
        """Pass the answer on. Whether both connections may be used again."""
        request = exchange.request
        response = await self._response(exchange)
        self._check_known()
        if response.status == 101:
            await self._switch(exchange, response)
            return False
        reason, headers = _clean(exchange, response)
        bodiless = response.bodiless(request.method)
        endless = not bodiless and not response.chunked and response.length is None
        chunked = not bodiless and (response.length is None or exchange.credentials is not None)
        lasting = request.lasting and response.lasting and not endless and _whole(sending)
        if chunked and request.minor == 0:
            chunked = lasting = False
        elif chunked:
            headers.append((b"Transfer-Encoding", b"chunked"))
        elif response.length is not None and exchange.credentials is None and response.status != 204:
            headers.append((b"Content-Length", b"%d" % response.length))
        if not lasting:
            headers.append((b"Connection", b"close"))
        self._begun = True
        await self._client.write(write_response(response.status, reason, headers))
        if not bodiless:
            await self._pass_body(exchange, Body(self._server, response), chunked=chunked)
        return lasting

    async def _response(self, exchange: _Exchange) -> Response:
        """The head of the final answer. Of those before it only the leave to send a body is passed on."""
        for _ in range(_MOST_INTERIM):
            try:
                head = await self._server.head()
            except Refused as refusal:
                raise Refused(refusal.reason, code="bad_response", status=502) from None
            except TimeoutError:
                raise Refused(
                    f"{self._target} did not answer in time", code="timed_out", status=504, retry=True
                ) from None
            except OSError:
                raise self._unanswered() from None
            if head is None:
                raise self._unanswered()
            response = read_response(head)
            exchange.meter.received(len(head))
            if response.status >= 200 or response.status == 101:
                return response
            if response.status == 100 and exchange.request.minor == 1:
                await self._client.write(write_response(100, b"Continue", []))
        raise Refused("the server sends no final answer", code="bad_response", status=502)

    async def _pass_body(self, exchange: _Exchange, body: Body, *, chunked: bool) -> None:
        """What the server sends, without secrets where it may send one."""

        async def give(data: bytes) -> None:
            if data:
                await self._client.write(chunk(data) if chunked else data)

        redactor = None if exchange.credentials is None else exchange.credentials.redactor.stream()
        while piece := await _patiently(body, redactor, give):
            self._check_known()
            exchange.meter.received(len(piece))
            await give(piece if redactor is None else redactor.feed(piece))
        last = b"" if redactor is None else redactor.finish()
        if chunked:
            last = (chunk(last) if last else b"") + chunk(b"")
        if last:
            await self._client.write(last)

    def _check_known(self) -> None:
        """Raises `Refused` when the host has got a credential since the request, which its answer may hold."""
        now = self._credentials()
        if now is not self._known and not self._known.cover(now, self._target.host):
            raise _changed()

    async def _switch(self, exchange: _Exchange, response: Response) -> None:
        """A WebSocket begins, and lasts until one side ends it."""
        if not (exchange.websocket and response.websocket):
            raise Refused("the server switches to what was not asked for", code="bad_response", status=502)
        _, headers = _clean(exchange, response)
        self._begun = True
        await self._client.write(write_response(101, b"Switching Protocols", [*headers, *_UPGRADE]))
        onward = asyncio.ensure_future(self._send_messages(exchange))
        back = asyncio.ensure_future(self._pass_body(exchange, Body(self._server), chunked=False))
        try:
            done, _ = await asyncio.wait((onward, back), return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for each in (onward, back):
                each.cancel()
            await asyncio.gather(onward, back, return_exceptions=True)

    async def _send_messages(self, exchange: _Exchange) -> None:
        body = Body(self._client)
        while piece := await body.piece():
            exchange.meter.sent(len(piece))
            await self._server.write(piece)


async def _patiently(body: Body, redactor: StreamRedactor | None, give: Callable[[bytes], Awaitable[None]]) -> bytes:
    """The next piece. While it is not there, a reader is not kept waiting for the last bytes before it."""
    if redactor is not None and redactor.held:
        try:
            async with asyncio.timeout(_QUIET_S):
                return await body.piece()
        except TimeoutError:
            await give(redactor.release())
    return await body.piece()


def _clean(exchange: _Exchange, response: Response) -> tuple[bytes, list[Header]]:
    if exchange.credentials is None:
        return response.reason, response.forwarded()
    return exchange.credentials.response_headers(response)


def _whole(sending: asyncio.Future[bool]) -> bool:
    """Whether the body of a request has gone out to its end."""
    return sending.done() and not sending.cancelled() and sending.exception() is None and sending.result()


def _changed() -> Refused:
    return Refused("the policy has changed meanwhile", code="conflict", status=503, retry=True)


def _bad(reason: str) -> NoReturn:
    raise Refused(reason, code="bad_request", status=400)
