"""Makes, pictures and removes btrfs subvolumes by asking the kernel: no program is started.

Every call works on an open directory and, where one is needed, a plain name in it. Needs root. Knows nothing of
volumes or snapshots; what the kernel counts and limits is in `quota`.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from carrel.workspaces.volumes import kernel

# A request's number holds the size of its argument; the letter of all of btrfs is 0x94.
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


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Which btrfs a directory is on, and its newest transaction: the running one, or the last when none runs."""

    uuid: str
    transaction: int


def file_system(fd: int) -> FileSystem | None:
    """What btrfs an open directory is on; None when it is on another file system."""
    answer = bytearray(1024)
    struct.pack_into("<Q", answer, _AT_FLAGS, _TELL_TRANSACTION)
    try:
        kernel.control(fd, _FS_INFO, answer)
    except OSError as error:
        if error.errno in {errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}:
            return None
        raise
    raw = answer[_AT_UUID : _AT_UUID + 16].hex()
    uuid = "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))
    return FileSystem(uuid, struct.unpack_from("<Q", answer, _AT_TRANSACTION)[0])


def create(parent: int, name: str) -> None:
    """Make an empty subvolume."""
    kernel.control(parent, _SUBVOL_CREATE_V2, _arguments(name))


def snapshot(source: int, parent: int, name: str, *, read_only: bool) -> None:
    """Take a picture of an open subvolume; durable on return. It inherits the limit of its source."""
    kernel.control(parent, _SNAP_CREATE_V2, _arguments(name, source, _READ_ONLY if read_only else 0))


def destroy(parent: int, name: str) -> None:
    """Remove a subvolume, and first those that were made inside it. Its blocks are freed some time later."""
    try:
        kernel.control(parent, _SNAP_DESTROY_V2, _arguments(name))
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        fd = os.open(name, kernel.DIRECTORY, dir_fd=parent)
        try:
            pending = [number_of(fd)]
            found = []
            while pending:
                found.append(pending.pop())
                pending += children(parent, found[-1])
        finally:
            os.close(fd)
        for number in reversed(found):
            argument = _arguments("", flags=_BY_NUMBER)
            struct.pack_into("<Q", argument, _AT_NAME, number)
            kernel.control(parent, _SNAP_DESTROY_V2, argument)


def _arguments(name: str, fd: int = 0, flags: int = 0) -> bytearray:
    return bytearray(_ARGUMENTS.pack(fd, 0, flags, os.fsencode(name)))


def number_of(fd: int) -> int:
    """The number of the subvolume an open directory belongs to."""
    answer = bytearray(4096)
    struct.pack_into("<QQ", answer, 0, 0, _FIRST_INODE)
    kernel.control(fd, _INO_LOOKUP, answer)
    number: int = struct.unpack_from("<Q", answer)[0]
    return number


def children(fd: int, number: int) -> list[int]:
    """The subvolumes that lie in a subvolume, by number."""
    return [child for child, _ in search(fd, _ROOT_TREE, number, _ROOT_REF)]


def exists(fd: int, number: int) -> bool:
    """Whether there is a subvolume of this number, or one that was removed and is not yet freed."""
    return any(True for _ in search(fd, _ROOT_TREE, number, _ROOT_ITEM))


def changed_in(fd: int) -> int:
    """The transaction in which the subvolume of an open directory was made, or last changed after that."""
    answer = bytearray(504)
    kernel.control(fd, _SUBVOL_INFO, answer)
    changed, made = struct.unpack_from("<QQ", answer, _AT_CHANGED)
    return max(int(changed), int(made))


def commit(fd: int) -> None:
    """End the running transaction, if there is one, and wait until it is on the disk. Flushes no file's data."""
    transaction = bytearray(8)
    kernel.control(fd, _START_SYNC, transaction)
    kernel.control(fd, _WAIT_SYNC, transaction)


def search(fd: int, tree: int, number: int, kind: int, first: int = 0, last: int = _ALL) -> Iterator[tuple[int, bytes]]:
    """The items of one number and kind in one of the file system's trees, as offset and bytes, in their order."""
    while first <= last:
        answer = bytearray(4096)
        _KEY.pack_into(
            answer, 0, tree, number, number, first, last, 0, _ALL, kind, kind, _AT_A_TIME, 0, 0, 0, 0, 0
        )  # fmt: skip
        kernel.control(fd, _TREE_SEARCH, answer)
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
