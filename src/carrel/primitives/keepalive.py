"""Lets the kernel find out that the other machine of a connection is gone while nothing is sent."""

from __future__ import annotations

import asyncio
import socket

_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 20_000,  # also while something is sent, which keep-alive does not watch
}


def notice_loss(transport: asyncio.BaseTransport) -> None:
    """Have a TCP connection fail some twenty seconds after the other machine is gone."""
    connected = transport.get_extra_info("socket")
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
