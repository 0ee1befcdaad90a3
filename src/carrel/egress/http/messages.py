"""Heads of HTTP/1 messages and chunked bodies: read strictly, and written anew.

An accepted message has only one meaning. The parser is llhttp (httptools) without leniency: h11 accepts bare line
feeds, folded lines, and a length beside chunks, and is fifteen times slower. Knows no sockets and no policy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import httptools

from carrel.egress.access import BadRequest, BadResponse

MOST = 64 * 1024
"""The size limit of a head."""
MOST_HEADERS = 200
END = b"\r\n\r\n"

METHODS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "PROPFIND", "PROPPATCH", "MKCOL", "COPY"}
    | {"MOVE", "LOCK", "UNLOCK", "REPORT", "SEARCH"}
)
"""All other methods are refused. TRACE would return injected headers."""

Header = tuple[bytes, bytes]
Headers = tuple[Header, ...]

_REQUEST_LINE = re.compile(rb"([A-Z]{1,20}) ([\x21-\x7e]+) HTTP/1\.([01])\r\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: ([\t\x20-\x7e\x80-\xff]*))?\r\n")
_NUMBER = re.compile(rb"[0-9]{1,18}")
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authorization proxy-authenticate te trailer transfer-encoding "
    b"upgrade host content-length expect".split()
)
"""Headers that are never forwarded: they are about one connection, or written anew."""


@dataclass(slots=True)
class MessageHead:
    """The common part of both kinds of head."""

    minor: int
    """1 for HTTP/1.1, 0 for HTTP/1.0."""
    headers: Headers
    fields: Mapping[bytes, Sequence[bytes]]
    """The values of each header by its name in lower case."""
    length: int | None
    """The length of the body, if a header gives it."""
    chunked: bool

    def all(self, name: bytes) -> Sequence[bytes]:
        """Return the values of a header, given its name in lower case."""
        return self.fields.get(name, ())

    def words(self, name: bytes) -> set[bytes]:
        """Return the words of a list header in lower case."""
        values = self.fields.get(name)
        if values is None:
            return set()
        return {word.strip().lower() for value in values for word in value.split(b",")} - {b""}

    @property
    def lasting(self) -> bool:
        """Whether the connection may be used again."""
        return self.minor == 1 and b"close" not in self.words(b"connection")

    @property
    def websocket(self) -> bool:
        """Whether the message asks for a WebSocket, or accepts one."""
        asked = self.words(b"upgrade") == {b"websocket"} and b"upgrade" in self.words(b"connection")
        return asked and self.minor == 1

    def forwarded(self) -> list[Header]:
        """Return the headers to forward: none about this connection or the framing of the body."""
        named = self.words(b"connection")
        dropped = _HOP_BY_HOP | named if named else _HOP_BY_HOP
        return [header for header in self.headers if header[0].lower() not in dropped]


@dataclass(slots=True)
class RequestHead(MessageHead):
    """The head of a request."""

    method: str
    target: str

    @property
    def body(self) -> bool:
        """Whether a body follows."""
        return self.chunked or bool(self.length)


@dataclass(slots=True)
class ResponseHead(MessageHead):
    """The head of a response."""

    status: int
    reason: bytes

    def bodiless(self, method: str) -> bool:
        """Whether no body follows, whatever the headers say."""
        return method == "HEAD" or self.status in (204, 304) or self.status < 200


class _ParserCallbacks:
    """The callbacks of the parser."""

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self.fields: dict[bytes, list[bytes]] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        value = value.strip(b" \t")
        self.headers.append((name, value))
        self.fields.setdefault(name.lower(), []).append(value)


def end_of(data: bytes) -> int | None:
    """Return the size of the head at the start of the bytes; None when more are needed. Raises `Refused`."""
    at = data.find(END)
    if at >= 0:
        return at + len(END)
    if len(data) >= MOST:
        raise BadRequest("the head of the message is too long", status=431)
    return None


def read_request(data: bytes) -> RequestHead:
    """Parse the complete head of a request. Raises `Refused`."""
    line = _REQUEST_LINE.match(data)
    if line is None:
        raise BadRequest("the request does not begin with a method, a target and HTTP/1.1")
    method, target = line[1].decode(), line[2].decode()
    if method not in METHODS:
        raise BadRequest(f"the method {method} is not known here", status=501)
    head = _parse(data, httptools.HttpRequestParser, "request")
    length, chunked = _framing(head, minor=int(line[3]), what="request")
    found = RequestHead(int(line[3]), tuple(head.headers), head.fields, length, chunked, method, target)
    if b"expect" in head.fields and found.words(b"expect") != {b"100-continue"}:
        raise BadRequest("only 100-continue can be expected", status=417)
    hosts = len(head.fields.get(b"host", ()))
    if hosts > 1 or (hosts == 0 and found.minor == 1 and method != "CONNECT"):
        raise BadRequest("the request must have one Host header")
    if method == "CONNECT" and (found.chunked or found.length):
        raise BadRequest("a CONNECT has no body")
    return found


def read_response(data: bytes) -> ResponseHead:
    """Parse the complete head of a response. Raises `Refused` with status 502."""
    try:
        line = _STATUS_LINE.match(data)
        if line is None:
            raise BadRequest("the response does not begin with HTTP/1.1 and a status")
        head = _parse(data, httptools.HttpResponseParser, "response")
        length, chunked = _framing(head, minor=int(line[1]), what="response")
    except BadRequest as refusal:
        raise BadResponse(refusal.reason) from None
    return ResponseHead(int(line[1]), tuple(head.headers), head.fields, length, chunked, int(line[2]), line[3] or b"")


def _parse(
    data: bytes, kind: type[httptools.HttpRequestParser] | type[httptools.HttpResponseParser], what: str
) -> _ParserCallbacks:
    found = _ParserCallbacks()
    try:
        kind(found).feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # the head was parsed; the rest is not for the parser
    except httptools.HttpParserError as error:
        raise BadRequest(f"the {what} is not valid: {str(error)[:100].lower()}") from None
    if len(found.headers) > MOST_HEADERS:
        raise BadRequest(f"the {what} has too many headers", status=431)
    return found


def _framing(head: _ParserCallbacks, *, minor: int, what: str) -> tuple[int | None, bool]:
    """Return the length of the body and whether it is chunked. The parser refuses most errors here; nothing depends on
    that alone.
    """
    lengths, codings = head.fields.get(b"content-length"), head.fields.get(b"transfer-encoding")
    if codings:
        if lengths or minor == 0 or [value.lower() for value in codings] != [b"chunked"]:
            raise BadRequest(f"the {what} does not say clearly where its body ends")
        return None, True
    if not lengths:
        return None, False
    if len(lengths) > 1 or not _NUMBER.fullmatch(lengths[0]):
        raise BadRequest(f"the {what} does not say clearly where its body ends")
    return int(lengths[0]), False


def write_request(method: str, target: str, host: str, headers: Iterable[Header], request: RequestHead) -> bytes:
    """Return the head of a request to send: in origin form, with our own Host, and the framing of the body as read."""
    lines = [f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n".encode(), *map(_line, headers)]
    if request.chunked:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    elif request.length is not None:
        lines.append(b"Content-Length: %d\r\n" % request.length)
    if b"expect" in request.fields:
        lines.append(b"Expect: 100-continue\r\n")
    return b"".join(lines) + b"\r\n"


def write_response(status: int, reason: bytes, headers: Iterable[Header]) -> bytes:
    """The head of a response."""
    return b"".join([b"HTTP/1.1 %d %s\r\n" % (status, reason), *map(_line, headers), b"\r\n"])


def _line(header: Header) -> bytes:
    return b"%s: %s\r\n" % header


class Chunks:
    """Decodes a chunked body. Extensions and trailers are dropped, and limited."""

    _SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
    _TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")
    _MOST_LINE = 1024
    _MOST_BESIDE = 256 * 1024
    """The size limit of all extensions and trailers in one body."""

    def __init__(self) -> None:
        self._left = 0
        self._part = "size"
        self._beside = 0
        self.ended = False

    def feed(self, data: bytes) -> tuple[int, bytes]:
        """Return how many of the bytes were used, and their content. Unused bytes must be given again, with more.
        Raises `Refused`.
        """
        at = 0
        found: list[bytes] = []
        while not self.ended:
            if self._part == "data":
                piece = data[at : at + self._left]
                if not piece:
                    break
                found.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._part = "after"
                continue
            stop = data.find(b"\n", at, at + self._MOST_LINE)
            if stop < 0:
                if len(data) - at >= self._MOST_LINE:
                    raise BadRequest("a chunk of the body is announced by too long a line")
                break
            self._take_line(data[at : stop + 1])
            at = stop + 1
        return at, b"".join(found)

    def _take_line(self, line: bytes) -> None:
        if not line.endswith(b"\r\n"):
            raise BadRequest("a chunk of the body is not announced as it must be")
        text = line[:-2]
        if self._part == "after":
            if text:
                raise BadRequest("a chunk of the body is longer than announced")
            self._part = "size"
            return
        if self._part == "size":
            size = self._SIZE.fullmatch(text)
            if size is None:
                raise BadRequest("a chunk of the body is not announced as it must be")
            self._left = int(size[1], 16)
            self._part = "data" if self._left else "trailer"
            self._beside += len(text) - len(size[1])
        elif not text:
            self.ended = True
        elif not self._TRAILER.fullmatch(text):
            raise BadRequest("a trailer of the body is not valid")
        else:
            self._beside += len(text)
        if self._beside > self._MOST_BESIDE:
            raise BadRequest("the body's chunks carry too much beside the body")


def chunk(data: bytes) -> bytes:
    """Encode one chunk. An empty one ends the body."""
    return b"%x\r\n%s\r\n" % (len(data), data)
