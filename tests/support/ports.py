"""Ports that nobody listens at, and that nobody else gets meanwhile; the same port of several addresses."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def held(host: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A socket that has a port and refuses whoever comes, until it is told to listen."""
    with _unbound(host) as one:
        one.bind((host, 0))
        yield one


@contextmanager
def nobody(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that nobody listens at."""
    with held(host) as one:
        yield int(one.getsockname()[1])


@contextmanager
def in_common(*hosts: str) -> Iterator[list[socket.socket]]:
    """Sockets that have the same port of several addresses; none listens yet."""
    for _ in range(100):
        with ExitStack() as stack:
            found = [stack.enter_context(held(hosts[0]))]
            try:
                for host in hosts[1:]:
                    found.append(stack.enter_context(_unbound(host)))
                    found[-1].bind((host, found[0].getsockname()[1]))
            except OSError:
                continue
            yield found
            return
    raise AssertionError("no port is free on all of these addresses")


def _unbound(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
