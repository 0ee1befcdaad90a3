"""The destination server of the egress benchmarks: `/small` from memory, `/large` by sendfile. It is one epoll loop, so
cheap that the proxy dominates the measurement.

`python -m bench.origin BYTES` prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import os
import select
import socket
import sys

SMALL = b"x" * 200
LARGE_NAME = "/large"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"
_PIECE = 1 << 20


class Origin:
    """All connections of the server."""

    def __init__(self, size: int):
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._size = size
        self._file = os.memfd_create("large")
        os.truncate(self._file, size)
        for at in range(0, size, _PIECE):
            os.pwrite(self._file, os.urandom(4096) * (_PIECE // 4096), at)
        self._poll = select.epoll()
        self._open: dict[int, socket.socket] = {}
        self._sent: dict[int, int] = {}
        self._small = _HEAD % len(SMALL) + SMALL

    def serve(self, until: int) -> None:
        """Answer until the descriptor becomes readable."""
        self._poll.register(self._listener, select.EPOLLIN)
        self._poll.register(until, select.EPOLLIN)
        while True:
            for number, event in self._poll.poll():
                if number == until:
                    return
                if number == self._listener.fileno():
                    self._accept()
                elif number in self._sent:
                    self._send_large(number)
                else:
                    self._answer(number, event)

    def _accept(self) -> None:
        for _ in range(64):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open[connection.fileno()] = connection
            self._poll.register(connection, select.EPOLLIN)

    def _answer(self, number: int, _event: int) -> None:
        connection = self._open[number]
        try:
            request = connection.recv(65536)
            if not request:
                self._close(number)
            elif request.startswith(b"GET %s " % LARGE_NAME.encode()):
                connection.send(_HEAD % self._size)
                self._sent[number] = 0
                self._poll.modify(number, select.EPOLLOUT)
            else:
                connection.send(self._small)
        except OSError:
            self._close(number)

    def _send_large(self, number: int) -> None:
        try:
            self._sent[number] += os.sendfile(number, self._file, self._sent[number], _PIECE)
        except BlockingIOError:
            return
        except OSError:
            self._close(number)
            return
        if self._sent[number] >= self._size:
            del self._sent[number]
            self._poll.modify(number, select.EPOLLIN)

    def _close(self, number: int) -> None:
        self._sent.pop(number, None)
        self._poll.unregister(number)
        self._open.pop(number).close()


def main() -> None:
    """Run the server."""
    origin = Origin(int(sys.argv[1]))
    print(origin.port, flush=True)
    origin.serve(sys.stdin.fileno())


if __name__ == "__main__":
    main()
