"""Carries connections over the serial line of a virtual machine: the loop that both ends run.

Connections are plain sockets. Each gets at most one frame per turn, and none is read while the line is busy, so all of
them go on side by side. What is held for a connection is never more than a window. No thread, no task: one process per
end, which does nothing else.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from carrel.isolation.machine.frames import (
    MOST_PAYLOAD,
    MOST_STREAMS,
    BrokenLine,
    Frame,
    Kind,
    LineReader,
    Place,
    Stream,
    packed,
    packed_credit,
)

_READ = 64 * 1024
_BUSY = 64 * 1024
"""With more than this waiting for the line, no connection is read."""
_MOST_WAITING = 4 * 1024 * 1024
"""With more than this waiting for the line, the line is not read either: its other end takes nothing and asks much."""
PATIENCE_S = 30.0
"""How long a connection waits for a server that does not listen, because it is being restarted."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT

Connect = Callable[[], socket.socket]
"""Connects to a place without waiting. `OSError` says that nobody is there yet."""


@dataclass(slots=True)
class _Connection:
    """A stream and its socket, which is None until somebody is there."""

    stream: Stream
    place: Place
    socket: socket.socket | None = None
    held: bytearray = field(default_factory=bytearray)
    """What has arrived for the socket."""
    ended: bool = False
    """The socket was told that nothing more will come."""
    until: float = 0.0
    again: float = 0.0
    pause: float = _FIRST_PAUSE_S


