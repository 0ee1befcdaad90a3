"""Host user ids for sandboxes: each has a range that no other sandbox on the host has while it lives.

The ranges are above those that distributions, container engines and systemd use. A range is taken by locking a byte of
a shared file. The lock belongs to the open file, which the sandbox inherits, so it ends with the sandbox even if the
zygote or the server dies.
"""

from __future__ import annotations

import fcntl
import os
import struct
from functools import lru_cache

from carrel.errors import PlatformError
from carrel.isolation.rootfs import SANDBOX_UID

FIRST, RANGE, SLOTS = 0x70000000, 65536, 4095
_LAST = RANGE - 1
"""Distributions give this id to nobody."""
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


def image_rows(wanted: int) -> list[tuple[int, int, int]]:
    """Return the users of an image whose user is `wanted`, in a sandbox of root. A row has the first id in the image,
    the first id in the sandbox, and their number. So files show the owners that they have in the image, and the kernel
    changes the files of a writable root.

    The user `wanted` is the agent. Nobody of the image is root of the sandbox, who owns its namespaces: the kernel
    lets that user change some of their settings, such as those of message queues, without any capability. So up to
    three users have other ids.
    """
    seen = {0: _LAST, SANDBOX_UID: wanted or _LAST, wanted: SANDBOX_UID}
    rows: list[tuple[int, int, int]] = []
    first = 0
    for found in sorted(each for each in seen if each < _LAST):
        rows += [(first, first, found - first), (found, seen[found], 1)]
        first = found + 1
    rows.append((first, first, _LAST - first))
    if wanted >= _LAST:  # it has no id to give to the user whose id it takes
        rows = [row for row in rows if row[0] != SANDBOX_UID] + [(wanted, SANDBOX_UID, 1)]
    return [row for row in rows if row[2]]


def image_map(wanted: int, first: int = 0) -> str:
    """Return `image_rows` as an id map. The ids are those of the sandbox; with its `owner` as `first`, of the host."""
    return "".join(f"{found} {first + seen} {count}\n" for found, seen, count in image_rows(wanted))


@lru_cache(1024)
def in_image(found: int, wanted: int) -> int:
    """Return the id in the image of a file that a build's sandbox of root made: there it has an id of the host."""
    found %= RANGE
    return next((row[0] + found - row[1] for row in image_rows(wanted) if row[1] <= found < row[1] + row[2]), found)


def maps(slot: int, *, root: bool, idmap: bool) -> str:
    """Return the id map of a sandbox, with `inside outside count` in each line."""
    first, after = owner(slot), SANDBOX_UID + 1
    if not root:  # the zygote's own user namespace knows one id: its user, as 0
        return f"{SANDBOX_UID} 0 1\n"
    if idmap:
        return f"0 {first} {RANGE}\n"
    # Files keep their one owner on disk, so the agents of this host share that user id.
    return f"0 {first} {SANDBOX_UID}\n{SANDBOX_UID} {SANDBOX_UID} 1\n{after} {first + after} {RANGE - after}\n"
