from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import time

import pytest
from tests.support import loops

from carrel.primitives import keepalive

PATIENCE_S = 30.0


class Sender(asyncio.Protocol):
    """Has more to send than the peer takes."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        keepalive.notice_loss(transport)
        timeout = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert timeout == 0, "it would end the connection of a peer that is slow to read"
        transport.write(b"x" * (8 << 20))  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


@loops.each
async def test_a_machine_that_is_gone_is_noticed_and_one_that_reads_nothing_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keepalive, "LOOK_S", 0.05)
    monkeypatch.setattr(keepalive, "MOST_UNANSWERED", 3)
    # A small program for the kernel: drop every packet for this socket, as if its machine were gone.
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        gone, slow = Sender(), Sender()
        accepted = []
        for sender in (gone, slow):
            await loop.create_connection(lambda sender=sender: sender, *listener.getsockname())  # type: ignore[misc]
            accepted.append((await loop.sock_accept(listener))[0])
        with accepted[0], accepted[1]:
            await asyncio.wait_for(loop.sock_recv(accepted[0], 10), PATIENCE_S)
            accepted[0].setsockopt(socket.SOL_SOCKET, 26, struct.pack("HL", 1, ctypes.addressof(drop_all)))
            await loop.sock_recv(accepted[0], 1 << 20)  # there is room again, so it is sent something
            began = time.monotonic()
            await asyncio.wait_for(gone.lost.wait(), PATIENCE_S)
            took = time.monotonic() - began
            # The other has read nothing for as long, and its kernel answers.
            await asyncio.sleep(took)
            assert not slow.lost.is_set()
            received = 0
            while received < 8 << 20:
                received += len(await asyncio.wait_for(loop.sock_recv(accepted[1], 1 << 20), PATIENCE_S))
            assert not slow.lost.is_set()
