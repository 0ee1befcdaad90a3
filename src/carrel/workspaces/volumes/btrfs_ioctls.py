"""The ioctls of btrfs: create, snapshot and remove subvolumes, count and limit their bytes (quota). Needs root.

Every function takes an open directory and, where needed, a plain name in it.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from carrel.errors import PlatformError
from carrel.primitives import libc, walk

# The number of a request contains the size of its argument; 0x94 is the letter of btrfs.
_SNAP_CREATE_V2, _SUBVOL_CREATE_V2, _SNAP_DESTROY_V2 = 0x50009417, 0x50009418, 0x5000943F
_INO_LOOKUP, _TREE_SEARCH, _SUBVOL_INFO, _FS_INFO = 0xD0009412, 0xD0009411, 0x81F8943C, 0x8400941F
_START_SYNC, _WAIT_SYNC = 0x80089418, 0x40089416

_READ_ONLY, _BY_NUMBER = 1 << 1, 1 << 4
_ARGUMENTS = struct.Struct("<qQQ32x4040s")
_FIRST_INODE = 256
_ROOT_TREE, _ROOT_REF, _ROOT_ITEM = 1, 156, 132
_KEY = struct.Struct("<7Q4I4Q")
_HEADER = struct.Struct("<3Q2I")
_AT_A_TIME = 64
_ALL = (1 << 64) - 1
_AT_NAME, _AT_CHANGED, _AT_UUID, _AT_FLAGS, _AT_TRANSACTION = 56, 344, 16, 48, 56
_TELL_TRANSACTION = 2

_QUOTA_CTL, _GROUP_CREATE, _GROUP_LIMIT, _RESCAN = 0xC0109428, 0x4010942A, 0x8030942B, 0x4040942C
_QUOTA_ENABLE = 1
_QUOTA_TREE = 8
_QUOTA_STATUS, _QUOTA_INFO, _QUOTA_LIMIT = 240, 242, 244
_AT_STATUS_FLAGS, _INCONSISTENT = 16, 4
_MAX_REFERENCED = 1
_OF_SUBVOLUMES = (1 << 48) - 1
"""A quota group above this number contains other quota groups."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A btrfs file system and its newest transaction: the running one, or else the last one."""

    uuid: str
    transaction: int


def file_system(fd: int) -> FileSystem | None:
    """Return the btrfs file system of an open directory; None when it is on another file system."""
    answer = bytearray(1024)
    struct.pack_into("<Q", answer, _AT_FLAGS, _TELL_TRANSACTION)
    try:
        libc.ioctl(fd, _FS_INFO, answer)
    except OSError as error:
        if error.errno in {errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}:
            return None
        raise
    raw = answer[_AT_UUID : _AT_UUID + 16].hex()
    uuid = "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))
    return FileSystem(uuid, struct.unpack_from("<Q", answer, _AT_TRANSACTION)[0])


def create_subvolume(parent: int, name: str) -> None:
    """Create an empty subvolume."""
    libc.ioctl(parent, _SUBVOL_CREATE_V2, _arguments(name))


def create_snapshot(source: int, parent: int, name: str, *, read_only: bool) -> None:
    """Take a snapshot of an open subvolume; durable on return. It inherits the limit of its source."""
    libc.ioctl(parent, _SNAP_CREATE_V2, _arguments(name, source, _READ_ONLY if read_only else 0))


def delete_subvolume(parent: int, name: str) -> None:
    """Remove a subvolume, after those inside it. The kernel frees its blocks some time later."""
    try:
        libc.ioctl(parent, _SNAP_DESTROY_V2, _arguments(name))
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        fd = os.open(name, walk.DIRECTORY, dir_fd=parent)
        try:
            pending = [number_of(fd)]
            found = []
            while pending:
                found.append(pending.pop())
                pending += subvolumes_in(parent, found[-1])
        finally:
            os.close(fd)
        for number in reversed(found):
            argument = _arguments("", flags=_BY_NUMBER)
            struct.pack_into("<Q", argument, _AT_NAME, number)
            libc.ioctl(parent, _SNAP_DESTROY_V2, argument)


def _arguments(name: str, fd: int = 0, flags: int = 0) -> bytearray:
    return bytearray(_ARGUMENTS.pack(fd, 0, flags, os.fsencode(name)))


def number_of(fd: int) -> int:
    """Return the number of the subvolume that an open directory belongs to."""
    answer = bytearray(4096)
    struct.pack_into("<QQ", answer, 0, 0, _FIRST_INODE)
    libc.ioctl(fd, _INO_LOOKUP, answer)
    number: int = struct.unpack_from("<Q", answer)[0]
    return number


def subvolumes_in(fd: int, number: int) -> list[int]:
    """Return the numbers of the subvolumes inside a subvolume."""
    return [child for child, _ in _search(fd, _ROOT_TREE, number, _ROOT_REF)]


