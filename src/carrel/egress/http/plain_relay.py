"""HTTP that nobody encrypted: each request is read whole, decided by itself, and written anew for its target.

So nothing can be hidden behind a request, or between two. What a server answers is read with the same care.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from carrel.egress.access import Access, Refused, Target
from carrel.egress.http import answers
from carrel.egress.http.messages import (
    MOST,
    Chunks,
    Header,
    Request,
    Response,
    chunk,
    end_of,
    read_request,
    read_response,
    write_request,
    write_response,
)
from carrel.egress.index.front import Answer
from carrel.egress.listener.tunnel import copy, tunnel
from carrel.egress.outbound.budget import Meter
from carrel.egress.outbound.connections import Outbound
from carrel.egress.outbound.names import read_authority
from carrel.egress.sockets import IDLE_S, Ended, farewell, look, send, take

log = logging.getLogger("carrel.egress")

HEAD_S = 10.0
"""A head must come whole within this time."""
NEXT_S = 75.0
"""How long a client may take to begin its next request."""
_PORT = 80
authority = lru_cache(1024)(read_authority)
"""What is written again and again is read once."""
_MOST_INTERIM = 16
_PIECE = 64 * 1024


@dataclass(slots=True)
class Connection:
    """A connection to a target, and the access that it was opened for."""

    target: Target
    upstream: socket.socket
    access: Access
    meter: Meter


async def read_head(client: socket.socket, patience_s: float = HEAD_S) -> bytes:
    """The next head of a client. Raises `Ended`, `TimeoutError`, or `Refused` when it is too long."""
    if patience_s > HEAD_S:
        await look(client, bool, 1, patience_s, later=True)
    return take(client, await look(client, end_of, MOST, HEAD_S))


class PlainRelay:
    """The requests of one client's connection."""

    def __init__(self, client: socket.socket, outbound: Outbound, fixed: Connection | None = None):
        """`fixed`: the connection is a tunnel, and all requests must be for its target. Its access and its socket
        belong to the caller.
        """
        self._client = client
        self._outbound = outbound
        self._fixed = fixed
        self._connection = fixed
        self._begun = False

    async def serve(self, head: bytes) -> None:
        """Answer the request with this head, and those that follow. Closes everything but what the caller gave."""
        bodiless = False
        try:
            while True:
                self._begun = bodiless = False
                request = self._read(head)
                bodiless = request.method == "HEAD"
                if not await self._answer(request):
                    break
                head = await read_head(self._client, NEXT_S)
            await farewell(self._client)
        except Refused as refusal:
            await self._refuse(refusal, bodiless)
            if self._fixed is not None:
                raise
        except (OSError, TimeoutError):
            return  # the client is gone, or has nothing more to ask
        except Exception:
            log.exception("sandbox %s: a request failed", self._outbound.plan.sandbox)
            await self._refuse(answers.failed(), bodiless)
        finally:
            self._drop()

    async def _refuse(self, refusal: Refused, bodiless: bool) -> None:
        self._drop()
        if self._begun:
            return  # an answer has begun: only cutting it can still say that it failed
        with suppress(OSError):
            await send(self._client, answers.refusal(refusal, body=not bodiless))
            if self._fixed is None:
                await farewell(self._client)

    def _read(self, head: bytes) -> Request:
        try:
            return read_request(head)
        except Refused as refusal:
            if self._fixed is None:
                self._outbound.refuse(Access(self._outbound.plan.sandbox, "http"), refusal)
            raise

    async def _answer(self, request: Request) -> bool:
        """Whether the connection may go on after this request."""
        if self._fixed is not None:
            return await self._inside(self._fixed, request)
        if request.target.startswith("/"):
            return await self._ask_front(request)
        access = Access(self._outbound.plan.sandbox, "http", method=request.method)
        try:
            target, path = _split(request)
        except Refused as refusal:
            self._outbound.refuse(access, refusal)
            raise
        access.path = path.partition("?")[0]
        if self._outbound.rules.credited(target):
            access.target, clear = target, _in_the_clear(target)
            self._outbound.refuse(access, clear)
            raise clear
        return await self._forward(request, access, target, path)

    async def _inside(self, tunnel: Connection, request: Request) -> bool:
        """A request inside a tunnel. The first is what the tunnel was opened for, and its own record tells of it; every
        other is decided, counted and logged by itself.
        """
        outbound, target = self._outbound, tunnel.target
        self._check_inside(target, request)
        path = request.target.partition("?")[0]
        if tunnel.access.path is None:
            tunnel.access.method, tunnel.access.path = request.method, path
            lasting, onward = await self._relay(request, tunnel, request.target)
            return lasting and onward
        access = Access(outbound.plan.sandbox, "http", target, request.method, path)
        await outbound.within(access, target, tunnel.access)
        try:
            connection = Connection(target, tunnel.upstream, access, outbound.meter(access))
            lasting, onward = await self._relay(request, connection, request.target)
            return lasting and onward
        except BaseException as error:
            outbound.close(access, error)
            raise
        finally:
            outbound.close(access)

    def _check_inside(self, target: Target, request: Request) -> None:
        """Raises `Refused` for a request that is not for the target of its tunnel, or not in the clear."""
        if self._outbound.rules.credited(target):
            raise _in_the_clear(target)
        if not request.target.startswith("/") and request.target != "*":
            raise _bad("inside a tunnel, a request names a path only")
        for host in request.all(b"host"):
            if authority(host, target.port) != target:
                raise Refused(
                    f"the tunnel is for {target}, and the request inside it is for another host",
                    status=421,
                    hint="open a tunnel for each host",
                )

    async def _forward(self, request: Request, access: Access, target: Target, path: str) -> bool:
        outbound = self._outbound
        while True:
            reused = self._reusable(target)
            if reused is None:
                upstream = await outbound.open(access, target)
                connection = Connection(target, upstream, access, outbound.meter(access))
            else:
                await outbound.again(access, target, reused.access)
                connection = Connection(target, reused.upstream, access, outbound.meter(access))
            self._connection = connection
            onward = False
            try:
                lasting, onward = await self._relay(request, connection, path)
                return lasting
            except (OSError, TimeoutError) as error:
                outbound.close(access, error)
                if self._begun:
                    raise
                if reused is None or request.body:
                    raise _unanswered(target, error) from None
                # The server had ended the connection meanwhile, as it may. Nothing was answered: ask once more.
                access = Access(access.sandbox, access.protocol, method=access.method, path=access.path)
            except BaseException as error:
                outbound.close(access, error)
                raise
            finally:
                outbound.close(access)
                if not onward:
                    self._drop()

    def _reusable(self, target: Target) -> Connection | None:
        """The connection of the request before, when it leads there and is as it should be: silent."""
        connection = self._connection
        if connection is not None and connection.target == target:
            try:
                connection.upstream.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return connection
            except OSError:
                pass
        self._drop()
        return None

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection is not self._fixed:
            connection.upstream.close()

    # one exchange

    async def _relay(self, request: Request, connection: Connection, path: str) -> tuple[bool, bool]:
        """Send the request, pass on the answer. Whether the client's connection and the server's may be used again."""
        headers = request.forwarded()
        if b"upgrade" in request.fields and request.websocket and request.method == "GET" and not request.body:
            headers += _UPGRADE
        host = str(connection.target).removesuffix(f":{_PORT}")
        head = write_request(request.method, path, host, headers, request)
        connection.meter.sent(len(head))
        await send(connection.upstream, head)
        if not request.body:
            return await self._receive(request, connection)
        body = asyncio.get_running_loop().create_task(self._send_body(request, connection))
        try:
            lasting, onward = await self._receive(request, connection)
            return lasting and body.done(), onward and body.done()
        except (OSError, TimeoutError, Refused):
            # What went wrong with the body is why the answer did.
            if body.done() and not body.cancelled() and isinstance(error := body.exception(), Refused):
                raise error from None
            raise
        finally:
            body.cancel()
            await asyncio.gather(body, return_exceptions=True)

    async def _send_body(self, request: Request, connection: Connection) -> None:
        """The body of a request. When the client does not send it as it must, the server gets no chance to wait."""
        try:
            if request.length is not None:
                await copy(self._client, connection.upstream, connection.meter.sent, most=request.length)
            else:
                async for piece in _unchunked(self._client, connection.meter.sent):
                    await send(connection.upstream, chunk(piece))
                await send(connection.upstream, chunk(b""))
        except (Refused, Ended, TimeoutError):
            with suppress(OSError):
                connection.upstream.shutdown(socket.SHUT_RDWR)
            raise
        except OSError:
            # Perhaps the server has heard enough, and has answered.
            with suppress(OSError):
                connection.upstream.shutdown(socket.SHUT_WR)

    async def _receive(self, request: Request, connection: Connection) -> tuple[bool, bool]:
        response = await self._read_response(request, connection)
        if response.status == 101:
            await self._switch(request, response, connection)
            return False, False
        bodiless = response.bodiless(request.method)
        endless = not bodiless and not response.chunked and response.length is None
        lasting = request.lasting and not endless and not (response.chunked and request.minor == 0)
        headers = response.forwarded()
        if response.length is not None:
            headers.append((b"Content-Length", b"%d" % response.length))
        elif response.chunked and request.minor == 1 and not bodiless:
            headers.append((b"Transfer-Encoding", b"chunked"))
        if not lasting:
            headers.append((b"Connection", b"close"))
        head = write_response(response.status, response.reason, headers)
        await self._pass_on(request, response, connection, head, bodiless=bodiless)
        return lasting, response.lasting and not endless

    async def _read_response(self, request: Request, connection: Connection) -> Response:
        """The head of the final answer. Those before it are passed on."""
        for _ in range(_MOST_INTERIM):
            try:
                head = take(connection.upstream, await look(connection.upstream, end_of, MOST, IDLE_S, later=True))
                response = read_response(head)
            except Refused as refusal:
                raise Refused(refusal.reason, code="bad_response", status=502) from None
            connection.meter.received(len(head))
            if response.status >= 200 or response.status == 101:
                return response
            if request.minor == 1:
                head = write_response(response.status, response.reason, response.forwarded())
                await send(self._client, head)
        raise Refused("the server sends no final answer", code="bad_response", status=502)

    async def _switch(self, request: Request, response: Response, connection: Connection) -> None:
        """A WebSocket begins."""
        if not (request.websocket and response.websocket and request.method == "GET" and not request.body):
            raise Refused("the server switches to what was not asked for", code="bad_response", status=502)
        self._begun = True
        head = write_response(101, b"Switching Protocols", [*response.forwarded(), *_UPGRADE])
        await send(self._client, head)
        await tunnel(self._client, connection.upstream, connection.meter)

    async def _pass_on(
        self, request: Request, response: Response, connection: Connection, head: bytes, *, bodiless: bool
    ) -> None:
        """Send the head of an answer and the body behind it."""
        if bodiless or response.chunked:
            self._begun = True
            await send(self._client, head)
            if not bodiless:
                await self._pass_chunks(request, connection)
            return
        # What of the body is there already goes with the head: most answers are then one packet.
        first = _at_hand(connection.upstream, _PIECE if response.length is None else min(_PIECE, response.length))
        connection.meter.received(len(first))
        self._begun = True
        await send(self._client, head + first)
        left = None if response.length is None else response.length - len(first)
        await copy(connection.upstream, self._client, connection.meter.received, most=left)

    async def _pass_chunks(self, request: Request, connection: Connection) -> None:
        async for piece in _unchunked(connection.upstream, connection.meter.received):
            await send(self._client, chunk(piece) if request.minor == 1 else piece)
        if request.minor == 1:
            await send(self._client, chunk(b""))

    # packages

    async def _ask_front(self, request: Request) -> bool:
        """A request that is for the proxy itself: for its package index, if for anything."""
        outbound, bodiless = self._outbound, request.method == "HEAD"
        if request.target == "/":
            self._begun = True
            await send(self._client, answers.page(outbound.refusals, body=not bodiless))
            return False
        if request.body:
            raise _bad("the package index takes no bodies")
        access = Access(outbound.plan.sandbox, "index", method=request.method, path=request.target.partition("?")[0])
        packages = outbound.packages()
        access.verdict = outbound.front.decide(request.target, packages)
        outbound.begin(access)
        try:
            headers = {name.decode().lower(): value.decode("latin-1") for name, value in request.headers}
            answer = await outbound.front.answer(request.method, request.target, headers, packages)
            try:
                await self._give(request, answer, outbound.meter(access))
            finally:
                await answer.aclose()
            if answer.refused is not None:
                outbound.close(access, answer.refused)
            return request.lasting
        except BaseException as error:
            outbound.close(access, error)
            raise
        finally:
            outbound.close(access)

    async def _give(self, request: Request, answer: Answer, meter: Meter) -> None:
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
        if not request.lasting:
            headers.append((b"Connection", b"close"))
        self._begun = True
        head = write_response(answer.status, answer.reason.encode("latin-1"), headers)
        if isinstance(answer.body, bytes):
            meter.received(len(answer.body))
            await send(self._client, head + answer.body)
            return
        await send(self._client, head)
        async for piece in answer.body:
            meter.received(len(piece))
            await send(self._client, piece)


