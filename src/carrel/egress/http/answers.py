"""The proxy's own answers: refusals in HTTP, TLS and SOCKS, and the page that explains this port."""

from __future__ import annotations

import json
from collections.abc import Iterable
from http import HTTPStatus

from carrel.egress.access import AccessRefused
from carrel.egress.http.messages import Header, write_response

CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"

PROBLEM = b"application/problem+json"
_MOST_REASON = 300
_ACCESS_DENIED, _UNRECOGNIZED_NAME = 49, 112
_SOCKS_FAILED, _SOCKS_DENIED, _SOCKS_UNREACHABLE = 1, 2, 4

_PAGE = """\
This is the outbound proxy of a carrel sandbox: HTTP and SOCKS5, and a package index for pip and uv.

Set it as the proxy of a program (HTTP_PROXY, HTTPS_PROXY; they are set already), and ask for the address you want.
Every connection is decided by this agent's policy. There is nothing else at this address.
"""


def failed() -> AccessRefused:
    """Return the refusal for an error in carrel itself."""
    return AccessRefused(
        "the proxy failed", code="platform_error", status=500, hint="try again in a moment", retry=True
    )


def refusal(refused: AccessRefused, *, body: bool = True) -> bytes:
    """Return a refusal as a complete HTTP response, which ends the connection. `body` False: for a HEAD request."""
    content = body_of(refused)
    headers = [_length(content), (b"Content-Type", PROBLEM)]
    if refused.retry:
        headers.append((b"Retry-After", b"1"))
    headers += [(b"Cache-Control", b"no-store"), (b"Proxy-Status", _proxy_status(refused)), (b"Connection", b"close")]
    return write_response(refused.status, _phrase(refused), headers) + (content if body else b"")


def refused_push(refused: AccessRefused) -> bytes:
    """Return the refusal of a git push in git's own protocol: git shows nothing of another answer. The third side
    channel is for fatal errors.
    """
    message = b"\x03" + f"carrel refused the push: {_plain(sentence_of(refused))}\n".encode()
    content = b"%04x" % (len(message) + 4) + message + b"0000"
    kind = b"application/x-git-receive-pack-result"
    headers = [_length(content), (b"Content-Type", kind), (b"Cache-Control", b"no-store"), (b"Connection", b"close")]
    return write_response(200, b"OK", headers) + content


def body_of(refused: AccessRefused) -> bytes:
    """Return a refusal as a response body: carrel's usual object, with the names of RFC 9457 that uv shows to its
    users.
    """
    problem = {"title": _status_phrase(refused.status), "status": refused.status, "detail": sentence_of(refused)}
    return (json.dumps({**refused.as_dict(), **problem}) + "\n").encode()


def sentence_of(refused: AccessRefused) -> str:
    """Return a refusal as one sentence with its hint."""
    hint = refused.verdict.hint
    return refused.reason if hint is None else f"{refused.reason}: {hint}"


def page(refusals: Iterable[str] = (), *, body: bool = True) -> bytes:
    """Return the response for the root of this port, which ends the connection. It lists the last refusals, because
    some tools do not show them.
    """
    lines = [f"- {_plain(each)}\n" for each in refusals]
    content = "".join((_PAGE, "\nThe last refusals:\n" if lines else "", *lines)).encode()
    headers = [_length(content), (b"Content-Type", b"text/plain; charset=utf-8"), (b"Connection", b"close")]
    return write_response(404, b"Not Found", headers) + (content if body else b"")


def alert(refused: AccessRefused) -> bytes:
    """Return the TLS alert that matches a refusal best."""
    about_name = refused.status == HTTPStatus.MISDIRECTED_REQUEST
    return bytes((21, 3, 3, 0, 2, 2, _UNRECOGNIZED_NAME if about_name else _ACCESS_DENIED))


def socks_code(refused: AccessRefused) -> int:
    """Return the SOCKS reply code of a refusal."""
    if refused.status in (502, 504):
        return _SOCKS_UNREACHABLE
    return _SOCKS_DENIED if refused.status in (403, 429) else _SOCKS_FAILED


def _length(content: bytes) -> Header:
    return b"Content-Length", b"%d" % len(content)


def _phrase(refused: AccessRefused) -> bytes:
    return f"{_status_phrase(refused.status)} ({_plain(sentence_of(refused))})".encode()


def _status_phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "AccessRefused"


def _proxy_status(refused: AccessRefused) -> bytes:
    """Return the `Proxy-Status` header (RFC 9209)."""
    errors = {403: "http_request_denied", 429: "http_request_denied", 502: "destination_unavailable"}
    errors |= {504: "connection_timeout", 500: "proxy_internal_error", 503: "proxy_internal_error"}
    error = errors.get(refused.status, "http_request_error")
    details = _plain(refused.reason).replace("\\", "/").replace('"', "'")
    return f'carrel; error={error}; details="{details}"'.encode()


def _plain(text: str) -> str:
    """Return text that is safe in one line of a head: a policy may contain anything."""
    return "".join(each if " " <= each <= "~" else "?" for each in text[:_MOST_REASON])
