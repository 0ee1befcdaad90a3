"""What a sandbox is told: refusals in HTTP, in TLS and in SOCKS, and the page that says what this port is."""

from __future__ import annotations

import json
from http import HTTPStatus

from carrel.egress.heads import Header, write_response
from carrel.egress.terms import Refused

CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"

_MOST_REASON = 200
_ACCESS_DENIED, _UNRECOGNIZED_NAME = 49, 112
_SOCKS_FAILED, _SOCKS_DENIED, _SOCKS_UNREACHABLE = 1, 2, 4

_PAGE = """\
This is the way out of a carrel sandbox: an HTTP and SOCKS5 proxy, and a package index for pip and uv.

Set it as the proxy of a program (HTTP_PROXY, HTTPS_PROXY; they are set already), and ask for the address you want.
Every connection is decided by this agent's policy. There is nothing else at this address.
"""


def failed() -> Refused:
    """What is said when carrel itself failed."""
    return Refused("the proxy failed", code="platform_error", status=500, hint="try again in a moment", retry=True)


def refusal(refused: Refused, *, body: bool = True) -> bytes:
    """A refusal as a whole HTTP answer, after which the connection ends. `body` False: the answer to a HEAD."""
    content = (json.dumps(refused.shown()) + "\n").encode()
    headers = [_length(content), (b"Content-Type", b"application/json")]
    if refused.retry:
        headers.append((b"Retry-After", b"1"))
    headers += [(b"Cache-Control", b"no-store"), (b"Proxy-Status", _proxy_status(refused)), (b"Connection", b"close")]
    return write_response(refused.status, _phrase(refused), headers) + (content if body else b"")


def page(*, body: bool = True) -> bytes:
    """The answer to a request that is for nobody else, after which the connection ends."""
    content = _PAGE.encode()
    headers = [_length(content), (b"Content-Type", b"text/plain; charset=utf-8"), (b"Connection", b"close")]
    return write_response(404, b"Not Found", headers) + (content if body else b"")


def alert(refused: Refused) -> bytes:
    """A refusal as the fatal TLS alert that says it best."""
    about_name = refused.status == HTTPStatus.MISDIRECTED_REQUEST
    return bytes((21, 3, 3, 0, 2, 2, _UNRECOGNIZED_NAME if about_name else _ACCESS_DENIED))


def socks_code(refused: Refused) -> int:
    """A refusal as the number that SOCKS has for it."""
    if refused.status in (502, 504):
        return _SOCKS_UNREACHABLE
    return _SOCKS_DENIED if refused.status in (403, 429) else _SOCKS_FAILED


def _length(content: bytes) -> Header:
    return b"Content-Length", b"%d" % len(content)


def _phrase(refused: Refused) -> bytes:
    try:
        standard = HTTPStatus(refused.status).phrase
    except ValueError:
        standard = "Refused"
    return f"{standard} ({_plain(refused.reason)})".encode()


def _proxy_status(refused: Refused) -> bytes:
    """As of RFC 9209."""
    errors = {403: "http_request_denied", 429: "http_request_denied", 502: "destination_unavailable"}
    errors |= {504: "connection_timeout", 500: "proxy_internal_error", 503: "proxy_internal_error"}
    error = errors.get(refused.status, "http_request_error")
    details = _plain(refused.reason).replace("\\", "/").replace('"', "'")
    return f'carrel; error={error}; details="{details}"'.encode()


def _plain(text: str) -> str:
    """Text that can stand in one line of a head: a policy may say anything."""
    return "".join(each if " " <= each <= "~" else "?" for each in text[:_MOST_REASON])
