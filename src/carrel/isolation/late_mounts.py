"""Mounts in a sandbox that runs already: the workspace of a slot's owner, for example. For root; blocking, but short.

A mount belongs to the mount namespace of the sandbox and ends with it, so a kill at any moment leaves nothing on the
host. The namespace is entered by a thread of its own, which ends afterwards: every other thread stays where it is. No
code of an agent may have run in the sandbox yet. Its files can still be hostile: a target that leads over a link, in
an image for example, is refused.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from carrel.isolation import linux
from carrel.isolation.cgroups import start_time
from carrel.primitives import libc

_PRIVATE = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV


@dataclass(frozen=True)
class LateMount:
    """A detached mount, by its descriptor, and the path in the sandbox where it belongs. If `shown_at` is given, it is
    also mounted there, read-only.
    """

    tree: int
    target: str
    shown_at: str = ""


def open_directory(path: str, *, read_only: bool = False) -> int:
    """Return a detached mount of a directory of the host, without set-user-ID bits and devices; the caller closes it.

    Mounts below it come along, as they are in a sandbox that starts with it.
    """
    place = libc.open_without_links(path)
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            raise NotADirectoryError(f"{path} is not a directory")
        tree = linux.open_tree("", dir_fd=place, recursive=True)
    finally:
        os.close(place)
    try:
        # Private, or a mount in the sandbox, such as a mask, would also appear on the host.
        attributes = _PRIVATE | (linux.MOUNT_ATTR_RDONLY if read_only else 0)
        linux.set_mount_attributes(tree, attributes, recursive=True, private=True)
    except OSError:
        os.close(tree)
        raise
    return tree


def open_memory(options: Mapping[str, str], *, programs: bool = True) -> int:
    """Return a detached mount of a new memory file system with these options; the caller closes it."""
    attributes = _PRIVATE if programs else _PRIVATE | linux.MOUNT_ATTR_NOEXEC
    return linux.new_file_system("tmpfs", options, attributes)


def mount(pid: int, started: int, mounts: Sequence[LateMount]) -> None:
    """Mount in the namespace of a process, which started at `started` (see `cgroups.start_time`), one after the other.

    Raises `OSError`; then some may be mounted, and the sandbox has to be ended.
    """
    with Sandbox(pid, started) as sandbox:
        sandbox.mount(mounts)


class Sandbox:
    """The files and mounts of a process, found by its number."""

    def __init__(self, pid: int, started: int):
        """Open them. Raises `ProcessLookupError` if the process is gone."""
        try:
            self._root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                os.close(self._root)
                raise
        except FileNotFoundError:
            raise ProcessLookupError(f"process {pid} has ended") from None
        if not started or start_time(pid) != started:  # checked after opening: it was this process then too
            self.close()
            raise ProcessLookupError(f"process {pid} has ended")

    def open(self, target: str) -> int:
        """Open a path in the sandbox, as a place. No part of it may be a link."""
        found = libc.open_in_root(self._root, os.fsencode(target), os.O_PATH, links=False)
        if stat.S_ISLNK(os.fstat(found).st_mode):
            os.close(found)
            raise OSError(f"{target} is a link in this sandbox")
        return found

    def enter(self) -> None:
        """Enter the mounts of the sandbox with this thread, which must have a root of its own. It stays there."""
        linux.enter_namespace(self._namespace)

    def act(self, work: Callable[[], None]) -> None:
        """Do work with the mounts of the sandbox. It must be system calls and nothing else: paths mean those of the
        sandbox, so an import would load code of its image.
        """
        failures: list[BaseException] = []

        def enter_and_work() -> None:
            try:
                linux.unshare(linux.CLONE_FS)  # its root and working directory are its own from now on
                self.enter()
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=enter_and_work, name="late-mounts")
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    def mount(self, mounts: Sequence[LateMount]) -> None:
        """Mount these, one after the other."""

        def mount_all() -> None:
            for each in mounts:
                self._mount(each)

        self.act(mount_all)

    def _mount(self, each: LateMount) -> None:
        self._move(each.tree, each.target)
        if each.shown_at:
            shown = linux.open_tree("", dir_fd=each.tree)
            try:
                linux.set_mount_attributes(shown, linux.MOUNT_ATTR_RDONLY)
                self._move(shown, each.shown_at)
            finally:
                os.close(shown)

    def _move(self, tree: int, target: str) -> None:
        try:
            place = self.open(target)
            try:
                linux.move_mount(tree, place)
            finally:
                os.close(place)
        except OSError as error:
            raise OSError(error.errno, f"nothing can be mounted at {target}: {error.strerror or error}") from error

    def close(self) -> None:
        os.close(self._root)
        os.close(self._namespace)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
