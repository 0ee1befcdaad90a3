"""Asks the kernel for a btrfs subvolume's number, usage and limit, without starting a program.

The figures are those of the last commit of the file system. Needs root; knows nothing of volumes.
"""

from __future__ import annotations

import fcntl
import os
import struct

from carrel.errors import PlatformError

_INO_LOOKUP = 0xD0009412
_TREE_SEARCH = 0xD0009411
_QUOTA_TREE = 8
_INFO, _LIMIT = 242, 244
_FIRST_INODE = 256
_MAX_REFERENCED = 1
_KEY = struct.Struct("<7Q4I4Q")
_HEADER = struct.Struct("<3Q2I")
_ALL = (1 << 64) - 1


def number_of(fd: int) -> int:
    """The number of the subvolume an open directory belongs to."""
    answer = bytearray(4096)
    struct.pack_into("<QQ", answer, 0, 0, _FIRST_INODE)
    fcntl.ioctl(fd, _INO_LOOKUP, answer)
    number: int = struct.unpack_from("<Q", answer)[0]
    return number


def referenced(path: str) -> tuple[int, int | None]:
    """Bytes the subvolume at `path` refers to, and the limit on them."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        number = number_of(fd)
        info = _item(fd, _INFO, number)
        limit = _item(fd, _LIMIT, number)
    finally:
        os.close(fd)
    if info is None:
        raise PlatformError("the kernel counts nothing for this volume", hint="quotas may have been switched off")
    used: int = struct.unpack_from("<Q", info, 8)[0]
    if limit is None:
        return used, None
    flags, most = struct.unpack_from("<QQ", limit)
    return used, most if flags & _MAX_REFERENCED else None


def _item(fd: int, kind: int, number: int) -> bytes | None:
    answer = bytearray(4096)
    _KEY.pack_into(answer, 0, _QUOTA_TREE, 0, 0, number, number, 0, _ALL, kind, kind, 1, 0, 0, 0, 0, 0)
    try:
        fcntl.ioctl(fd, _TREE_SEARCH, answer)
    except FileNotFoundError:
        return None  # there is no quota tree
    if _KEY.unpack_from(answer)[9] == 0:
        return None
    *_, found, length = _HEADER.unpack_from(answer, _KEY.size)
    if found != kind:
        return None
    start = _KEY.size + _HEADER.size
    return bytes(answer[start : start + length])