_UPGRADE: list[Header] = [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]


def _split(request: Request) -> tuple[Target, str]:
    """Whom a request in absolute form is for, and the path there. Raises `Refused`."""
    scheme, separator, rest = request.target.partition("://")
    if request.method == "CONNECT" or not separator:
        raise _bad("the request must name a URL: http://host/path")
    if scheme.lower() != "http":
        raise Refused(
            f"a request for {scheme[:20].lower()} cannot be passed on in the clear",
            code="bad_request",
            status=400,
            hint="open a tunnel with CONNECT",
        )
    if "#" in rest:
        raise _bad("the URL of a request has no fragment")
    name = re.split("[/?]", rest, maxsplit=1)[0]
    target = authority(name, _PORT)
    for host in request.all(b"host"):
        if authority(host, _PORT) != target:
            raise _bad("the URL of the request and its Host header name different hosts")
    path = rest[len(name) :]
    if not path.startswith("/"):
        path = "*" if request.method == "OPTIONS" and not path else "/" + path
    return target, path


def _at_hand(source: socket.socket, most: int) -> bytes:
    try:
        return source.recv(most) if most else b""
    except BlockingIOError:
        return b""


async def _unchunked(source: socket.socket, count: Callable[[int], None]) -> AsyncIterator[bytes]:
    """The body that a peer sends in chunks, piece by piece; not a byte after it is taken."""
    chunks, held, ended = Chunks(), b"", False
    while not ended:
        data = await look(source, _whatever, _PIECE, IDLE_S)
        used, piece = chunks.feed(held + data)
        ended = chunks.ended
        # The beginning of a line is the body's too. Left where it lies, it could keep the rest from being sent.
        taken = used - len(held) if ended else len(data)
        held = (held + data)[used:]
        take(source, taken)
        count(taken)
        if piece:
            yield piece


def _whatever(data: bytes) -> bytes | None:
    return data or None


def _bad(reason: str) -> Refused:
    return Refused(reason, code="bad_request", status=400)


def _in_the_clear(target: Target) -> Refused:
    """Nobody would take the credential out of what such a host answers to a request without TLS."""
    return Refused(f"{target.host} is reached by https only: it gets a credential on the way", hint="use https://")


def _unanswered(target: Target, error: Exception) -> Refused:
    if isinstance(error, TimeoutError):
        return Refused(f"{target} did not answer in time", code="timed_out", status=504, retry=True)
    return Refused(f"{target} ended the connection without an answer", code="unreachable", status=502, retry=True)
