"""The HTTP/1 relay: reads each request of a client completely, decides it, and writes it anew for its target.

So nothing can be hidden behind a request or between two. The same relay serves requests to the proxy, requests in the
clear inside a tunnel, and requests inside a tunnel whose TLS the proxy has opened; only these can carry injected
credentials, which are kept from coming back. The responses of servers are read as strictly. Knows nothing of
certificates.
"""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from carrel.egress.access import Access, AccessRefused, BadRequest, BadResponse, Target
from carrel.egress.http import answers
from carrel.egress.http.credentials import Credentials
from carrel.egress.http.messages import (
    Header,
    RequestHead,
    ResponseHead,
    read_request,
    read_response,
    write_request,
    write_response,
)
from carrel.egress.http.streams import ByteStream, SocketStream, forward, forward_both_ways
from carrel.egress.index.front import IndexAnswer
from carrel.egress.outbound.budget import Meter
from carrel.egress.outbound.connections import Outbound
from carrel.egress.outbound.names import read_authority
from carrel.egress.plan import Injected
from carrel.egress.sockets import Ended, Undeliverable
from carrel.policy.verdict import Verdict
from carrel.primitives.tasks import cancel
from carrel.redaction.redact import StreamRedactor

log = logging.getLogger("carrel.egress")

NEXT_S = 75.0
"""How long a client may wait before it begins its next request in the clear."""

_HTTP, _HTTPS = 80, 443
_MOST_INTERIM = 16
_MOST_PATH = 2048
_UPGRADE: list[Header] = [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]


@dataclass(slots=True)
class Tunnel:
    """A tunnel, in which all requests must be for its target. Its access and its sockets belong to the caller."""

    target: Target
    access: Access
    server: ByteStream | AccessRefused
    """The server, or the refusal that answers each request because there is none."""
    credentials: Callable[[], Credentials] | None = None
    """Returns the credentials that are valid now. None: the requests are in the clear."""


@dataclass(slots=True)
class _Server:
    """The connection to the server of the last request outside a tunnel, and the access it was opened for."""

    target: Target
    stream: SocketStream
    access: Access


@dataclass(slots=True)
class _Exchange:
    """One request and its context."""

    request: RequestHead
    target: Target
    path: str
    server: ByteStream
    access: Access
    meter: Meter
    chosen: tuple[Injected, ...] = ()
    """The credentials to inject."""
    credentials: Credentials | None = None
    """Set where the server may send a credential back."""
    reusable: bool = False
    """Whether the server's connection can be used for another request."""

    @property
    def websocket(self) -> bool:
        """Whether the request asks for a WebSocket."""
        return self.request.websocket and self.request.method == "GET" and not self.request.body

    def redactor(self) -> StreamRedactor | None:
        """Create a redactor for the response, if it may hold a credential."""
        return None if self.credentials is None else self.credentials.redactor.stream()

    def clean_head(self, response: ResponseHead) -> tuple[bytes, list[Header]]:
        """Return the reason and the headers of a response without credentials. Raises `AccessRefused`."""
        if self.credentials is None:
            return response.reason, response.forwarded()
        return self.credentials.response_headers(response)


class _Unanswered(AccessRefused):
    """The server did not answer a request."""

    def __init__(self, target: Target, error: OSError | None = None):
        if isinstance(error, TimeoutError):
            super().__init__(f"{target} did not answer in time", code="timed_out", status=504, retry=True)
        else:
            reason = f"{target} ended the connection without an answer"
            super().__init__(reason, code="unreachable", status=502, retry=True)