def has_subvolume(fd: int, number: int) -> bool:
    """Return whether a subvolume has this number; also a removed one that is not yet freed."""
    return any(True for _ in _search(fd, _ROOT_TREE, number, _ROOT_ITEM))


def changed_in(fd: int) -> int:
    """Return the transaction in which the subvolume of an open directory was created or last changed."""
    answer = bytearray(504)
    libc.ioctl(fd, _SUBVOL_INFO, answer)
    changed, made = struct.unpack_from("<QQ", answer, _AT_CHANGED)
    return max(int(changed), int(made))


def commit(fd: int) -> None:
    """End the running transaction, if any, and wait until it is on the disk. Does not flush file data."""
    transaction = bytearray(8)
    libc.ioctl(fd, _START_SYNC, transaction)
    libc.ioctl(fd, _WAIT_SYNC, transaction)


def _search(
    fd: int, tree: int, number: int, kind: int, first: int = 0, last: int = _ALL
) -> Iterator[tuple[int, bytes]]:
    """Yield the items of one number and kind in a tree of the file system, as offset and bytes, in order."""
    while first <= last:
        answer = bytearray(4096)
        _KEY.pack_into(
            answer, 0, tree, number, number, first, last, 0, _ALL, kind, kind, _AT_A_TIME, 0, 0, 0, 0, 0
        )  # fmt: skip
        libc.ioctl(fd, _TREE_SEARCH, answer)
        count = _KEY.unpack_from(answer)[9]
        if not count:
            return
        at = _KEY.size
        for _ in range(count):
            _, _, offset, _, length = _HEADER.unpack_from(answer, at)
            at += _HEADER.size
            yield offset, bytes(answer[at : at + length])
            at += length
            first = offset + 1


def enable_quota(fd: int) -> None:
    """Enable quota on the file system of an open directory, if it is not enabled."""
    if _quota_item(fd, _QUOTA_STATUS, 0) is None:
        libc.ioctl(fd, _QUOTA_CTL, bytearray(struct.pack("<QQ", _QUOTA_ENABLE, 0)))


def rescan_quota(fd: int) -> None:
    """Let the kernel count again in the background when it says that its figures are inconsistent."""
    status = _quota_item(fd, _QUOTA_STATUS, 0)
    if status is None or not struct.unpack_from("<Q", status, _AT_STATUS_FLAGS)[0] & _INCONSISTENT:
        return
    try:
        libc.ioctl(fd, _RESCAN, bytearray(64))
    except OSError as error:
        if error.errno not in {errno.EINPROGRESS, errno.EBUSY}:
            raise


def set_limit(fd: int, cap_bytes: int | None) -> None:
    """Limit the subvolume of an open directory from the next write on."""
    most = _ALL if cap_bytes is None else cap_bytes
    libc.ioctl(fd, _GROUP_LIMIT, bytearray(struct.pack("<6Q", 0, _MAX_REFERENCED, most, 0, 0, 0)))


def referenced(fd: int) -> tuple[int, int | None]:
    """Return the bytes of the subvolume of an open directory at the last commit, and their limit."""
    number = number_of(fd)
    info = _quota_item(fd, _QUOTA_INFO, number)
    if info is None:
        raise PlatformError(
            "the kernel does not count the bytes of this volume", hint="quotas may have been switched off"
        )
    used: int = struct.unpack_from("<Q", info, 8)[0]
    limit = _quota_item(fd, _QUOTA_LIMIT, number)
    if limit is None:
        return used, None
    flags, most = struct.unpack_from("<QQ", limit)
    return used, most if flags & _MAX_REFERENCED else None


def uncommitted_bytes(fd: int, uuid: str) -> int:
    """Return the bytes written since the last commit, which `referenced` does not include; 0 on an old kernel."""
    reserved = f"/sys/fs/btrfs/{uuid}/qgroups/0_{number_of(fd)}/rsv_data"
    with suppress(OSError, ValueError), open(reserved, "rb", buffering=0) as file:
        return max(int(file.read(32)), 0)
    return 0


def remove_stale_groups(fd: int) -> None:
    """Remove the quota groups of removed subvolumes, which older kernels leave behind."""
    for number in [number for number, _ in _quota_items(fd, _QUOTA_INFO, 0, _OF_SUBVOLUMES)]:
        if not has_subvolume(fd, number):
            with suppress(OSError):  # made or removed meanwhile
                libc.ioctl(fd, _GROUP_CREATE, bytearray(struct.pack("<QQ", 0, number)))


def _quota_items(fd: int, kind: int, first: int, last: int) -> list[tuple[int, bytes]]:
    try:
        return list(_search(fd, _QUOTA_TREE, 0, kind, first, last))
    except FileNotFoundError:
        return []  # there is no quota tree


def _quota_item(fd: int, kind: int, number: int) -> bytes | None:
    found = _quota_items(fd, kind, number, number)
    return found[0][1] if found else None