class Line:
    """One end of the line.

    `places` are what the other end may open, `first` is the number of the first stream of this end. `listen` adds a
    socket whose connections become streams to the other end.
    """

    def __init__(self, line: int, *, first: int, places: Mapping[Place, Connect]):
        self._line = line
        self._next = first
        self._parity = first % 2
        self._places = dict(places)
        self._reader = LineReader()
        self._out = bytearray()
        self._connections: dict[int, _Connection] = {}
        self._by_fd: dict[int, _Connection] = {}
        self._waiting: dict[int, _Connection] = {}
        self._listeners: dict[int, tuple[socket.socket, Place]] = {}
        self._watched: dict[int, Callable[[], None]] = {}
        self._opened = 0
        self._all = select.epoll()
        self._readers = select.epoll()
        self._masks: dict[int, int] = {}
        self._listening = True
        os.set_blocking(line, False)
        self._all.register(line, _IN)
        self._line_mask = int(_IN)
        self._all.register(self._readers.fileno(), _IN)
        self._reading = True

    def listen(self, listener: socket.socket, place: Place) -> None:
        """Open a stream for each connection to this listening socket."""
        listener.setblocking(False)
        self._listeners[listener.fileno()] = (listener, place)
        self._all.register(listener.fileno(), _IN)

    def watch(self, descriptor: int, action: Callable[[], None]) -> None:
        """Call `action` whenever a descriptor is readable."""
        self._watched[descriptor] = action
        self._all.register(descriptor, _IN)

    def run(self) -> None:
        """Carry connections until the line breaks. Raises `BrokenLine`, or what a watched action raises."""
        while True:
            self.turn()

    @property
    def streams(self) -> int:
        """How many streams there are."""
        return len(self._connections)

    def close(self) -> None:
        """Close the line and every connection."""
        for connection in self._connections.values():
            if connection.socket is not None:
                connection.socket.close()
        for descriptor in (self._all, self._readers):
            descriptor.close()
        os.close(self._line)

    def turn(self, most_s: float | None = None) -> None:
        """Do what can be done now; wait for something, at most so long. Raises as `run` does."""
        for fd, events in self._all.poll(self._timeout() if most_s is None else most_s):
            if fd == self._line:
                if events & ~_OUT:
                    self._read_line()
            elif fd == self._readers.fileno():
                self._read_sockets()
            elif fd in self._listeners:
                self._accept(*self._listeners[fd])
            elif fd in self._watched:
                self._watched[fd]()
            elif fd in self._by_fd:
                self._write_socket(self._by_fd[fd])
        if self._waiting:
            self._connect_again()
        self._write_line()
        self._adjust()

    def _timeout(self) -> float | None:
        if not self._waiting:
            return None
        return max(0.0, min(each.again for each in self._waiting.values()) - time.monotonic())

    # the line

    def _read_line(self) -> None:
        try:
            data = os.read(self._line, _READ)
        except BlockingIOError:
            return
        except OSError as error:
            raise BrokenLine(f"the line cannot be read: {error}") from error
        if not data:
            raise BrokenLine("the other end is gone")
        for frame in self._reader.frames(data):
            self._handle(frame)

    def _handle(self, frame: Frame) -> None:
        if frame.kind is Kind.OPEN:
            self._open_here(frame)
            return
        connection = self._connections.get(frame.stream)
        if connection is None:
            raise BrokenLine("a frame for a stream that does not exist")
        stream = connection.stream
        stream.received(frame)
        if frame.kind is Kind.CLOSE:
            if not (connection.held and stream.end_received):  # else it is closed when all of it was passed on
                self._close(connection)
        elif frame.kind is Kind.DATA and not stream.close_sent:
            connection.held += frame.payload
            self._write_socket(connection)
        elif frame.kind is Kind.END and not stream.close_sent:
            self._write_socket(connection)
        elif frame.kind is Kind.CREDIT:
            self._watch_socket(connection)

    def _open_here(self, frame: Frame) -> None:
        number = frame.stream
        if number % 2 == self._parity or number in self._connections or frame.place not in self._places:
            raise BrokenLine("a stream that cannot be opened")
        if len(self._connections) - self._opened >= MOST_STREAMS:
            raise BrokenLine("too many streams")
        connection = _Connection(Stream(number), frame.place, until=time.monotonic() + PATIENCE_S)
        self._connections[number] = connection
        self._connect(connection)

    def _connect(self, connection: _Connection) -> None:
        try:
            connected = self._places[connection.place]()
        except OSError:
            now = time.monotonic()
            if now >= connection.until:
                self._waiting.pop(connection.stream.number, None)
                self._close(connection)
                return
            connection.again = now + connection.pause
            connection.pause = min(_LONGEST_PAUSE_S, connection.pause * 2)
            self._waiting[connection.stream.number] = connection
            return
        self._waiting.pop(connection.stream.number, None)
        self._attach(connection, connected)

    def _connect_again(self) -> None:
        now = time.monotonic()
        for connection in [each for each in self._waiting.values() if each.again <= now]:
            self._connect(connection)

    def _attach(self, connection: _Connection, connected: socket.socket) -> None:
        connected.setblocking(False)
        connection.socket = connected
        self._by_fd[connected.fileno()] = connection
        self._watch_socket(connection)
        self._write_socket(connection)

    def _write_line(self) -> None:
        while self._out:
            try:
                written = os.write(self._line, self._out[:_READ])
            except BlockingIOError:
                return
            except OSError as error:
                raise BrokenLine(f"the line cannot be written: {error}") from error
            del self._out[:written]

    def _adjust(self) -> None:
        """Watch for what can be done now."""
        mask = int(_IN if len(self._out) < _MOST_WAITING else 0) | int(_OUT if self._out else 0)
        if mask != self._line_mask:
            self._all.modify(self._line, mask)
            self._line_mask = mask
        reading = len(self._out) < _BUSY
        if reading != self._reading:
            self._all.modify(self._readers.fileno(), _IN if reading else 0)
            self._reading = reading
        listening = self._opened < MOST_STREAMS
        if listening != self._listening:
            for fd in self._listeners:
                self._all.modify(fd, _IN if listening else 0)
            self._listening = listening

    # sockets

    def _accept(self, listener: socket.socket, place: Place) -> None:
        if self._opened >= MOST_STREAMS:
            return
        try:
            accepted, _ = listener.accept()
        except OSError:  # the client is gone already, or there are too many open files
            return
        number = self._number()
        connection = self._connections[number] = _Connection(Stream(number), place)
        self._opened += 1
        self._out += packed(Kind.OPEN, number, place)
        self._attach(connection, accepted)

    def _number(self) -> int:
        """Return a number that no stream has."""
        while True:
            number = self._next
            self._next = number + 2 if number + 2 < 1 << 32 else 2 - self._parity
            if number not in self._connections:
                return number

    def _read_sockets(self) -> None:
        for fd, _events in self._readers.poll(0):
            if len(self._out) >= _BUSY:
                return
            connection = self._by_fd.get(fd)
            if connection is not None:
                self._read_socket(connection)

    def _read_socket(self, connection: _Connection) -> None:
        assert connection.socket is not None
        stream = connection.stream
        try:
            data = connection.socket.recv(min(stream.credit, MOST_PAYLOAD))
        except BlockingIOError:
            return
        except OSError:
            self._close(connection)
            return
        if data:
            stream.credit -= len(data)
            self._out += packed(Kind.DATA, stream.number, payload=data)
        else:
            stream.end_sent = True
            self._out += packed(Kind.END, stream.number)
            if connection.ended:
                self._close(connection)
                return
        self._watch_socket(connection)

    def _write_socket(self, connection: _Connection) -> None:
        """Pass on what has arrived, as much as the socket takes."""
        if connection.socket is None:
            return
        stream, taken = connection.stream, 0
        try:
            while connection.held:
                sent = connection.socket.send(connection.held[:_READ])
                del connection.held[:sent]
                taken += sent
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)
            return
        if grant := stream.taken(taken):
            self._out += packed_credit(stream.number, grant)
        if stream.end_received and not connection.held and not connection.ended:
            connection.ended = True
            try:
                connection.socket.shutdown(socket.SHUT_WR)
            except OSError:
                self._close(connection)
                return
            if stream.end_sent or stream.close_received:
                self._close(connection)
                return
        self._watch_socket(connection)

    def _watch_socket(self, connection: _Connection) -> None:
        if connection.socket is None:
            return
        fd, stream = connection.socket.fileno(), connection.stream
        # A socket whose other side is gone is always reported. It is watched only while something can be done about it.
        wanted = (1 if stream.credit and not stream.end_sent else 0) | (2 if connection.held else 0)
        had = self._masks.get(fd, 0)
        if (wanted ^ had) & 1:
            if wanted & 1:
                self._readers.register(fd, _IN)
            else:
                self._readers.unregister(fd)
        if (wanted ^ had) & 2:
            if wanted & 2:
                self._all.register(fd, _OUT)
            else:
                self._all.unregister(fd)
        self._masks[fd] = wanted

    def _close(self, connection: _Connection) -> None:
        """End a stream here; forget it when the other end has done the same."""
        stream = connection.stream
        self._waiting.pop(stream.number, None)
        if connection.socket is not None:
            fd = connection.socket.fileno()
            had = self._masks.pop(fd, 0)
            if had & 1:
                self._readers.unregister(fd)
            if had & 2:
                self._all.unregister(fd)
            del self._by_fd[fd]
            connection.socket.close()
            connection.socket = None
        connection.held.clear()
        if not stream.close_sent:
            stream.close_sent = True
            self._out += packed(Kind.CLOSE, stream.number)
        if stream.over:
            del self._connections[stream.number]
            if stream.number % 2 == self._parity:
                self._opened -= 1
