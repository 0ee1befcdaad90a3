"""A load generator of tunnels: some stay open and idle, and new ones start at a fixed rate, independent of the earlier
ones. Only for the egress benchmark.

`python -m bench.tunnels` reads its orders as JSON from standard input and answers in JSON. A latency counts from the
moment the connection was due, so that waiting for a slow proxy counts too.
"""

from __future__ import annotations

import json
import resource
import select
import socket
import sys
import time
from typing import TypedDict

from bench.measure import BenchFailed, percentile
from bench.origin import SMALL
from bench.wire import request

GRACE_S = 5.0
_END = SMALL[-3:]


class Orders(TypedDict):
    """The load to generate."""

    proxy: list[str | int]
    origin: list[str | int]
    idle: int
    rate: int
    seconds: float


class Findings(TypedDict, total=False):
    """The results."""

    error: str
    requests: int
    rate: float
    median_ms: float
    p99_ms: float


def connect_head(host: str, port: int) -> bytes:
    """Return the request that opens a tunnel."""
    return f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()


def small_request(host: str, port: int) -> bytes:
    """Return the request inside the tunnel."""
    return request("GET", "/small").replace(b"host: 127.0.0.1", f"host: {host}:{port}".encode())


def open_tunnel(proxy: tuple[str, int], head: bytes) -> socket.socket:
    """Open a tunnel through a proxy; blocks."""
    connection = socket.create_connection(proxy)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head)
        expect(b"", connection.recv(65536), b"\r\n\r\n")
    except BaseException:
        connection.close()
        raise
    return connection


def expect(kept: bytes, data: bytes, end: bytes) -> bytes | None:
    """Return the bytes so far; None at the end of the response. Raises if it is not a success."""
    got = kept + data
    if not data or not got.startswith(b"HTTP/1.1 200"[: len(got)]):
        raise BenchFailed(f"a tunnel failed: {got[:300].decode(errors='replace') or 'it was cut'}")
    return None if got.endswith(end) else got


class _Load:
    def __init__(self, orders: Orders):
        self._proxy = (str(orders["proxy"][0]), int(orders["proxy"][1]))
        origin = (str(orders["origin"][0]), int(orders["origin"][1]))
        self._head, self._request = connect_head(*origin), small_request(*origin)
        self._poll = select.epoll()
        self._due: dict[int, float] = {}
        self._open: dict[int, socket.socket] = {}
        self._asked: set[int] = set()
        self._kept: dict[int, bytes] = {}
        self.took: list[float] = []

    def run(self, idle: int, rate: int, seconds: float) -> float:
        """Generate the load; return how many seconds it took. `took` has the latencies."""
        held = [open_tunnel(self._proxy, self._head) for _ in range(idle)]
        for each in held:
            self._ask(each)
        total = int(rate * seconds)
        started = 0
        began = time.perf_counter()
        while len(self.took) < total:
            now = time.perf_counter()
            while started < total and began + started / rate <= now:
                self._start(began + started / rate)
                started += 1
            if now > began + seconds + GRACE_S:
                raise BenchFailed(f"{total - len(self.took)} of {total} requests are not answered")
            wait = max(0.0, began + started / rate - now) if started < total else 0.1
            for number, _event in self._poll.poll(wait):
                self._go_on(number)
        took = time.perf_counter() - began
        for each in held:  # they must still be open
            self._ask(each)
            each.close()
        return took

    def _ask(self, connection: socket.socket) -> None:
        connection.sendall(self._request)
        got: bytes | None = b""
        while got is not None:
            got = expect(got, connection.recv(65536), _END)

    def _start(self, due: float) -> None:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        number = connection.fileno()
        connection.connect_ex(self._proxy)
        self._due[number], self._open[number] = due, connection
        self._poll.register(number, select.EPOLLOUT)

    def _go_on(self, number: int) -> None:
        connection = self._open[number]
        if number not in self._kept:
            connection.send(self._head)
            self._kept[number] = b""
            self._poll.modify(number, select.EPOLLIN)
            return
        asked = number in self._asked
        rest = expect(self._kept[number], connection.recv(65536), _END if asked else b"\r\n\r\n")
        self._kept[number] = rest or b""
        if rest is not None:
            return
        if not asked:
            self._asked.add(number)
            connection.send(self._request)
            return
        self.took.append(time.perf_counter() - self._due.pop(number))
        self._poll.unregister(number)
        self._asked.discard(number)
        del self._kept[number]
        self._open.pop(number).close()


def main() -> None:
    """Run the load generator."""
    orders: Orders = json.load(sys.stdin)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65536)), hard))
    load = _Load(orders)
    try:
        took = load.run(orders["idle"], orders["rate"], orders["seconds"])
    except (BenchFailed, OSError) as error:
        json.dump(Findings(error=str(error)), sys.stdout)
        return
    json.dump(
        Findings(
            requests=len(load.took),
            rate=len(load.took) / took,
            median_ms=percentile(load.took, 50) * 1e3,
            p99_ms=percentile(load.took, 99) * 1e3,
        ),
        sys.stdout,
    )


if __name__ == "__main__":
    main()
