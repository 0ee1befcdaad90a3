"""Minimal HTTP: a client so cheap that the server dominates the measurement. Only for benchmarks.

`python -m bench.wire` is a load generator in a separate process: one epoll loop, one open request on each connection.
It reads its orders as JSON from standard input and answers in JSON.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections.abc import Mapping
from typing import TypedDict

from bench.measure import BenchFailed

Address = str | tuple[str, int]
"""A Unix socket's path, or host and port."""

TRUE_BODY = b'{"command":"true"}'
SUCCESS = b'"exit_code":0,'
LARGE = 1 << 20


def dial(address: Address) -> socket.socket:
    """Open a connection."""
    unix = isinstance(address, str)
    connection = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    try:
        if not unix:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def request(
    method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, length: int | None = None
) -> bytes:
    """Return the bytes of a request. `length` announces a body that is sent separately."""
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    lines += [f"content-length: {len(body) if length is None else length}", "", ""]
    return "\r\n".join(lines).encode() + body


def answer_size(data: bytes) -> int | None:
    """Return the size of the whole response, as soon as its head is there."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    at = data.find(b"content-length: ", 0, end + 2)
    if at < 0:
        raise BenchFailed(f"an answer without length: {data[:200]!r}")
    return end + 4 + int(data[at + 16 : data.find(b"\r\n", at)])


def body_of(data: bytes, wanted: bytes = b"HTTP/1.1 2") -> bytes:
    """Return the body of a whole response; raises if it is not a success."""
    if not data.startswith(wanted):
        raise BenchFailed(f"a request failed: {data[:500].decode(errors='replace')}")
    return data[data.index(b"\r\n\r\n") + 4 :]


class Wire:
    """One blocking keep-alive connection."""

    def __init__(self, address: Address):
        self._socket = dial(address)

    def call(self, message: bytes) -> bytes:
        """Send a request; return the body of the response."""
        self._socket.sendall(message)
        return self.receive()

    def receive(self) -> bytes:
        """Return the body of the next response."""
        data = self._socket.recv(LARGE)
        size = None
        while data:
            size = size or answer_size(data)
            if size is not None and len(data) >= size:
                return body_of(data)
            more = self._socket.recv(LARGE)
            if not more:
                break
            data += more
        raise BenchFailed("the connection ended before the answer did")

    def upload(self, message: bytes, content: memoryview) -> bytes:
        """Send a head and then a large body."""
        self._socket.sendall(message)
        self._socket.sendall(content)
        return self.receive()

    def drain(self, message: bytes, *, chunked: bool) -> tuple[int, bytes]:
        """Send a request and count the bytes of a large response without storing them; also return its last bytes.

        The end of a chunked response is recognised by its last bytes, which is enough for output without carriage
        returns.
        """
        self._socket.sendall(message)
        buffer = bytearray(LARGE)
        view = memoryview(buffer)
        first = b""
        while b"\r\n\r\n" not in first:
            first += self._socket.recv(LARGE)
        head, _, tail = first.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 2"):
            raise BenchFailed(f"a request failed: {first[:500].decode(errors='replace')}")
        got = len(tail)
        size = None if chunked else int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        while (got < size) if size is not None else not tail.endswith(b"\r\n0\r\n\r\n"):
            count = self._socket.recv_into(view)
            if count == 0:
                raise BenchFailed("the connection ended before the answer did")
            got += count
            tail = (tail if count < 2048 else b"")[-2048:] + bytes(view[max(0, count - 2048) : count])
        return got, tail

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Orders(TypedDict):
    """The load to generate: connection `n` repeats its request."""

    addresses: list[str] | list[list[str | int]]
    requests: list[str]
    seconds: float


def storm(addresses: list[Address], requests: list[bytes], seconds: float) -> list[float]:
    """Keep one request open on every connection for the given time; return the latency of each, in seconds."""
    poll = select.epoll()
    connections: dict[int, socket.socket] = {}
    messages: dict[int, bytes] = {}
    sent: dict[int, float] = {}
    took: list[float] = []
    try:
        for address, message in zip(addresses, requests, strict=True):
            connection = dial(address)
            number = connection.fileno()
            connections[number], messages[number] = connection, message
            poll.register(number, select.EPOLLIN)
        clock = time.perf_counter
        ends = clock() + seconds
        for number, connection in connections.items():
            sent[number] = clock()
            connection.sendall(messages[number])
        kept: dict[int, bytes] = {}
        while sent:
            for number, _event in poll.poll():
                data = connections[number].recv(65536)
                if not data:
                    raise BenchFailed("the server hung up under load")
                data = kept.pop(number, b"") + data
                size = answer_size(data)
                if size is None or len(data) < size:
                    kept[number] = data
                    continue
                if SUCCESS not in data.replace(b": ", b":"):
                    raise BenchFailed(f"a command failed under load: {data[:500].decode(errors='replace')}")
                now = clock()
                took.append(now - sent.pop(number))
                if now < ends:
                    sent[number] = now
                    connections[number].sendall(messages[number])
        return took
    finally:
        poll.close()
        for connection in connections.values():
            connection.close()


def main() -> None:
    """Run the load generator."""
    orders: Orders = json.load(sys.stdin)
    addresses: list[Address] = [
        where if isinstance(where, str) else (str(where[0]), int(where[1])) for where in orders["addresses"]
    ]
    began = time.perf_counter()
    try:
        took = storm(addresses, [text.encode() for text in orders["requests"]], orders["seconds"])
    except (BenchFailed, OSError) as error:
        json.dump({"error": str(error)}, sys.stdout)
        return
    took.sort()
    spent = time.perf_counter() - began
    p99 = took[max(0, int(len(took) * 0.99) - 1)]
    json.dump({"rate": len(took) / spent, "median": took[len(took) // 2], "p99": p99}, sys.stdout)


if __name__ == "__main__":
    main()
