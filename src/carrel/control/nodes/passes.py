"""Passes: the signed proof that a node of this database forwards a request of an authenticated caller.

A pass is valid once, for seconds, at one process of one node, and for one request: its method, path, query, headers and
body. It names the caller's token by its id, never the token. Knows no route and no socket.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from carrel.errors import LimitExceeded, Unauthorized

HEADER = b"carrel-forwarded"
LIFETIME_S = 15.0
SKEW_S = 5.0
"""How much the estimates of the database's clock on two nodes may differ."""
MOST_SEEN = 200_000
"""Passes that are remembered as used; more valid ones than that within their lifetime are refused."""
MAX_PASS = 1024
ADMINISTRATOR, ANYONE = "administrator", "anyone"
"""The caller has the administrator's token of a node; or the node needs no token."""
_VERSION = b"1"
_KEPT = frozenset(
    {
        b"accept", b"carrel-approval", b"carrel-wait", b"content-type", b"idempotency-key", b"if-none-match",
        b"last-event-id", b"mcp-method", b"mcp-name", b"mcp-protocol-version", b"mcp-session-id", b"traceparent",
        b"tracestate", b"x-request-id",
    }
)  # fmt: skip
"""The headers of a request that travel with it. All others concern one connection, or are secrets."""

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Forwardable:
    """A request as a pass describes it. `body` is `none`, `sha256 …`, `length …`, or `stream` if its length is not
    known.
    """

    method: str
    target: bytes
    """The path as it was sent, with the query."""
    headers: Headers
    body: str


@dataclass(frozen=True, slots=True)
class Pass:
    """A verified pass."""

    sender: str
    caller: str
    """`ADMINISTRATOR`, `ANYONE`, or the id of a token."""
    body: str


def kept_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers of a request that are forwarded."""
    return [(name, value) for name, value in headers if name in _KEPT]


def digest_of(body: bytes) -> str:
    """Describe a body that is known as a whole."""
    return f"sha256 {hashlib.sha256(body).hexdigest()}"


class Passes:
    """Makes and checks the passes of one node. `clock` is the time of the database, which all nodes share."""

    def __init__(self, key: bytes, node: str, boot: str, clock: Callable[[], float]):
        self._key = key
        self._node = node
        self._boot = boot
        self._clock = clock
        self._seen: set[bytes] = set()
        self._order: deque[tuple[float, bytes]] = deque()

    def make(self, request: Forwardable, caller: str, to: str, to_boot: str) -> bytes:
        """Return the value of the header for a request to a node."""
        said = b";".join(
            (
                _VERSION,
                self._node.encode(),
                b"%.3f" % (self._clock() + LIFETIME_S),
                secrets.token_hex(12).encode(),
                caller.encode(),
                request.body.encode(),
            )
        )
        return said + b";" + self._mac(said, request, to, to_boot)

    def check(self, value: bytes, request: Forwardable) -> Pass:
        """Return the pass in a header if it is for this request, this node and now, and was not used before;
        `Unauthorized`. The body of `request` is not looked at: compare it with the pass when it has come.
        """
        parts = value.split(b";")
        if len(value) > MAX_PASS or len(parts) != 7 or parts[0] != _VERSION:
            raise _refused("it is malformed or of another version of carrel")
        said, mac = value.rpartition(b";")[::2]
        if not hmac.compare_digest(mac, self._mac(said, request, self._node, self._boot)):
            raise _refused("it is not for this request and this server, or another secret signed it")
        sender, expires, nonce, caller, body = (each.decode("ascii", "replace") for each in parts[1:6])
        now, ends = self._clock(), float(expires)
        if not now - SKEW_S < ends < now + LIFETIME_S + SKEW_S:
            raise _refused("it has expired")
        self._use(nonce.encode(), ends, now)
        return Pass(sender, caller, body)

    def _use(self, nonce: bytes, ends: float, now: float) -> None:
        while self._order and self._order[0][0] < now - 2 * SKEW_S:
            self._seen.discard(self._order.popleft()[1])
        if nonce in self._seen:
            raise _refused("it was used before")
        if len(self._seen) >= MOST_SEEN:
            raise LimitExceeded("too many forwarded requests at once", hint="try again soon")
        self._seen.add(nonce)
        self._order.append((ends, nonce))

    def _mac(self, said: bytes, request: Forwardable, to: str, to_boot: str) -> bytes:
        parts = [said, to.encode(), to_boot.encode(), request.method.encode(), request.target]
        parts += [b"%s:%s" % pair for pair in sorted(request.headers)]
        # Every part has its length before it, so that no two requests have the same text.
        text = b"".join(b"%d:%s" % (len(part), part) for part in parts)
        return hmac.new(self._key, text, hashlib.sha256).hexdigest().encode()


def require_body(passed: Pass, body: bytes) -> None:
    """Raise `Unauthorized` when a body is not the one that a pass was made for."""
    kind, _, wanted = passed.body.partition(" ")
    if (kind == "sha256" and not hmac.compare_digest(passed.body, digest_of(body))) or (
        kind == "length" and wanted != str(len(body))
    ):
        raise _refused("the body is another")


def require_length(passed: Pass, length: bytes | None) -> None:
    """Raise `Unauthorized` when the `Content-Length` of a body that is not read as a whole contradicts the pass."""
    kind, _, wanted = passed.body.partition(" ")
    given = None if length is None else length.decode("latin-1")
    allowed = {"none": given in {None, "0"}, "length": given == wanted, "stream": given is None}
    if not allowed.get(kind, False):
        raise _refused("the body is another")


def _refused(why: str) -> Unauthorized:
    return Unauthorized(
        f"the forwarded request is refused: {why}",
        field="Carrel-Forwarded",
        hint="only servers on one database with the same CARREL_SECRET_KEY forward requests; send a token instead",
    )
