"""Which headers pass between a visitor of a port and the server in the sandbox. Pure.

Inward: nothing that identifies the visitor to carrel, and nothing that concerns one connection. Outward: nothing that a
browser or a proxy in front of carrel would apply to more than this one answer.

By path, the page has carrel's own origin: a sandbox could run its scripts there. So such an answer gets a policy that
gives it an origin of its own, and loses its cookies. By host, every port has an origin of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

OWN = b"carrel-"
"""Headers that begin with this are between carrel and its callers."""
COOKIE, SECURE_COOKIE = "carrel-port", "__Host-carrel-port"
"""The cookie with the access to a port, by host. A browser lets no other host set the second one."""
ACCESS = "carrel-access"
"""The header and the query parameter with an access or a token."""

_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"http2-settings",
    }
)  # fmt: skip
_SET_HERE = frozenset({b"host", b"content-length", b"forwarded", b"x-real-ip", b"x-request-id"})
_WEBSOCKET = b"sec-websocket-"

_NEVER_OUT = frozenset(
    {
        b"alt-svc", b"clear-site-data", b"strict-transport-security", b"public-key-pins", b"expect-ct", b"nel",
        b"report-to", b"reporting-endpoints", b"origin-agent-cluster", b"service-worker-allowed", b"x-request-id",
        b"x-sendfile", b"x-lighttpd-send-file", b"x-reproxy-url", b"x-varnish", b"set-cookie2",
        b"proxy-authenticate",
    }
)  # fmt: skip
"""Headers of an answer that a browser keeps for the whole host, or that a proxy in front of carrel obeys."""
_NEVER_OUT_PREFIXES = (OWN, b"x-accel-", b"sec-websocket-")
_NOT_BY_PATH = frozenset({b"set-cookie", b"www-authenticate", b"authentication-info"})
SANDBOXED = (
    (b"content-security-policy", b"sandbox allow-scripts allow-forms allow-popups allow-downloads allow-modals"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"cross-origin"),
)
"""Added to answers by path: the page has an opaque origin, and its address, which may have an access, stays secret."""
_LOCAL = re.compile(
    rb"https?://(?:localhost|127\.0\.0\.1|\[::1\]|0\.0\.0\.0)(?::(\d{1,5}))?(/[^\r\n]*)?", re.IGNORECASE
)


def inward(
    given: Iterable[tuple[bytes, bytes]], *, host: bytes, public: bytes, scheme: bytes, prefix: bytes
) -> Headers:
    """Return the headers for the server. `host` is what it sees as its own, `public` and `scheme` what the visitor
    asked for, `prefix` the path before its own. Credentials were removed before.
    """
    headers = list(given)
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    kept = [
        (name, value)
        for name, value in headers
        if name not in _HOP
        and name not in _SET_HERE
        and name not in named
        and not name.startswith((OWN, b"x-forwarded-", _WEBSOCKET, b"proxy-"))
    ]
    added = [(b"host", host), (b"x-forwarded-host", public), (b"x-forwarded-proto", scheme)]
    return [*added, *([(b"x-forwarded-prefix", prefix)] if prefix else []), *kept]


def outward(given: Iterable[tuple[bytes, bytes]], *, by_host: bool, port: int, prefix: bytes) -> Headers:
    """Return the headers for the visitor."""
    headers = list(given)
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    kept: Headers = []
    for name, value in headers:
        if name in _HOP or name in named or name in _NEVER_OUT or name.startswith(_NEVER_OUT_PREFIXES):
            continue
        if name == b"set-cookie":
            if by_host and (cookie := _cookie(value)) is not None:
                kept.append((name, cookie))
            continue
        if not by_host and name in _NOT_BY_PATH | {each for each, _ in SANDBOXED[1:]}:
            continue
        kept.append((name, _location(value, port, prefix) if name in {b"location", b"content-location"} else value))
    return kept if by_host else [*kept, *SANDBOXED]


def _cookie(value: bytes) -> bytes | None:
    """Return a cookie for this host only; None for one with the name of carrel's own."""
    first, *rest = value.split(b";")
    name = first.partition(b"=")[0].strip().decode("latin-1")
    if name.lower() in {COOKIE.lower(), SECURE_COOKIE.lower()}:
        return None
    return b";".join([first, *(each for each in rest if each.partition(b"=")[0].strip().lower() != b"domain")])


def _location(value: bytes, port: int, prefix: bytes) -> bytes:
    """Return a redirection inside the server as one that the visitor can follow."""
    found = _LOCAL.fullmatch(value)
    if found is not None and int(found[1] or 80) == port:
        value = found[2] or b"/"
    return prefix + value if prefix and value.startswith(b"/") and not value.startswith(b"//") else value


def without_cookie(value: bytes) -> bytes:
    """Return the value of a `Cookie` header without carrel's own cookies."""
    own = (COOKIE.encode(), SECURE_COOKIE.encode())
    return b"; ".join(
        each for part in value.split(b";") if (each := part.strip()) and each.partition(b"=")[0] not in own
    )


def access_cookie(value: bytes, *, secure: bool) -> str | None:
    """Return the access in a `Cookie` header."""
    wanted = (SECURE_COOKIE if secure else COOKIE).encode()
    for part in value.split(b";"):
        name, _, text = part.strip().partition(b"=")
        if name == wanted:
            return text.decode("latin-1")
    return None
