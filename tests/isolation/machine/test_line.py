"""Both ends of a line with real sockets: connections go on side by side, and neither end trusts the other."""

import os
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.isolation.machine import line
from carrel.isolation.machine.frames import MOST_STREAMS, WINDOW, BrokenLine, Kind, Place, packed, packed_credit
from carrel.isolation.machine.line import Line


def listening(path):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(128)
    return listener


def to(path):
    def connect():
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connected.connect(str(path))
        except OSError:
            connected.close()
            raise
        return connected

    return connect


class Ends:
    """A host whose clients reach a server in a machine."""

    def __init__(self, directory):
        self.path = directory / "host"
        self.inside = directory / "inside"
        self.listener = listening(self.path)
        self.server = listening(self.inside)
        self.server.settimeout(20)
        here, there = socket.socketpair()
        self.lines = [
            Line(here.detach(), first=2, places={}),
            Line(there.detach(), first=1, places={Place.SUPERVISOR: to(self.inside)}),
        ]
        self.lines[0].listen(self.listener, Place.SUPERVISOR)
        self._end, watched = os.pipe()[::-1]
        for each in self.lines:
            each.watch(watched, self._stop)
        self._watched = watched
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in self.lines]
        for thread in self._threads:
            thread.start()

    def _run(self, each):
        with pytest.raises(BrokenLine, match="over"):
            each.run()

    def _stop(self):
        raise BrokenLine("over")

    def client(self):
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(20)
        client.connect(str(self.path))
        return client

    def pair(self):
        client = self.client()
        accepted, _ = self.server.accept()
        accepted.settimeout(20)
        return client, accepted

    def close(self):
        os.close(self._end)
        for thread in self._threads:
            thread.join(20)
        os.close(self._watched)
        self.listener.close()
        self.server.close()
        for each in self.lines:
            each.close()


@pytest.fixture
def ends(tmp_path):
    ends = Ends(tmp_path)
    yield ends
    ends.close()


def whole(connection):
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    return data


def test_bytes_arrive_in_both_directions_with_their_ends(ends):
    sent = os.urandom(3 * WINDOW)
    client, accepted = ends.pair()
    with client, accepted:
        sending = threading.Thread(target=lambda: (client.sendall(sent), client.shutdown(socket.SHUT_WR)))
        sending.start()
        assert whole(accepted) == sent
        sending.join()
        answering = threading.Thread(target=lambda: (accepted.sendall(sent[::-1]), accepted.close()))
        answering.start()
        assert whole(client) == sent[::-1]
        answering.join()


def test_an_answer_is_whole_though_its_reader_is_slow(ends):
    client, accepted = ends.pair()
    with client:
        client.shutdown(socket.SHUT_WR)
        with accepted:
            assert accepted.recv(1) == b""
            accepted.sendall(b"x" * WINDOW)
        other, echoed = ends.pair()  # it goes the same way, so what was sent before is there
        with other, echoed:
            echoed.sendall(b"y")
            assert other.recv(1) == b"y"
        assert len(whole(client)) == WINDOW


def test_a_stream_that_nobody_reads_stops_no_other(ends):
    stalled, flooding = ends.pair()
    with stalled, flooding:
        flooding.setblocking(False)
        quiet = time.monotonic()
        sent = 0
        while time.monotonic() - quiet < 0.3:
            try:
                sent += flooding.send(bytes(65536))
                quiet = time.monotonic()
            except BlockingIOError:
                time.sleep(0.01)
        assert sent < 16 * WINDOW, "what is held for a connection is bounded"
        for _ in range(20):
            client, accepted = ends.pair()
            with client, accepted:
                client.sendall(b"ask")
                assert accepted.recv(3) == b"ask"
                accepted.sendall(b"answer")
                assert client.recv(6) == b"answer"


def test_many_connections_side_by_side(ends):
    pairs = [ends.pair() for _ in range(100)]
    for _client, accepted in pairs:
        accepted.sendall(str(accepted.fileno()).encode())
    for client, accepted in reversed(pairs):
        assert client.recv(100) == str(accepted.fileno()).encode()
        client.close()
        assert accepted.recv(1) == b""
        accepted.close()


