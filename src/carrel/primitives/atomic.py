"""Writing a file whole or not at all: a draft is written beside it, and one rename or link publishes it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LONGEST_BASE = 50  # characters: the name of a draft must not be too long where that of the file is not
_DRAFT = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def draft(
    path: str,
    *,
    mode: int = 0o600,
    durable: bool = False,
    replace: bool = True,
    temporary: str | None = None,
    aside: str | None = None,
    dir_fd: int | None = None,
) -> Iterator[int]:
    """Yield the descriptor of a draft, which becomes `path` when the block ends, and is removed when it raises.

    A durable file survives a crash of the host: its bytes and its name are on the disk before this returns. Without
    `replace` an existing file stays and `FileExistsError` is raised, also when another writer publishes at the same
    time. The draft lies in the directory `temporary`, which must be on the same file system, or else beside `path`;
    `aside` is its full path where the caller must recognize drafts of killed processes by their name. All paths are
    relative to `dir_fd` if that is given.
    """
    if aside is None:
        name = f"{os.path.basename(path)[:_LONGEST_BASE]}.{secrets.token_hex(8)}.new"
        aside = os.path.join(os.path.dirname(path) if temporary is None else temporary, name)
    descriptor = os.open(aside, _DRAFT, mode, dir_fd=dir_fd)
    try:
        yield descriptor
        if durable:
            os.fsync(descriptor)
        if replace:
            os.rename(aside, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            os.link(aside, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        if durable:
            sync_directory(os.path.dirname(path) or ".", dir_fd=dir_fd)
    finally:
        os.close(descriptor)
        with suppress(OSError):  # renamed, or hostile code put something else there
            os.unlink(aside, dir_fd=dir_fd)


def write_file(
    path: str,
    data: bytes,
    *,
    mode: int = 0o600,
    durable: bool = False,
    replace: bool = True,
    temporary: str | None = None,
    dir_fd: int | None = None,
) -> None:
    """Write `path` whole or not at all. The options are those of `draft`."""
    with draft(path, mode=mode, durable=durable, replace=replace, temporary=temporary, dir_fd=dir_fd) as descriptor:
        write_all(descriptor, data)


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Write every byte: one call of the kernel may take only some of them."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_directory(path: str, *, dir_fd: int | None = None) -> None:
    """Make the names in a directory durable: `fsync` of a file does not cover its name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
