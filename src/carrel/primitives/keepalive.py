"""Finds out that the other machine of a TCP connection is gone, or the network to it.

`TCP_USER_TIMEOUT` would be simpler, but it also ends a connection whose peer answers and only reads nothing for a
while, as a program that is slow to read its input.
"""

from __future__ import annotations

import asyncio
import socket

LOOK_S = 2.0
MOST_UNANSWERED = 6
"""Packets that were sent again without any answer until the other machine counts as gone. The pauses between them
double: that takes some 13 seconds, and longer where packets travel for long.
"""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


def notice_loss(transport: asyncio.BaseTransport) -> None:
    """Have a TCP connection fail within twenty seconds after the other machine is gone. While something is sent, this
    looks for answers; else the kernel asks for some.
    """
    connected = transport.get_extra_info("socket")
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    asyncio.get_running_loop().call_later(LOOK_S, _look, transport)


def _look(transport: asyncio.BaseTransport) -> None:
    if transport.is_closing():
        return
    if unanswered_packets(transport) >= MOST_UNANSWERED:
        transport.abort()  # type: ignore[attr-defined]
    else:
        asyncio.get_running_loop().call_later(LOOK_S, _look, transport)


def unanswered_packets(transport: asyncio.BaseTransport) -> int:
    """Return how often the kernel has sent something again without any answer of the other kernel."""
    connected = transport.get_extra_info("socket")
    if connected is None or connected.family == socket.AF_UNIX:
        return 0
    # state, congestion, retransmits, probes
    info: bytes = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)
    return max(info[2], info[3])
