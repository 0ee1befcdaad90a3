from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from carrel.primitives.channel import MAX_MESSAGE, Channel, ChannelClosed, Message


def memory_file(data: bytes) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(descriptor, data)
    return descriptor


def content(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ours, theirs
    ours.close()
    theirs.close()


class End:
    """One end with what it heard."""

    def __init__(self, connection: socket.socket):
        self.heard: list[tuple[Message, list[bytes]]] = []
        self.changed = asyncio.Event()
        self.gone = asyncio.Event()
        self.channel = Channel(connection, self._hear, self.gone.set)

    def _hear(self, message: Message, fds: list[int]) -> None:
        self.heard.append((message, [content(each) for each in fds]))
        self.changed.set()

    async def until(self, count: int) -> None:
        while len(self.heard) < count:
            self.changed.clear()
            await self.changed.wait()


async def test_messages_and_descriptors_arrive_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = End(pair[0]), End(pair[1])
    plan = memory_file(b"x" * 1_000_000)
    here.channel.send({"op": "attach"}, (plan,))
    os.close(plan)
    for number in range(100):
        here.channel.send({"op": "log", "number": number})
    await there.until(101)
    assert there.heard[0] == ({"op": "attach"}, [b"x" * 1_000_000])
    assert [message["number"] for message, _ in there.heard[1:]] == list(range(100))
    here.channel.close()
    await there.gone.wait()
    assert there.channel.closed


async def test_what_the_other_side_does_not_take_yet_waits(pair: tuple[socket.socket, socket.socket]) -> None:
    here = End(pair[0])
    for number in range(500):  # far more than a socket buffer holds
        file = memory_file(str(number).encode())
        here.channel.send({"number": number, "text": "y" * 10_000}, (file,) if number % 2 else ())
        os.close(file)
    there = End(pair[1])
    await there.until(500)
    assert [message["number"] for message, _ in there.heard] == list(range(500))
    assert [files for _, files in there.heard] == [[str(n).encode()] if n % 2 else [] for n in range(500)]
    there.channel.close()
    await here.gone.wait()


async def test_nothing_is_sent_to_who_is_gone(pair: tuple[socket.socket, socket.socket]) -> None:
    here = End(pair[0])
    pair[1].close()
    await here.gone.wait()
    with pytest.raises(ChannelClosed):
        here.channel.send({"op": "describe"})
    here.channel.close()


async def test_who_never_reads_is_left(pair: tuple[socket.socket, socket.socket]) -> None:
    here = End(pair[0])
    with pytest.raises(ChannelClosed):
        while True:
            here.channel.send({"op": "log"})
    assert here.gone.is_set()


async def test_what_is_no_message_ends_the_talk(pair: tuple[socket.socket, socket.socket]) -> None:
    here = End(pair[0])
    with os.fdopen(memory_file(b"left"), "rb") as file:
        socket.send_fds(pair[1], [b"not json"], [file.fileno()])
    await here.gone.wait()
    assert here.heard == []


async def test_a_message_has_a_greatest_length(pair: tuple[socket.socket, socket.socket]) -> None:
    here = End(pair[0])
    with pytest.raises(ValueError, match="too long"):
        here.channel.send({"text": "x" * MAX_MESSAGE})
    here.channel.close()