def test_closed_connections_are_forgotten(ends):
    for _ in range(50):
        client, accepted = ends.pair()
        accepted.close()
        assert client.recv(1) == b""
        client.close()
    client, accepted = ends.pair()
    with client, accepted:
        client.sendall(b"x")
        assert accepted.recv(1) == b"x"
        assert all(each.streams < 10 for each in ends.lines)


def test_a_client_waits_for_a_server_that_is_started_again(tmp_path):
    place = tmp_path / "server"
    here, there = socket.socketpair()
    end = Line(here.detach(), first=2, places={Place.EGRESS: to(place)})
    there.sendall(packed(Kind.OPEN, 1, Place.EGRESS) + packed(Kind.DATA, 1, payload=b"early"))
    end.turn(0.05)
    with there, listening(place) as server:
        server.settimeout(20)
        server.setblocking(False)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            end.turn(0.05)
            try:
                accepted, _ = server.accept()
                break
            except BlockingIOError:
                continue
        end.turn(0.05)
        with accepted:
            assert accepted.recv(100) == b"early"
    end.close()


def test_a_client_does_not_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(line, "PATIENCE_S", 0.05)
    here, there = socket.socketpair()
    end = Line(here.detach(), first=2, places={Place.EGRESS: to(tmp_path / "nobody")})
    with there:
        there.sendall(packed(Kind.OPEN, 1, Place.EGRESS))
        there.setblocking(False)
        said, deadline = b"", time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            end.turn(0.05)
            try:
                said = there.recv(100)
            except BlockingIOError:
                continue
        assert said == packed(Kind.CLOSE, 1)
    end.close()


HOSTILE = {
    "a number of this end": packed(Kind.OPEN, 2, Place.EGRESS),
    "a place that is not offered": packed(Kind.OPEN, 1, Place.SUPERVISOR),
    "an open stream": packed(Kind.OPEN, 1, Place.EGRESS) * 2,
    "an unknown stream": packed(Kind.DATA, 5, payload=b"x"),
    "credit for an unknown stream": packed_credit(5, 1),
    "too many streams": b"".join(packed(Kind.OPEN, 2 * n + 1, Place.EGRESS) for n in range(MOST_STREAMS + 1)),
    "more than a window": packed(Kind.OPEN, 1, Place.EGRESS) + packed(Kind.DATA, 1, payload=bytes(16384)) * 17,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_end_that_breaks_the_rules_is_left(name, tmp_path):
    here, there = socket.socketpair()
    end = Line(here.detach(), first=2, places={Place.EGRESS: to(tmp_path / "nobody")})
    sending = threading.Thread(target=there.sendall, args=(HOSTILE[name],))
    sending.start()
    with pytest.raises(BrokenLine):
        for _ in range(100):
            end.turn(0.05)
    end.close()
    sending.join()
    there.close()


KINDS = st.sampled_from([Kind.OPEN, Kind.DATA, Kind.END, Kind.CREDIT, Kind.CLOSE])


@settings(max_examples=60)
@given(st.lists(st.tuples(KINDS, st.integers(1, 6), st.integers(1, 300)), max_size=40))
def test_any_sequence_of_frames_is_carried_or_breaks_the_line(steps):
    here, there = socket.socketpair()
    egress, far = socket.socketpair()
    end = Line(here.detach(), first=2, places={Place.EGRESS: egress.dup})
    data = b"".join(
        packed(kind, stream, Place.EGRESS if kind is Kind.OPEN else Place.NONE, _payload(kind, size))
        for kind, stream, size in steps
    )
    with there, egress, far:
        there.sendall(data or packed(Kind.OPEN, 1, Place.EGRESS))
        try:
            for _ in range(5):
                end.turn(0)
        except BrokenLine:
            pass
        assert end.streams <= len(steps) + 1
    end.close()


def _payload(kind, size):
    if kind is Kind.CREDIT:
        return size.to_bytes(4, "big")
    return bytes(size) if kind is Kind.DATA else b""
