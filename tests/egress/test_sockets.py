from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import Iterator
from ipaddress import ip_address

import pytest
from tests.support import loops
from tests.support.ports import nobody

from carrel.egress import sockets
from carrel.egress.sockets import Ended, close_after_delivery, connect, has_ended, look, readable, send, take, writable


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for each in (ours, theirs):
        each.setblocking(False)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with ours, theirs:
        yield ours, theirs


def line(data: bytes) -> int | None:
    at = data.find(b"\n")
    return None if at < 0 else at + 1


@loops.each
async def test_looking_takes_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    looking = asyncio.ensure_future(look(ours, line, 100, 10))
    for each in (b"on", b"e\n", b"two"):
        await send(theirs, each)
        await asyncio.sleep(0.01)
    size = await looking
    assert size == 4
    assert take(ours, size) == b"one\n"
    assert take(ours, 3) == b"two"
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


@loops.each
async def test_more_than_the_first_look_shows(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    await send(theirs, b"x" * 30_000 + b"\n")
    assert await look(ours, line, 65536, 10, later=True) == 30_001


@loops.each
async def test_a_peer_that_ends_or_says_too_much_or_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    with pytest.raises(TimeoutError):
        await look(ours, line, 100, 0.01)
    await send(theirs, b"half")
    with pytest.raises(TimeoutError):
        await look(ours, line, 100, 0.01)
    with pytest.raises(Ended):
        await look(ours, line, 4, 10)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(Ended):
        await look(ours, line, 100, 10)
    take(ours, 4)
    with pytest.raises(Ended):
        await look(ours, line, 100, 10)


@loops.each
async def test_less_than_was_waited_for_is_no_end(pair: tuple[socket.socket, socket.socket]) -> None:
    """A kernel that has no room for more says that there is something to read, however little that is."""
    ours, theirs = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    sending = asyncio.ensure_future(send(theirs, bytes(4 << 20) + b"\n"))
    await readable(ours, 10)
    while len(here := ours.recv(1 << 20, socket.MSG_PEEK)) > 2:
        take(ours, len(here) - 2)
    assert not sending.done()
    assert not has_ended(ours)
    with pytest.raises(TimeoutError):
        await look(ours, line, 100, 0.1)
    got = 0
    while not sending.done() or ours.recv(1, socket.MSG_PEEK) != b"\n":
        await readable(ours, 10)
        got += len(take(ours, max(1, len(ours.recv(1 << 16, socket.MSG_PEEK)) - 1)))
    theirs.shutdown(socket.SHUT_WR)
    await readable(ours, 10)
    assert has_ended(ours)


@loops.each
async def test_what_comes_together_with_the_end_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it comes between looking at the bytes and looking for the end. A Unix socket wakes for less than was
    waited for, always.
    """
    ours, theirs = socket.socketpair()

    def has_ended_by_now(connection: socket.socket) -> bool:
        if theirs.fileno() >= 0:
            theirs.sendall(b" of it\n")
            theirs.close()
        return has_ended(connection)

    monkeypatch.setattr(sockets, "has_ended", has_ended_by_now)
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(b"half")
        assert await look(ours, line, 100, 10) == len(b"half of it\n")


@loops.each
async def test_byte_by_byte_is_looked_at_less_and_less(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    looks = 0

    def read(data: bytes) -> int | None:
        nonlocal looks
        looks += 1
        return line(data)

    looking = asyncio.ensure_future(look(ours, read, 65536, 10))
    for _ in range(500):
        await send(theirs, b"x")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await send(theirs, b"\n")
    assert await looking == 501
    assert looks < 250


@loops.each
async def test_waiting_ends_when_it_is_cancelled(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    task = asyncio.ensure_future(readable(ours, 10))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await writable(ours, 10)
    assert not asyncio.get_running_loop().remove_reader(ours.fileno())


@loops.each
async def test_everything_is_sent_to_a_slow_reader(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    data = bytes(range(256)) * 40_000
    sending = asyncio.ensure_future(send(ours, data))
    got = bytearray()
    while len(got) < len(data):
        await readable(theirs, 10)
        got += theirs.recv(1 << 16)
    await sending
    assert got == data


@loops.each
async def test_last_words_arrive_though_much_was_not_read(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    await send(theirs, b"x" * 100_000)
    await send(ours, b"no")
    leaving = asyncio.ensure_future(close_after_delivery(ours))
    await readable(theirs, 10)
    assert theirs.recv(100) == b"no"
    theirs.shutdown(socket.SHUT_WR)
    await leaving
    ours.close()
    assert theirs.recv(100) == b""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@loops.each
async def test_connecting(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        with await connect(ip_address(host), port, 10) as made:
            assert not made.getblocking()
            assert made.getpeername()[:2] == (host, port)
            with listener.accept()[0] as theirs:
                theirs.sendall(b"hi")
                await readable(made, 10)
                assert made.recv(10) == b"hi"
    with nobody(host) as port, pytest.raises(OSError) as refused:
        await connect(ip_address(host), port, 10)
    assert refused.value.errno == errno.ECONNREFUSED


@loops.each
async def test_who_does_not_answer_is_given_up() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        held = []
        try:
            with pytest.raises(TimeoutError):
                while len(held) < 10:
                    held += [await connect(ip_address("127.0.0.1"), full.getsockname()[1], 0.1)]
        finally:
            for each in held:
                each.close()


@loops.each
async def test_a_number_that_another_connection_had_before_is_waited_for_anew() -> None:
    """Closing a connection takes it out of the kernel's list; what is remembered of its number must not count."""
    numbers: Counter[int] = Counter()
    while max(numbers.values(), default=0) < 3:  # others in this process may take and give back numbers, too
        assert len(numbers) < 20, "numbers come again"
        ours, theirs = socket.socketpair()
        with ours, theirs:
            numbers[ours.fileno()] += 1
            for word in (b"one", b"two"):
                waiting = asyncio.ensure_future(readable(ours, 10))
                await asyncio.sleep(0)
                theirs.sendall(word)
                await waiting
                assert ours.recv(10) == word


@loops.each
async def test_a_copy_that_outlives_its_connection_wakes_nobody(pair: tuple[socket.socket, socket.socket]) -> None:
    """The kernel's list knows the connection, not its number: a copy keeps the closed one in it."""
    ours, theirs = pair
    theirs.sendall(b"x")
    await readable(ours, 10)
    number = ours.fileno()
    with ours.dup():
        ours.close()
        one, other = socket.socketpair()
        with one, other:
            assert one.fileno() == number
            waiting = asyncio.ensure_future(readable(one, 10))
            theirs.sendall(b"y")
            for _ in range(20):
                await asyncio.sleep(0)
            assert not waiting.done()
            other.sendall(b"z")
            await waiting


@loops.each
async def test_who_gave_up_can_wait_again(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await readable(ours, 0.01)
        cancelled = asyncio.ensure_future(readable(ours, 10))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
    theirs.sendall(b"x")
    await readable(ours, 10)
    await readable(ours, 10)  # it is still there


@loops.each
async def test_many_wait_at_once() -> None:
    """More than are woken in one go."""
    pairs = [socket.socketpair() for _ in range(300)]
    try:
        waiting = [asyncio.ensure_future(readable(ours, 10)) for ours, _ in pairs]
        await asyncio.sleep(0)
        for _, theirs in pairs:
            theirs.sendall(b"x")
        await asyncio.gather(*waiting)
    finally:
        for each in pairs:
            for end in each:
                end.close()