class Relay:
    """Serves the requests of one client's connection, one after the other."""

    def __init__(self, client: ByteStream, outbound: Outbound, tunnel: Tunnel | None = None):
        self._client = client
        self._outbound = outbound
        self._tunnel = tunnel
        self._server: _Server | None = None
        self._known: Credentials | None = None
        self._head_size = 0
        self._begun = False
        self._refused_push = False

    async def serve(self) -> None:
        """Answer requests until one side ends the connection. Raises `OSError`."""
        bodiless = False
        try:
            while await self._next():
                self._begun = bodiless = False
                request = await self._read()
                if request is None:
                    break
                bodiless = request.method == "HEAD"
                if not await self._answer(request):
                    break
        except AccessRefused as refusal:
            await self._refuse(refusal, bodiless)
        except OSError:
            raise
        except Exception as error:
            # Neither the message nor the values: both may hold a credential that was injected into the request.
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} in {where.name}, line {where.lineno}"
            log.error("sandbox %s: a request failed: %s", self._outbound.plan.sandbox, place)  # noqa: TRY400
            await self._refuse(answers.failed(), bodiless)
        finally:
            self._drop_server()
        await self._client.finish()

    async def _refuse(self, refusal: AccessRefused, bodiless: bool) -> None:
        self._drop_server()
        tunnel = self._tunnel
        if tunnel is not None and tunnel.credentials is None:
            self._outbound.close(tunnel.access, refusal)
        if self._begun:
            raise Ended("a response was cut")  # once a response has begun, only cutting it shows that it failed
        answer = answers.refused_push(refusal) if self._refused_push else answers.refusal(refusal, body=not bodiless)
        with suppress(OSError):
            await self._client.write(answer)

    async def _next(self) -> bool:
        """Wait for the next request; return False when the client or the server of the tunnel ended the connection, or
        when that server speaks without being asked.
        """
        client, server = self._client, None if self._tunnel is None else self._tunnel.server
        if isinstance(server, ByteStream) and server.rest:
            return False
        if client.rest:
            return True
        if isinstance(server, ByteStream) and not isinstance(server, SocketStream):
            return await self._first_of(server)
        try:
            more = await client.more(NEXT_S)
        except OSError:  # it takes too long, or has reset the connection
            return False
        return more and (not isinstance(server, SocketStream) or server.silent)

    async def _first_of(self, server: ByteStream) -> bool:
        """Return whether the client sends something before the server does."""
        ours, theirs = asyncio.ensure_future(self._client.more()), asyncio.ensure_future(server.more())
        try:
            await asyncio.wait((ours, theirs), return_when=asyncio.FIRST_COMPLETED)
            return not theirs.done() and ours.result()
        finally:
            await cancel((ours, theirs))

    async def _read(self) -> RequestHead | None:
        try:
            head = await self._client.head()
            self._head_size = len(head or b"")
            return None if head is None else read_request(head)
        except AccessRefused as refusal:
            if self._tunnel is None:
                self._outbound.refuse(Access(self._outbound.plan.sandbox, "http"), refusal)
            elif self._tunnel.credentials is not None:
                self._outbound.refuse(_access_in(self._tunnel), refusal)
            raise

    async def _answer(self, request: RequestHead) -> bool:
        """Answer a request; return whether the client's connection can be used for another one."""
        if self._tunnel is not None:
            return await self._answer_in_tunnel(self._tunnel, request)
        if request.target.startswith("/"):
            return await self._answer_from_index(request)
        access = Access(self._outbound.plan.sandbox, "http", method=request.method)
        try:
            target, path = _split(request)
            access.path = _logged(path)
            if self._outbound.rules.credited(target):
                access.target = target
                raise _in_the_clear(target)
            await self._outbound.decide_request(access, target, path)
        except AccessRefused as refusal:
            self._outbound.refuse(access, refusal)
            raise
        return await self._forward(request, access, target, path)

    # inside a tunnel

    async def _answer_in_tunnel(self, tunnel: Tunnel, request: RequestHead) -> bool:
        outbound, target, clear = self._outbound, tunnel.target, tunnel.credentials is None
        access = _access_in(tunnel)
        access.method = request.method
        credentials = self._known = None if tunnel.credentials is None else tunnel.credentials()
        chosen: tuple[Injected, ...] = ()
        permission: Verdict | None = None
        try:
            if clear and outbound.rules.credited(target):
                raise _in_the_clear(target)
            path = _path_inside(tunnel, request)
            access.path = _logged(path)
            if credentials is not None:
                chosen = credentials.choose(target.host, request.method, path)
                access.credential = ", ".join(each.name for each in chosen) or None
            if chosen and request.websocket:
                raise AccessRefused(
                    "a WebSocket cannot be given a credential: what comes back through it cannot be looked at",
                    hint="leave credentials of this host to requests",
                )
            if isinstance(tunnel.server, AccessRefused):
                raise tunnel.server
            permission = await outbound.decide_request(access, target, path)
        except AccessRefused as refusal:
            self._refused_push = request.method == "POST" and _is_push(request.target)
            if not clear:  # else the record of the tunnel tells it
                outbound.refuse(access, refusal)
            raise
        if clear and tunnel.access.path is None:
            # The tunnel was opened for its first request: one record is for both.
            access, tunnel.access.method, tunnel.access.path = tunnel.access, access.method, access.path
            return await self._exchange(_Exchange(request, target, path, tunnel.server, access, outbound.meter(access)))
        await outbound.admit_in_tunnel(access, target, tunnel.access, permission)
        with self._recorded(access):
            if tunnel.credentials is not None and tunnel.credentials() is not credentials:
                raise _changed()
            exchange = _Exchange(request, target, path, tunnel.server, access, outbound.meter(access), chosen)
            if credentials is not None and credentials.concern(target.host):
                exchange.credentials = credentials
            return await self._exchange(exchange)

    @contextmanager
    def _recorded(self, access: Access) -> Iterator[None]:
        """Close the record of an access at the end, with the error if there is one."""
        try:
            yield
        except BaseException as error:
            self._outbound.close(access, error)
            raise
        finally:
            self._outbound.close(access)

    # outside a tunnel

    async def _forward(self, request: RequestHead, access: Access, target: Target, path: str) -> bool:
        outbound = self._outbound
        while True:
            before = self._reusable_server(target)
            if before is None:
                stream = SocketStream(await outbound.open(access, target))
            else:
                stream = before.stream
                await outbound.admit_again(access, target, before.access)
            self._server = _Server(target, stream, access)
            exchange = _Exchange(request, target, path, stream, access, outbound.meter(access))
            try:
                with self._recorded(access):
                    lasting = await self._exchange(exchange)
                if not exchange.reusable:
                    self._drop_server()
            except _Unanswered:
                self._drop_server()
                if before is None or request.body:
                    raise
                # The server had closed the idle connection, as it may. Nothing was answered: try once more.
                access = Access(access.sandbox, access.protocol, method=access.method, path=access.path)
            else:
                return lasting

    def _reusable_server(self, target: Target) -> _Server | None:
        """Return the connection of the request before, if it leads to the target and the server is silent."""
        server = self._server
        if server is not None and server.target == target and server.stream.silent:
            return server
        self._drop_server()
        return None

    def _drop_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stream.socket.close()

    # one exchange

    async def _exchange(self, exchange: _Exchange) -> bool:
        """Send the request and pass the response on; return whether the client's connection can be used again."""
        request = exchange.request
        headers = request.forwarded()
        if exchange.credentials is not None:
            headers = exchange.credentials.request_headers(headers, exchange.chosen)
        if exchange.websocket:
            headers += _UPGRADE
        host = str(exchange.target).removesuffix(f":{_HTTPS if exchange.access.inspected else _HTTP}")
        exchange.meter.sent(self._head_size)
        try:
            await exchange.server.write(write_request(request.method, exchange.path, host, headers, request))
        except OSError as error:
            raise _Unanswered(exchange.target, error) from None
        if not request.body:
            return await self._receive(exchange, None)
        sending = asyncio.ensure_future(self._send_body(exchange))
        receiving = asyncio.ensure_future(self._receive(exchange, sending))
        try:
            await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                await sending  # raises when the client sent an invalid body
            return await receiving
        finally:
            await cancel((sending, receiving))

    async def _send_body(self, exchange: _Exchange) -> bool:
        """Send the body of the request; return False when the server takes no more of it: it may have answered. Raises
        what is the client's fault.
        """
        request = exchange.request
        try:
            await forward(self._client, exchange.server, request, exchange.meter.sent, chunked=request.chunked)
        except Undeliverable:
            return False
        return True

    async def _receive(self, exchange: _Exchange, sending: asyncio.Future[bool] | None) -> bool:
        """Pass the response on; return whether the client's connection can be used again."""
        request = exchange.request
        response = await self._read_response(exchange)
        self._check_credentials(exchange)
        if response.status == 101:
            await self._switch(exchange, response)
            return False
        reason, headers = exchange.clean_head(response)
        bodiless = response.bodiless(request.method)
        endless = not bodiless and not response.chunked and response.length is None
        ends = endless or not _completed(sending)
        exchange.reusable = response.lasting and not ends
        lasting = request.lasting and not ends and (self._tunnel is None or exchange.reusable)
        redactor = exchange.redactor()
        chunked = not bodiless and request.minor == 1 and (response.length is None or redactor is not None)
        if chunked:
            headers.append((b"Transfer-Encoding", b"chunked"))
        elif response.length is not None and redactor is None and response.status != 204:
            headers.append((b"Content-Length", b"%d" % response.length))
        if not lasting:
            headers.append((b"Connection", b"close"))
        head = write_response(response.status, reason, headers)
        self._begun = True
        if bodiless:
            await self._client.write(head)
        else:
            count = self._counter(exchange)
            await forward(
                exchange.server, self._client, response, count, first=head, chunked=chunked, redactor=redactor
            )
        return lasting

    async def _read_response(self, exchange: _Exchange) -> ResponseHead:
        """Read the head of the final response. Interim responses are passed on."""
        for _ in range(_MOST_INTERIM):
            try:
                head = await exchange.server.head()
            except AccessRefused as refusal:
                raise BadResponse(refusal.reason) from None
            except OSError as error:
                raise _Unanswered(exchange.target, error) from None
            if head is None:
                raise _Unanswered(exchange.target)
            response = read_response(head)
            exchange.meter.received(len(head))
            if response.status >= 200 or response.status == 101:
                return response
            if exchange.request.minor == 1:
                reason, headers = exchange.clean_head(response)
                await self._client.write(write_response(response.status, reason, headers))
        raise BadResponse("the server sends no final response")

    async def _switch(self, exchange: _Exchange, response: ResponseHead) -> None:
        """Pass on a WebSocket until one side ends it."""
        if not (exchange.websocket and response.websocket):
            raise BadResponse("the server switches to a protocol that was not requested")
        _, headers = exchange.clean_head(response)
        self._begun = True
        await self._client.write(write_response(101, b"Switching Protocols", [*headers, *_UPGRADE]))
        await forward_both_ways(
            self._client, exchange.server, exchange.meter.sent, self._counter(exchange), exchange.redactor()
        )

    def _counter(self, exchange: _Exchange) -> Callable[[int], None]:
        """Return the function that counts received bytes. In an opened tunnel it also checks the credentials."""
        if not exchange.access.inspected:
            return exchange.meter.received

        def count(size: int) -> None:
            self._check_credentials(exchange)
            exchange.meter.received(size)

        return count

    def _check_credentials(self, exchange: _Exchange) -> None:
        """Raise `AccessRefused` when the host got a credential since the request: the response may hold it."""
        if self._tunnel is None or self._tunnel.credentials is None or self._known is None:
            return
        now = self._tunnel.credentials()
        if now is not self._known and not self._known.cover(now, exchange.target.host):
            raise _changed()

    # the package index

    async def _answer_from_index(self, request: RequestHead) -> bool:
        """Answer a request that is for the proxy itself, from the package index."""
        outbound = self._outbound
        if request.target == "/":
            self._begun = True
            await self._client.write(answers.page(outbound.refusals, body=request.method != "HEAD"))
            return False
        if request.body:
            raise BadRequest("the package index takes no bodies")
        access = Access(outbound.plan.sandbox, "index", method=request.method, path=_logged(request.target))
        packages = outbound.packages()
        access.verdict = outbound.front.decide(request.target, packages)
        outbound.admit_without_connection(access)
        with self._recorded(access):
            headers = {name.decode().lower(): value.decode("latin-1") for name, value in request.headers}
            answer = await outbound.front.answer(request.method, request.target, headers, packages)
            try:
                await self._give(request, answer, outbound.meter(access))
            finally:
                await answer.aclose()
            if answer.refused is not None:
                outbound.close(access, answer.refused)
            return request.lasting

    async def _give(self, request: RequestHead, answer: IndexAnswer, meter: Meter) -> None:
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
        if not request.lasting:
            headers.append((b"Connection", b"close"))
        self._begun = True
        head = write_response(answer.status, answer.reason.encode("latin-1"), headers)
        if isinstance(answer.body, bytes):
            meter.received(len(answer.body))
            await self._client.write(head + answer.body)
            return
        await self._client.write(head)
        async for piece in answer.body:
            meter.received(len(piece))
            await self._client.write(piece)


