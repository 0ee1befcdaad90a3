"""Writes tar streams (pax) in pieces."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterable, Iterator

from carrel.workspaces.volumes.trees import EntryKind, Node

_BLOCK = 512


def header(path: bytes, node: Node, *, hard_link_to: bytes | None = None) -> bytes:
    """Return the header of one entry."""
    name = os.fsdecode(path)
    info = tarfile.TarInfo(name)
    info.mode = node.mode
    info.mtime = node.mtime_ns // 1_000_000_000
    pax: dict[str, str] = {}
    info.uid = info.gid = 1000
    seconds, rest = divmod(node.mtime_ns, 1_000_000_000)
    if rest:
        pax["mtime"] = f"{seconds}.{rest:09d}" if seconds >= 0 else repr(node.mtime_ns / 1e9)
    for key, value in (node.xattrs or {}).items():
        pax[f"SCHILY.xattr.{key}"] = value.decode("utf-8", "surrogateescape")
    info.pax_headers = pax
    if hard_link_to is not None:
        info.type, info.linkname = tarfile.LNKTYPE, os.fsdecode(hard_link_to)
    elif node.kind is EntryKind.DIRECTORY:
        info.type = tarfile.DIRTYPE
    elif node.kind is EntryKind.LINK:
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, os.fsdecode(node.target), 0o777
    else:
        info.size = node.size
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def content(size: int, pieces: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Yield a file's bytes and its padding; holes between the pieces become zeros."""
    at = 0
    for offset, data in pieces:
        yield from _zeros(offset - at)
        yield data
        at = offset + len(data)
    yield from _zeros(size - at)
    yield b"\0" * (-size % _BLOCK)


def _zeros(count: int) -> Iterator[bytes]:
    while count > 0:
        step = min(count, 1 << 20)
        yield b"\0" * step
        count -= step


END = b"\0" * (_BLOCK * 20)
