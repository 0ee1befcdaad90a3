"""A directory that a second container of a pod lends to the supervisor: the place of secrets, which the supervisor can
write and the agent cannot.

A pod cannot mount anything once it runs, and both are one user. So the volume of the secrets is mounted read-only in
the container of the sandbox, and writable in a second one, whose program is here. It sends the descriptor of its mount
over a socket of the pod's network, once: before the supervisor listens for servers, and so before any code of an agent
runs.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

DESCRIPTOR = 100
PATH = f"/proc/self/fd/{DESCRIPTOR}"
"""The borrowed directory, as the facts of a sandbox name it."""
ADDRESS = b"\0carrel-lent-directory"
PATIENCE_S = 60.0
_PAUSE_S = 0.02
_GREETING = b"d"


def main(arguments: list[str]) -> None:
    """Lend a directory, then wait until the pod ends. Never returns normally."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    lend(arguments[1])
    while True:
        signal.pause()


def lend(path: str) -> None:
    """Send the descriptor of a directory. Raises `OSError`."""
    directory = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + PATIENCE_S
        while not _sent(directory):
            if time.monotonic() > until:
                raise TimeoutError("the supervisor of this pod does not wait for a directory")
            time.sleep(_PAUSE_S)
    finally:
        os.close(directory)


def _sent(directory: int) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.connect(ADDRESS)
        except ConnectionRefusedError:  # it does not wait yet
            return False
        socket.send_fds(connection, [_GREETING], [directory])
        return True


def borrow() -> None:
    """Wait for the descriptor; it is `DESCRIPTOR` afterwards. Raises `OSError`, among them `TimeoutError`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
        listener.bind(ADDRESS)
        listener.listen(1)
        listener.settimeout(PATIENCE_S)
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(PATIENCE_S)
        _, descriptors, _, _ = socket.recv_fds(connection, len(_GREETING), 1)
    if len(descriptors) != 1:
        raise OSError("the second container of this pod lent nothing")
    os.dup2(descriptors[0], DESCRIPTOR, inheritable=False)
    os.close(descriptors[0])


if __name__ == "__main__":
    main(sys.argv)