def _completed(sending: asyncio.Future[bool] | None) -> bool:
    """Whether the body of a request was sent completely. None: it has none."""
    if sending is None:
        return True
    return sending.done() and not sending.cancelled() and sending.exception() is None and sending.result()


def _access_in(tunnel: Tunnel) -> Access:
    before, inspected = tunnel.access, tunnel.credentials is not None
    return Access(
        before.sandbox, "http", tunnel.target, address=before.address, upstream=before.upstream, inspected=inspected
    )


def _logged(path: str) -> str:
    """Return a path as it is logged: without the query, which may hold secrets."""
    return path.partition("?")[0][:_MOST_PATH]


def _is_push(path: str) -> bool:
    """Whether a request sends the objects of a git push."""
    return path.partition("?")[0].endswith("/git-receive-pack")


def _split(request: RequestHead) -> tuple[Target, str]:
    """Return the target of a request in absolute form and the path there. Raises `AccessRefused`."""
    scheme, name, path = _parse_url(request.target)
    if request.method == "CONNECT" or scheme is None:
        raise BadRequest("the request must name a URL: http://host/path")
    if scheme != "http":
        reason = f"a request for {scheme[:20]} cannot be forwarded in the clear"
        raise BadRequest(reason, hint="open a tunnel with CONNECT")
    if "#" in request.target:
        raise BadRequest("the URL of a request has no fragment")
    target = read_authority(name, _HTTP)
    for host in request.all(b"host"):
        if read_authority(host, _HTTP) != target:
            raise BadRequest("the URL of the request and its Host header name different hosts")
    return target, "*" if request.method == "OPTIONS" and not path else path or "/"


