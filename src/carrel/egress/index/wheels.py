"""How much a wheel takes once it is installed, and its metadata. Blocking; trusts nothing that lies in the file."""

from __future__ import annotations

import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator

MOST_DIRECTORY = 32 << 20
"""A longer directory is not read: each entry of it costs many times its length in memory."""

MOST_METADATA = 16 << 20

_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")
_BAD = (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error, OSError)
_END, _END64, _LOCATOR64 = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_END_SIZE, _END64_SIZE, _LOCATOR64_SIZE = 22, 56, 20
_SEE_LONGER_RECORD = 0xFFFFFFFF
_MOST_TAIL = 65_535 + _END_SIZE + _LOCATOR64_SIZE + _END64_SIZE


def unpacked(descriptor: int) -> int | None:
    """The sum of what a zip file holds; its own size when that is more or when it is no zip file; None when its
    directory is too long to be read.
    """
    size = os.fstat(descriptor).st_size
    if _directory_size(descriptor, size) > MOST_DIRECTORY:
        return None
    try:
        with open(f"/proc/self/fd/{descriptor}", "rb") as file, zipfile.ZipFile(file) as archive:
            return max(size, sum(entry.file_size for entry in archive.infolist()))
    except _BAD:
        return size


def metadata(descriptor: int) -> bytes | None:
    """The metadata in a wheel; None when it cannot be had."""
    if _directory_size(descriptor, os.fstat(descriptor).st_size) > MOST_DIRECTORY:
        return None
    try:
        with open(f"/proc/self/fd/{descriptor}", "rb") as file, zipfile.ZipFile(file) as archive:
            found = [each for each in archive.infolist() if _METADATA.fullmatch(each.filename)]
            return archive.read(found[0]) if len(found) == 1 and found[0].file_size <= MOST_METADATA else None
    except (*_BAD, RuntimeError, zlib.error):
        return None


def _directory_size(descriptor: int, size: int) -> int:
    """The longest directory that a reader could be made to read, whichever of the records at the end it goes by."""
    tail = os.pread(descriptor, _MOST_TAIL, max(0, size - _MOST_TAIL))
    longest = 0
    for at in _places(tail, _END):
        told = _number("<L", tail[at : at + _END_SIZE], 12)
        longest = max(longest, 0 if told == _SEE_LONGER_RECORD else told)
    for at in _places(tail, _LOCATOR64):
        where = _number("<Q", tail[at : at + _LOCATOR64_SIZE], 8)
        record = os.pread(descriptor, _END64_SIZE, where) if where < size else b""
        longest = max(longest, _number("<Q", record, 40))
    for at in _places(tail, _END64):
        longest = max(longest, _number("<Q", tail[at : at + _END64_SIZE], 40))
    return longest


def _places(tail: bytes, signature: bytes) -> Iterator[int]:
    at = tail.find(signature)
    while at >= 0:
        yield at
        at = tail.find(signature, at + 1)


def _number(form: str, record: bytes, at: int) -> int:
    return int(struct.unpack_from(form, record, at)[0]) if len(record) >= at + struct.calcsize(form) else 0
