"""Puts the masks of a sandbox on: mounts over what is denied, done as root of the sandbox before any agent code.

A mount covers a name, also that of a link itself, and cannot be taken off, renamed or deleted by anybody in the sandbox.
Runs after the pivot: every path is resolved in the sandbox's own root. Knows paths, not why they are denied.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence

from carrel.errors import PlatformError
from carrel.isolation import linux, refusal, rootfs
from carrel.isolation.masks import Masks, Part, split
from carrel.isolation.programs import Catalogue

MOST_COVERS = 4096
LARGEST_WALK = 1_000_000
_SCRATCH = "/mnt"  # an empty directory of every root
_SIZE = "size=48m,nr_inodes=8192,mode=0700"
_KEPT = ("/dev", _SCRATCH, "/proc", rootfs.SECRETS, "/sys", "/tmp", rootfs.HOME)  # noqa: S108 - the sandbox's own
_FILE, _DIRECTORY = "file", "directory"


def put_on(masks: Masks) -> None:
    """Cover everything that is masked. Raises when something cannot be: then there must be no sandbox."""
    if masks.writable is not None:
        narrow(masks.writable)
    covers: dict[str, bytes | None] = {}
    catalogue = Catalogue()
    for program in masks.programs:
        for path in catalogue.find(program):
            covers.setdefault(path, os.fsencode(masks.text(program)))
    for path in expand(masks.hidden):
        covers[path] = None
        if len(covers) > MOST_COVERS:
            raise PlatformError(f"more than {MOST_COVERS} paths are to be hidden")
    if covers:
        _cover(covers)


def _cover(covers: dict[str, bytes | None]) -> None:
    linux.mount("tmpfs", _SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, _SIZE)
    try:
        made: dict[bytes, str] = {}
        for text in covers.values():
            if text is not None and text not in made:
                made[text] = f"{_SCRATCH}/{len(made)}"
                _write(made[text], refusal.image(text), 0o555)
        _write(f"{_SCRATCH}/{_FILE}", b"", 0)
        os.mkdir(f"{_SCRATCH}/{_DIRECTORY}", 0)
        flags = linux.MS_REMOUNT | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
        linux.mount("none", _SCRATCH, None, flags)
        for path, text in covers.items():
            try:
                directory = stat.S_ISDIR(os.lstat(path).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                continue  # what lies above it is covered by now
            if text is not None:
                _attach(made[text], path)
            else:
                _attach(f"{_SCRATCH}/{_DIRECTORY if directory else _FILE}", path)
    finally:
        linux.unmount(_SCRATCH, linux.MNT_DETACH)


def _attach(cover: str, path: str) -> None:
    tree = linux.open_tree(cover)
    try:
        linux.move_mount(tree, path)
    finally:
        os.close(tree)


def _write(path: str, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.write(descriptor, content)
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


# what is hidden


def expand(patterns: Sequence[str]) -> Iterator[str]:
    """The paths that patterns mean now. What the sandbox itself needs is passed over; what lies beside it is not."""
    walks: dict[str, list[tuple[Part, ...]]] = {}
    for pattern in patterns:
        parts = split(pattern)
        fixed = next((index for index, part in enumerate(parts) if not isinstance(part, str)), len(parts))
        top = "/" + "/".join(str(part) for part in parts[:fixed])
        if parts[fixed:] in {(), (None,)}:
            yield from _openly(top)
        else:
            walks.setdefault(top, []).append(parts[fixed:])
    left = LARGEST_WALK
    for top, rests in walks.items():
        for path, visited in _walk(top, rests):
            left -= visited
            if left < 0:
                raise PlatformError(f"more than {LARGEST_WALK} files were looked at for what is to be hidden")
            if path is not None:
                yield from _openly(path)


def _openly(path: str) -> Iterator[str]:
    """A path, or what lies in it where the path itself must stay open."""
    if path in _KEPT or not os.path.lexists(path):
        return
    if not any(place.startswith(f"{path.rstrip('/')}/") for place in (*_KEPT, f"{rootfs.WORKSPACE}/")):
        yield path
        return
    for name in os.listdir(path):
        yield from _openly(f"{path.rstrip('/')}/{name}")


_States = set[tuple[int, int]]


def _walk(top: str, rests: list[tuple[Part, ...]]) -> Iterator[tuple[str | None, int]]:
    """Matches beneath a directory, and how many files were looked at since the last; links are not followed."""
    stack = [(top, _ready(rests, ((index, 0) for index in range(len(rests)))))]
    visited = 0
    while stack:
        path, states = stack.pop()
        if path in _KEPT:
            continue
        try:
            listing = os.scandir(path)
        except OSError:
            continue
        with listing:
            for entry in listing:
                visited += 1
                ahead = _ready(rests, _ahead(rests, states, entry.name))
                child = f"{path.rstrip('/')}/{entry.name}"
                if any(at == len(rests[index]) for index, at in ahead):
                    yield child, visited
                    visited = 0
                elif ahead and entry.is_dir(follow_symlinks=False):
                    stack.append((child, ahead))
        yield None, visited
        visited = 0


def _ahead(rests: list[tuple[Part, ...]], states: _States, name: str) -> Iterator[tuple[int, int]]:
    for index, at in states:
        part = rests[index][at]
        if part is None:
            yield index, at
        elif part == name if isinstance(part, str) else part(name):
            yield index, at + 1


def _ready(rests: list[tuple[Part, ...]], states: Iterable[tuple[int, int]]) -> _States:
    """The same states, and those behind a part that may mean no name at all."""
    found = set(states)
    found.update(
        [(index, at + 1) for index, at in found if at < len(rests[index]) and rests[index][at] is None]
    )
    return found


# what can be written


def narrow(places: Sequence[str]) -> None:
    """Make the workspace read-only but for these places. A place behind a link, or that cannot be made, stays so too."""
    kept: list[tuple[int, str]] = []
    try:
        for given in sorted(set(places)):
            place = given.removesuffix("/**")
            if not any(place == above or place.startswith(f"{above}/") for _, above in kept):
                tree = _open_place(place, make=place != given)
                if tree is not None:
                    kept.append((tree, place))
        if any(place == rootfs.WORKSPACE for _, place in kept):
            return
        workspace = os.open(rootfs.WORKSPACE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            linux.set_mount_attributes(workspace, linux.MOUNT_ATTR_RDONLY)
        finally:
            os.close(workspace)
        for tree, place in kept:
            linux.move_mount(tree, place)
    finally:
        for tree, _ in kept:
            os.close(tree)


def _open_place(place: str, *, make: bool) -> int | None:
    """A writable view of a place of the workspace, detached. No link is followed: it could lead to what is not writable."""
    here = os.open(rootfs.WORKSPACE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in place.removeprefix(rootfs.WORKSPACE).split("/")[1:]:
            below = _step(here, name, make=make)
            os.close(here)
            here = below
        if stat.S_ISLNK(os.fstat(here).st_mode):
            return None
        return linux.open_tree("", dir_fd=here)
    except OSError:
        return None
    finally:
        os.close(here)


def _step(directory: int, name: str, *, make: bool) -> int:
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        if not make:
            raise
        os.mkdir(name, 0o755, dir_fd=directory)
        os.chown(name, rootfs.SANDBOX_UID, rootfs.SANDBOX_UID, dir_fd=directory, follow_symlinks=False)
        return os.open(name, flags, dir_fd=directory)
