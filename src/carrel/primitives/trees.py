"""Removing directory trees that hostile code made: of any depth, by descriptors, never through a symbolic link.

There are two ways. A tree that nobody uses any more is flattened while it is removed, which is fast and goes on past
what cannot be removed. A tree that processes may still change is removed in place, depth first, so that a removal that
fails has moved nothing.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from contextlib import suppress

from carrel.errors import PlatformError
from carrel.primitives.libc import chmod_directory

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BREATH = 256
_CHILDREN = 64
_REFILLS = 100

Identity = tuple[int, int]
"""The device and inode of a directory."""


def identity(directory: int) -> Identity:
    """Return the identity of an open directory."""
    status = os.fstat(directory)
    return status.st_dev, status.st_ino


def open_parent(directory: int, expected: Identity) -> int:
    """Open the parent of a directory. Raises `ESTALE` if that is not the expected one: the directory was moved."""
    parent = os.open("..", DIRECTORY, dir_fd=directory)
    if identity(parent) != expected:
        os.close(parent)
        raise OSError(errno.ESTALE, "the directory was moved")
    return parent


def remove_tree(path: str) -> None:
    """Remove a directory that nobody uses any more, whatever is in it. It may be gone already."""
    with suppress(FileNotFoundError):
        os.chmod(path, 0o700)
        top = os.open(path, DIRECTORY)
        try:
            empty_directory(top)
        finally:
            os.close(top)
        os.rmdir(path)


def empty_directory(top: int) -> None:
    """Remove everything beneath an open directory that nobody uses any more.

    A directory that is not empty is first moved up beneath `top`, so depth costs no descriptors, no recursion and no
    long path. Links are removed, never followed. A file system that is mounted inside stays and is reported.
    """
    device = os.fstat(top).st_dev
    stuck: set[str] = set()
    while True:
        names = [name for name in os.listdir(top) if name not in stuck]
        if not names:
            break
        for name in names:
            if not _remove_entry(top, name, device):
                stuck.add(name)
    if stuck:
        raise PlatformError(
            f"{len(stuck)} entries of a removed workspace could not be deleted",
            hint="it is tried again at the next start",
        )


def _remove_entry(top: int, name: str, device: int) -> bool:
    try:
        os.unlink(name, dir_fd=top)
        return True
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in {errno.EISDIR, errno.EPERM}:
            return False
    try:
        fd = open_directory(name, top)
    except OSError:
        return False
    try:
        if os.fstat(fd).st_dev != device:
            return False
        for entry in os.listdir(fd):
            _flatten_entry(top, fd, entry)
        os.rmdir(name, dir_fd=top)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _flatten_entry(top: int, fd: int, entry: str) -> None:
    try:
        os.unlink(entry, dir_fd=fd)
        return
    except OSError as error:
        if error.errno not in {errno.EISDIR, errno.EPERM}:
            raise
    try:
        os.rmdir(entry, dir_fd=fd)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        # Moving a directory rewrites its `..`, for which an ordinary user must be able to write it.
        os.close(open_directory(entry, fd))
        os.rename(entry, os.urandom(12).hex(), src_dir_fd=fd, dst_dir_fd=top)


def open_directory(name: str, parent: int | None = None) -> int:
    """Open a directory even if its mode forbids that to its owner. A link is never followed."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        if os.geteuid() != 0 and os.fstat(handle).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)
    return os.open(name, DIRECTORY, dir_fd=parent)


def _enter(parent: int, name: bytes) -> int:
    """Open a directory to empty it. Permissions that its owner lacks are added first."""
    try:
        directory = os.open(name, DIRECTORY, dir_fd=parent)
    except PermissionError:
        chmod_directory(parent, name, 0o700)
        directory = os.open(name, DIRECTORY, dir_fd=parent)
    status = os.fstat(directory)
    if status.st_mode & 0o700 != 0o700 and status.st_uid == os.geteuid():
        try:
            os.fchmod(directory, stat.S_IMODE(status.st_mode) | 0o700)
        except OSError:
            os.close(directory)
            raise
    return directory


async def remove_live_tree(parent: int, name: bytes) -> None:
    """Remove the directory `name` of `parent` while other processes may still change it.

    Entries that appear meanwhile are removed too, up to a bound. Others get their turn on the event loop.
    """
    for attempt in range(_REFILLS):
        await _empty(parent, name)
        try:
            os.rmdir(name, dir_fd=parent)
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or attempt == _REFILLS - 1:
                raise


async def _empty(parent: int, name: bytes) -> None:
    here = _enter(parent, name)
    came_from: list[tuple[Identity, bytes, list[bytes]]] = []
    waiting: list[bytes] = []
    steps = surprises = 0
    try:
        while True:
            steps += 1
            if steps % _BREATH == 0:
                await asyncio.sleep(0)
            if not waiting:
                with os.scandir(here) as found:
                    for item in found:
                        raw = os.fsencode(item.name)
                        if item.is_dir(follow_symlinks=False):
                            waiting.append(raw)
                            if len(waiting) == _CHILDREN:
                                break
                            continue
                        try:
                            os.unlink(raw, dir_fd=here)
                        except FileNotFoundError:
                            pass
                        except IsADirectoryError:
                            surprises += 1
                        steps += 1
                        if steps % _BREATH == 0:
                            await asyncio.sleep(0)
            if waiting:
                child = waiting.pop()
                try:
                    below = _enter(here, child)
                except OSError as error:
                    # Taken away or swapped meanwhile: the next scan sees what is there now.
                    surprises += 1
                    if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP} or surprises > _REFILLS:
                        raise
                    continue
                came_from.append((identity(here), child, waiting))
                os.close(here)
                here, waiting = below, []
                continue
            if not came_from:
                break
            expected, entered, waiting = came_from.pop()
            above = open_parent(here, expected)
            os.close(here)
            here = above
            try:
                os.rmdir(entered, dir_fd=here)
            except FileNotFoundError:
                pass
            except OSError as error:
                surprises += 1
                if error.errno not in {errno.ENOTEMPTY, errno.ENOTDIR} or surprises > _REFILLS:
                    raise
    finally:
        os.close(here)
