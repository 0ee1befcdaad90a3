"""HTTP requests and one WebSocket to a server on this machine, with the standard library only.

The SDK is not used: its packages take longer to import than `carrel here` may take to start. Knows nothing of carrel
but its problem objects.
"""

from __future__ import annotations

import base64
import json
import os
import socket
from typing import Any

from carrel.errors import InvalidRequest, PlatformError, ServerUnreachable, from_problem

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
NOT_MODIFIED = 304
MOST_HEADERS = 64 * 1024
MOST_ANSWER = 64 * 1024 * 1024


class LocalWire:
    """A connection for requests, one after the other. It is opened again when the server has closed it."""

    def __init__(self, url: str, token: str | None):
        scheme, _, rest = url.partition("://")
        host, _, port = rest.rpartition(":")
        if scheme != "http" or not port.isdecimal():
            raise InvalidRequest(
                f"'{url}' is not the URL of a server on this machine",
                field="CARREL_URL",
                hint="unset CARREL_URL, or set it to a URL such as http://127.0.0.1:7070",
            )
        self.url = url
        self._address = host.strip("[]"), int(port)
        self._headers = f"host: {rest}\r\nuser-agent: carrel-here\r\n"
        if token:
            self._headers += f"authorization: Bearer {token}\r\n"
        self._socket: socket.socket | None = None

    def request(
        self, method: str, path: str, body: object = None, *, timeout: float | None = 60.0, unless: int | None = None
    ) -> Any:
        """Send a request and return the JSON of its answer, None if that is empty. Raises the error it stands for.
        `unless` is the version that the caller knows: the answer is None if it is still the current one.
        """
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\n{self._headers}content-length: {len(content)}\r\n"
        head += "" if unless is None else f'if-none-match: "{unless}"\r\n'
        head += "\r\n" if body is None else "content-type: application/json\r\n\r\n"
        reused = self._socket is not None
        try:
            try:
                status, answer = self._exchange(head.encode() + content, timeout)
            except (ConnectionError, EOFError):
                if not reused:
                    raise
                self.close()  # the server closes idle connections
                status, answer = self._exchange(head.encode() + content, timeout)
        except (OSError, EOFError) as error:
            self.close()
            raise unreachable(self.url, error) from None
        try:
            value = json.loads(answer) if answer else None
        except ValueError:
            raise PlatformError(f"the server at {self.url} sent an answer that is not JSON") from None
        if not 200 <= status < 300 and (status != NOT_MODIFIED or unless is None):
            raise from_problem(value if isinstance(value, dict) else {}, status)
        return value

    def _exchange(self, request: bytes, timeout: float | None) -> tuple[int, bytes]:
        if self._socket is None:
            self._socket = connect(self._address)
        self._socket.settimeout(timeout)
        self._socket.sendall(request)
        status, headers, rest = _answer_head(self._socket)
        length = int(headers.get("content-length", "0"))
        if length > MOST_ANSWER or "transfer-encoding" in headers:
            raise EOFError("the answer is too long")
        parts, missing = [rest], length - len(rest)
        while missing > 0:
            part = self._socket.recv(min(missing, 1 << 16))
            if not part:
                raise EOFError("the answer broke off")
            parts.append(part)
            missing -= len(part)
        return status, b"".join(parts)

    def open_socket(self, path: str, approval: str | None = None) -> WebSocket:
        """Open a WebSocket on a connection of its own. `approval` is the id of one that the request uses."""
        key = base64.b64encode(os.urandom(16)).decode()
        head = (
            f"GET {path} HTTP/1.1\r\n{self._headers}connection: Upgrade\r\nupgrade: websocket\r\n"
            f"sec-websocket-version: 13\r\nsec-websocket-key: {key}\r\n"
        )
        head += f"carrel-approval: {approval}\r\n\r\n" if approval else "\r\n"
        try:
            connection = connect(self._address)
            connection.settimeout(60.0)
            connection.sendall(head.encode())
            status, headers, rest = _answer_head(connection)
            if status != 101:
                length = min(int(headers.get("content-length", "0")), MOST_HEADERS)
                while len(rest) < length and (part := connection.recv(length - len(rest))):
                    rest += part
                connection.close()
                try:
                    problem = json.loads(rest)
                except ValueError:
                    problem = None
                raise from_problem(problem if isinstance(problem, dict) else {}, status)
        except (OSError, EOFError) as error:
            raise unreachable(self.url, error) from None
        connection.setblocking(False)
        return WebSocket(connection, rest)

    def open_stream(self, path: str) -> socket.socket:
        """Ask for an answer that goes on; return its connection, which does not block. The caller reads the answer."""
        try:
            connection = connect(self._address)
            connection.sendall(f"GET {path} HTTP/1.1\r\n{self._headers}\r\n".encode())
        except OSError as error:
            raise unreachable(self.url, error) from None
        connection.setblocking(False)
        return connection

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def connect(address: tuple[str, int]) -> socket.socket:
    """Connect to a server and send small packets at once: a key must not wait for the next one."""
    connection = socket.create_connection(address, 10.0)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def unreachable(url: str, error: Exception) -> ServerUnreachable:
    """Return the error for a connection that failed."""
    return ServerUnreachable(f"the server at {url} does not answer: {error}", hint="run the command again")


