"""Opens folders of the host as detached mounts, for sandboxes that work on them in place.

A process that the zygote forks before it leaves the host's files, because only a process that still sees a mount can
copy it. It serves the zygote's requests and nothing else, and no sandbox is forked from it: so no sandbox ever has the
host's mounts, not even before its own root is made.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import traceback
from collections.abc import Callable

from carrel.isolation import linux
from carrel.primitives import libc

MAX_REQUEST = 256 * 1024
DEADLINE_S = 10
"""How long one request may take: a folder may be on a file system that does not answer."""
WORKERS = 2


def start(enter: Callable[[], None]) -> socket.socket:
    """Fork the process; return the socket for its requests. It ends when the last copy of that socket is closed.

    `enter` moves it to the mount namespace that it opens folders from.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            linux.close_all_but({0, 1, 2, theirs.fileno()})
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            enter()
            theirs.send(b"ready")
            _serve(theirs)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    theirs.close()
    if not ours.recv(16):  # the caller changes the mounts that they share until now
        raise OSError("the process that opens folders could not be started")
    return ours


def request(opener: socket.socket, body: dict[str, object], answers: int) -> None:
    """Ask for mounts. The answer goes to the socket `answers`: all of them in the same order, or the error."""
    socket.send_fds(opener, [json.dumps(body).encode()], [answers])


def _serve(requests: socket.socket) -> None:
    """Keep two workers: one that waits for a file system which does not answer keeps nobody else waiting."""
    running = {_start_worker(requests) for _ in range(WORKERS)}
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status != 0:  # it took too long
            running.add(_start_worker(requests))


def _start_worker(requests: socket.socket) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            libc.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            while True:
                message, fds, _flags, _address = socket.recv_fds(requests, MAX_REQUEST, 1)
                if not message:
                    os._exit(0)  # the zygote is gone
                signal.alarm(DEADLINE_S)
                with socket.socket(fileno=fds[0]) as answers:
                    _answer(json.loads(message), answers)
                signal.alarm(0)
        finally:
            os._exit(1)
    return pid


def _answer(body: dict[str, object], answers: socket.socket) -> None:
    trees, path = [], ""
    try:
        for path, identity, read_only in body["mounts"]:  # type: ignore[attr-defined]
            trees.append(_open(path, identity, read_only=read_only))
    except OSError as error:
        answers.send(f"{path} cannot be mounted: {error.strerror or error}".encode(errors="replace")[:4000])
    else:
        socket.send_fds(answers, [b"ok"], trees)
    finally:
        for tree in trees:
            os.close(tree)


def _open(path: str, identity: object, *, read_only: bool) -> int:
    """Return a detached copy of what is mounted at and below a path, which must still be the file with that identity.

    With all mounts below it, because a copy without them would show files that are hidden under them.
    """
    found = libc.open_without_links(path)
    try:
        status = os.fstat(found)
        if [status.st_dev, status.st_ino] != identity:
            raise OSError("it was replaced meanwhile, or a file system was mounted there after the server started")
        tree = linux.open_tree("", dir_fd=found, recursive=stat.S_ISDIR(status.st_mode))
    finally:
        os.close(found)
    try:
        attributes = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
        attributes |= linux.MOUNT_ATTR_RDONLY if read_only else 0
        # Private, or a mount in the sandbox, such as a mask, would also appear on the host.
        linux.set_mount_attributes(tree, attributes, recursive=True, private=True)
    except OSError:
        os.close(tree)
        raise
    return tree