def _parse_url(url: str) -> tuple[str | None, str, str]:
    """Return the scheme, the authority, and the path with the query. Without a scheme it is None."""
    scheme, separator, rest = url.partition("://")
    name = re.split("[/?]", rest, maxsplit=1)[0]
    path = rest[len(name) :]
    return scheme.lower() if separator else None, name, "/" + path if path.startswith("?") else path


def _path_inside(tunnel: Tunnel, request: RequestHead) -> str:
    """Return the path and query of a request, which must be for the host of its tunnel. Raises `AccessRefused`."""
    path = request.target
    hosts: list[str | bytes] = [*request.all(b"host")]
    if request.method == "CONNECT":
        raise BadRequest("a tunnel cannot be opened inside a tunnel")
    if "#" in path:
        raise BadRequest("the path of a request has no fragment")
    if not path.startswith("/") and not (path == "*" and request.method == "OPTIONS"):
        scheme, name, path = _parse_url(path)
        if scheme != "https" or tunnel.credentials is None:
            raise BadRequest("inside a tunnel, a request names a path")
        hosts.append(name)
        path = path or "/"
    for host in hosts:
        if read_authority(host, tunnel.target.port) != tunnel.target:
            raise AccessRefused(
                f"the tunnel is for {tunnel.target}, and the request inside it is for another host",
                status=421,
                hint="open a tunnel for each host",
            )
    return path


def _changed() -> AccessRefused:
    return AccessRefused("the policy has changed meanwhile", code="conflict", status=503, retry=True)


def _in_the_clear(target: Target) -> AccessRefused:
    """Nobody would remove the credential from the responses of such a host to requests without TLS."""
    return AccessRefused(
        f"{target.host} is reached by https only: it gets a credential on the way", hint="use https://"
    )
