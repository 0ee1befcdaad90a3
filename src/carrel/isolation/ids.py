"""Host user ids for sandboxes: each has a range that no other sandbox on the host has while it lives.

The ranges are above those that distributions, container engines and systemd use. A range is taken by locking a byte of
a shared file. The lock belongs to the open file, which the sandbox inherits, so it ends with the sandbox even if the
zygote or the server dies.
"""

from __future__ import annotations

import fcntl
import os
import struct

from carrel.errors import PlatformError
from carrel.isolation.rootfs import SANDBOX_UID

FIRST, RANGE, SLOTS = 0x70000000, 65536, 4095
LOCKS = "/run/carrel"
F_OFD_SETLK = 37  # not in the fcntl module before Python 3.13


class HostIds:
    """Hands out ranges. Only root can use them."""

    def __init__(self, directory: str = LOCKS) -> None:
        os.makedirs(directory, 0o700, exist_ok=True)
        self._directory = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._next = os.getpid() % SLOTS

    def take(self) -> tuple[int, int]:
        """Return a free slot, and the descriptor with its lock."""
        lock = os.open("ids.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._directory)
        for _ in range(SLOTS):
            slot = self._next
            self._next = (slot + 1) % SLOTS
            try:  # l_type, l_whence, l_start, l_len, l_pid
                fcntl.fcntl(lock, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0))
            except BlockingIOError:
                continue
            return slot, lock
        os.close(lock)
        raise PlatformError(f"all {SLOTS} ranges of user ids are in use on this host")


def owner(slot: int) -> int:
    """Return the host user id that owns the user namespace of a sandbox. No process outside the sandbox has it.

    The kernel counts resources such as inotify for the owner of a namespace, so no two sandboxes may share one.
    """
    return FIRST + slot * RANGE


def agent(slot: int, *, idmap: bool) -> int:
    """Return the host user id of the agent in a sandbox of root."""
    return owner(slot) + SANDBOX_UID if idmap else SANDBOX_UID


def image_map(wanted: int, first: int = 0) -> str:
    """Return the id map of the users of an image whose user is `wanted`, in a sandbox of root.

    The agent and the user that it is in the image swap their ids, every other user keeps its own: so files show the
    owners that they have in the image, and the kernel changes the files of a writable root. The ids are those of the
    sandbox; with its `owner` as `first`, those of the host.
    """
    low, high = sorted((wanted, SANDBOX_UID))
    if low == high:
        rows = [(0, 0, RANGE)]
    elif high >= RANGE:  # such a user has no id to give to the agent
        rows = [(0, 0, low), (low + 1, low + 1, RANGE - low - 1), (high, low, 1)]
    else:
        between, after = (low + 1, low + 1, high - low - 1), (high + 1, high + 1, RANGE - high - 1)
        rows = [(0, 0, low), (low, high, 1), between, (high, low, 1), after]
    return "".join(f"{found} {first + seen} {count}\n" for found, seen, count in rows if count > 0)


def maps(slot: int, *, root: bool, idmap: bool) -> str:
    """Return the id map of a sandbox, with `inside outside count` in each line."""
    first, after = owner(slot), SANDBOX_UID + 1
    if not root:  # the zygote's own user namespace knows one id: its user, as 0
        return f"{SANDBOX_UID} 0 1\n"
    if idmap:
        return f"0 {first} {RANGE}\n"
    # Files keep their one owner on disk, so the agents of this host share that user id.
    return f"0 {first} {SANDBOX_UID}\n{SANDBOX_UID} {SANDBOX_UID} 1\n{after} {first + after} {RANGE - after}\n"