def _answer_head(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Read status and headers; return what came behind them too."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(1 << 16)
        if not part or len(data) > MOST_HEADERS:
            raise EOFError("the server closed the connection")
        data += part
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) < 2 or not words[1].isdecimal():
        raise EOFError("that is not an HTTP server")
    pairs = (line.partition(":") for line in lines)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}, rest


class WebSocket:
    """The messages of a WebSocket on a connection that does not block."""

    def __init__(self, connection: socket.socket, received: bytes):
        self.connection = connection
        self._received = bytearray(received)
        self._parts = bytearray()
        self._kind = 0
        self._unsent = bytearray()
        self.closed = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self.connection.fileno()

    @property
    def unsent(self) -> int:
        """How many bytes wait to be sent."""
        return len(self._unsent)

    def send(self, kind: int, data: bytes) -> None:
        """Add a message to those that wait, and send what the connection takes."""
        size = len(data)
        if size < 126:
            length = bytes([0x80 | size])
        else:
            length = b"\xfe" + size.to_bytes(2, "big") if size <= 0xFFFF else b"\xff" + size.to_bytes(8, "big")
        mask = os.urandom(4)
        self._unsent += bytes([0x80 | kind]) + length + mask + _masked(data, mask)
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes without waiting."""
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(memoryview(self._unsent)[: 1 << 18])]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
            self._unsent.clear()

    def receive(self) -> list[tuple[int, bytes]]:
        """Read what has arrived; return the whole messages. At the end `closed` is true."""
        try:
            data = self.connection.recv(1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.closed = True
        self._received += data
        return self.messages()

    def messages(self) -> list[tuple[int, bytes]]:
        """Return the whole messages among the bytes that were read."""
        found = []
        while (frame := self._frame()) is not None:
            kind, final, data = frame
            if kind == CLOSE:
                self.closed = True
            elif kind == PING:
                self.send(PONG, data)
            elif kind != PONG:
                self._kind = kind or self._kind
                self._parts += data
                if final:
                    found.append((self._kind, bytes(self._parts)))
                    self._parts.clear()
        return found

    def _frame(self) -> tuple[int, bool, bytes] | None:
        data = self._received
        if len(data) < 2:
            return None
        length, start = data[1] & 0x7F, 2
        if length >= 126:
            start = 4 if length == 126 else 10
            if len(data) < start:
                return None
            length = int.from_bytes(data[2:start], "big")
        if length > MOST_ANSWER:
            raise PlatformError("the server sent a message that is too long")
        if len(data) < start + length:
            return None
        kind, final, payload = data[0] & 0x0F, bool(data[0] & 0x80), bytes(data[start : start + length])
        del data[: start + length]
        return kind, final, payload

    def close(self) -> None:
        """Close the connection; the server ends the command."""
        self.connection.close()


def _masked(data: bytes, mask: bytes) -> bytes:
    """Apply the mask that the protocol wants for bytes of a client."""
    repeated = mask * (len(data) // 4 + 1)
    number = int.from_bytes(data, "little") ^ int.from_bytes(repeated[: len(data)], "little")
    return number.to_bytes(len(data), "little")
