"""What the kernel counts for a btrfs subvolume, and the limit it holds it to. No program is started.

Needs root; knows nothing of volumes.
"""

from __future__ import annotations

import errno
import struct
from contextlib import suppress

from carrel.errors import PlatformError
from carrel.workspaces.volumes import btrfs_ioctls, kernel

_QUOTA_CTL, _GROUP_CREATE, _GROUP_LIMIT, _RESCAN = 0xC0109428, 0x4010942A, 0x8030942B, 0x4040942C
_ENABLE = 1
_TREE = 8
_STATUS, _INFO, _LIMIT = 240, 242, 244
_AT_FLAGS, _INCONSISTENT = 16, 4
_MAX_REFERENCED = 1
_NO_LIMIT = (1 << 64) - 1
_OF_SUBVOLUMES = (1 << 48) - 1
"""Greater numbers are those of groups of groups."""


def enable(fd: int) -> None:
    """Let the kernel count on the file system of an open directory; nothing happens when it does already."""
    if _item(fd, _STATUS, 0) is None:
        kernel.control(fd, _QUOTA_CTL, bytearray(struct.pack("<QQ", _ENABLE, 0)))


def mend(fd: int) -> bool:
    """Have everything counted again in the background when the kernel says that its figures are off."""
    status = _item(fd, _STATUS, 0)
    if status is None or not struct.unpack_from("<Q", status, _AT_FLAGS)[0] & _INCONSISTENT:
        return False
    try:
        kernel.control(fd, _RESCAN, bytearray(64))
    except OSError as error:
        if error.errno not in {errno.EINPROGRESS, errno.EBUSY}:
            raise
    return True


def set_limit(fd: int, cap_bytes: int | None) -> None:
    """Limit the subvolume of an open directory; it holds from the next write on."""
    most = _NO_LIMIT if cap_bytes is None else cap_bytes
    kernel.control(fd, _GROUP_LIMIT, bytearray(struct.pack("<6Q", 0, _MAX_REFERENCED, most, 0, 0, 0)))


def referenced(fd: int) -> tuple[int, int | None]:
    """Bytes that the subvolume of an open directory referred to at the last commit, and the limit on them."""
    number = btrfs_ioctls.number_of(fd)
    info = _item(fd, _INFO, number)
    if info is None:
        raise PlatformError("the kernel counts nothing for this volume", hint="quotas may have been switched off")
    used: int = struct.unpack_from("<Q", info, 8)[0]
    limit = _item(fd, _LIMIT, number)
    if limit is None:
        return used, None
    flags, most = struct.unpack_from("<QQ", limit)
    return used, most if flags & _MAX_REFERENCED else None


def awaited(fd: int, uuid: str) -> int:
    """Bytes that were written since the last commit and are not yet part of `referenced`; 0 on an old kernel."""
    with suppress(OSError, ValueError), open(_reserved(uuid, btrfs_ioctls.number_of(fd)), "rb", buffering=0) as file:
        return max(int(file.read(32)), 0)
    return 0


def _reserved(uuid: str, number: int) -> str:
    return f"/sys/fs/btrfs/{uuid}/qgroups/0_{number}/rsv_data"


def remove_stale(fd: int) -> int:
    """Remove the groups of subvolumes that are gone, which older kernels leave; how many there were."""
    removed = 0
    for number in [number for number, _ in _items(fd, _INFO, 0, _OF_SUBVOLUMES)]:
        if not btrfs_ioctls.exists(fd, number):
            with suppress(OSError):  # made or removed meanwhile
                kernel.control(fd, _GROUP_CREATE, bytearray(struct.pack("<QQ", 0, number)))
                removed += 1
    return removed


def _items(fd: int, kind: int, first: int, last: int) -> list[tuple[int, bytes]]:
    try:
        return list(btrfs_ioctls.search(fd, _TREE, 0, kind, first, last))
    except FileNotFoundError:
        return []  # there is no quota tree


def _item(fd: int, kind: int, number: int) -> bytes | None:
    found = _items(fd, kind, number, number)
    return found[0][1] if found else None
