"""Mounts folders and files of the host in a sandbox: the workspace at its own path, the kept home, read-only extras.

Runs as root of the sandbox before any agent code, on descriptors of detached mounts. The base root is shared and
read-only, so the directories on the way to a mount are made in a small memory file system over the first of them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice

from carrel.isolation import inside, linux, rootfs
from carrel.isolation.inside import UNAVAILABLE

_SIZE, _INODES, _MOST_ENTRIES = "256k", 1024, 256
_WAY = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def first_names(paths: Iterable[str]) -> list[str]:
    """Return the first names of absolute paths, as far as something can be mounted below them."""
    names = {path.split("/")[1] for path in paths if path.startswith("/")}
    return sorted(names - {"", *UNAVAILABLE})


def mount_point(path: str) -> str:
    """Return where a path of the host is mounted: `/var/tmp` is a link to `/tmp` in every sandbox."""
    return path.removeprefix("/var") if path.startswith("/var/tmp/") else path


def cover(root: str, targets: Sequence[str]) -> list[str]:
    """Mount a memory file system over each directory below which a target is missing; return their paths.

    It shows what was there: empty directories and links in the base root, anything in an image. `/tmp` is one already.
    """
    covered = []
    for name in first_names(target for target in map(mount_point, targets) if target.count("/") > 1):
        place = f"{root}/{name}"
        if name in {"tmp", inside.WORKSPACE[1:]} or os.path.islink(place) or not os.path.isdir(place):
            continue  # a missing one is reported when the target is made
        with os.scandir(place) as found:
            entries = list(islice(found, _MOST_ENTRIES + 1))
        if len(entries) > _MOST_ENTRIES:
            raise OSError(
                f"nothing can be mounted below /{name}: it has more than {_MOST_ENTRIES} entries in the image"
            )
        links = {entry.name: os.readlink(entry.path) for entry in entries if entry.is_symlink()}
        others = {entry.name: (_tree_of(entry), entry.is_dir()) for entry in entries if not entry.is_symlink()}
        options = f"size={_SIZE},nr_inodes={_INODES},mode=0755"
        linux.mount("tmpfs", place, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
        for entry_name, link in links.items():
            os.symlink(link, f"{place}/{entry_name}")
        for entry_name, (tree, directory) in others.items():
            _show(tree, f"{place}/{entry_name}", directory=directory)
        covered.append(place)
    return covered


def _tree_of(entry: os.DirEntry[str]) -> int:
    """Return a detached mount of an entry; -1 for an empty directory, because a new one can stand for it."""
    if entry.is_dir():
        with os.scandir(entry.path) as found:
            if next(found, None) is None:
                return -1
    return linux.open_tree(entry.path)


def _show(tree: int, target: str, *, directory: bool) -> None:
    if directory:
        os.mkdir(target, 0o755)
    else:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    if tree >= 0:
        try:
            linux.move_mount(tree, target)
        finally:
            os.close(tree)


def attach(root: str, own_path: str, mounts: Sequence[tuple[str, int]], covered: Sequence[str]) -> None:
    """Mount each descriptor at its target, and make the mount point of the workspace's own path. Then nothing more can
    be made in what `cover` mounted.
    """
    places = [(mount_point(target), tree) for target, tree in (*mounts, (own_path, -1))]
    for target, tree in sorted(places, key=lambda place: place[0].count("/")):  # outer ones first
        if target in {"", inside.WORKSPACE}:
            continue
        directory = tree < 0 or stat.S_ISDIR(os.fstat(tree).st_mode)
        with _as_agent() if target.startswith(f"{inside.HOME}/") else nullcontext():
            place = _make(root, target, directory=directory)
        try:
            if tree >= 0:
                linux.move_mount(tree, place)
        finally:
            os.close(place)
    flags = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    for path in covered:
        linux.mount("none", path, None, flags)


def show_workspace(own_path: str) -> None:
    """Mount the workspace at its own path too, with every mask that it has. Called in the new root."""
    if own_path in {"", inside.WORKSPACE}:
        return
    tree = linux.open_tree(inside.WORKSPACE, recursive=True)
    try:
        linux.move_mount(tree, mount_point(own_path))
    finally:
        os.close(tree)


def _make(root: str, target: str, *, directory: bool) -> int:
    """Open a path beneath the root; what is missing of it is made. Links are not followed: a kept home has been in the
    hands of an agent.
    """
    here = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    names = target.split("/")[1:]
    try:
        for index, name in enumerate(names):
            below = _step(here, name, directory=directory or index < len(names) - 1)
            os.close(here)
            here = below
            if stat.S_ISLNK(os.fstat(here).st_mode):
                raise OSError(f"nothing can be mounted at {target}: '{name}' on the way is a link")
    except BaseException as error:
        os.close(here)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, f"nothing can be mounted at {target}: {error.strerror}") from None
        raise
    return here


@contextmanager
def _as_agent() -> Iterator[None]:
    """Act as the agent for a while: the kept home knows no other user."""
    if os.geteuid() != 0:  # in a sandbox of an ordinary user there is nobody else
        yield
        return
    os.setegid(rootfs.SANDBOX_UID)
    os.seteuid(rootfs.SANDBOX_UID)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def _step(parent: int, name: str, *, directory: bool) -> int:
    try:
        return os.open(name, _WAY, dir_fd=parent)
    except FileNotFoundError:
        if directory:
            os.mkdir(name, 0o755, dir_fd=parent)
        else:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=parent))
        return os.open(name, _WAY, dir_fd=parent)
