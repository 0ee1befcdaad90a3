"""The directories of the shared volume that slots have as their workspace until they get an owner.

A pod keeps the directory that it was started with, whatever its name becomes. So the directory of a slot gets a copy of
a workspace that has next to nothing yet, and takes its name. Where the file system cannot exchange two names, it takes
two renames; `recover` completes what a kill has left between them. Blocking; raises `OSError`.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress

from carrel.primitives import libc
from carrel.primitives.trees import remove_tree

FOLDER = ".carrel-slots"
MOST_ENTRIES, MOST_BYTES, DEEPEST = 64, 1024 * 1024, 8
"""How much a workspace may have to be copied into a slot. A new one has a handful of empty directories."""
_OLD, _NAME = ".old", ".name"


class SlotDirectories:
    """The slots of one server, in a folder of the volume. `owner` is the user of agents."""

    def __init__(self, volume: str, instance: str, owner: int):
        self._volume = os.path.realpath(volume)
        self._folder = os.path.join(self._volume, FOLDER, instance)
        self._owner = owner
        self._used = False

    def open(self) -> str:
        """Make the folder, in which pods of agents' user can make directories; return its path in the volume."""
        self._make_folder()
        self._give_to_agents(self._folder)
        return os.path.relpath(self._folder, self._volume)

    def make(self, name: str) -> str:
        """Make the directory of a slot; return its path in the volume."""
        self._make_folder()
        path = os.path.join(self._folder, name)
        os.mkdir(path, 0o700)
        self._give_to_agents(path)
        return os.path.relpath(path, self._volume)

    def _make_folder(self) -> None:
        self._used = True
        os.makedirs(self._folder, 0o700, exist_ok=True)

    def _give_to_agents(self, path: str) -> None:
        if os.geteuid() == 0:
            os.chown(path, self._owner, self._owner)

    def give(self, name: str, workspace: str) -> None:
        """Let the directory of a slot become a workspace, with what is in that."""
        path = os.path.join(self._folder, name)
        if not is_small(workspace):
            raise OSError(f"{workspace} has too much to be copied")
        _copy(workspace, path)
        if libc.exchange(path, workspace):
            remove_tree(path)
            return
        os.symlink(os.path.realpath(workspace), f"{path}{_NAME}")
        os.rename(workspace, f"{path}{_OLD}")
        os.rename(path, workspace)
        self._forget(path)

    def _forget(self, path: str) -> None:
        remove_tree(f"{path}{_OLD}")
        os.unlink(f"{path}{_NAME}")

    def recover(self) -> None:
        """Give workspaces their names back that a kill has left without one."""
        with suppress(FileNotFoundError):
            for entry in os.listdir(self._folder):
                if entry.endswith(_NAME):
                    path = os.path.join(self._folder, entry.removesuffix(_NAME))
                    workspace = os.readlink(os.path.join(self._folder, entry))
                    if os.path.isdir(f"{path}{_OLD}") and not os.path.lexists(workspace):
                        os.rename(f"{path}{_OLD}", workspace)
                    self._forget(path)

    def remove(self, name: str) -> None:
        """Remove the directory of a slot that has no owner; it may be gone. That of an owner has another name."""
        remove_tree(os.path.join(self._folder, name))

    def close(self) -> None:
        """Remove the folder with all that is left in it, if this made it: no slot of this server runs any more."""
        if not self._used:
            return
        remove_tree(self._folder)
        with suppress(OSError):  # there are those of other servers
            os.rmdir(os.path.dirname(self._folder))


def is_small(workspace: str) -> bool:
    """Whether a workspace has so little that it can be copied into a slot: directories and ordinary files, of one name
    each.
    """
    entries, size = 0, 0
    folders = [(workspace, 0)]
    try:
        while folders:
            folder, depth = folders.pop()
            with os.scandir(folder) as found:
                for entry in found:
                    status = entry.stat(follow_symlinks=False)
                    entries, size = entries + 1, size + status.st_size
                    ordinary = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
                    if entries > MOST_ENTRIES or not (ordinary or stat.S_ISDIR(status.st_mode)):
                        return False
                    if stat.S_ISDIR(status.st_mode):
                        folders.append((entry.path, depth + 1))
            if depth > DEEPEST or size > MOST_BYTES:
                return False
    except OSError:
        return False
    return True


def _copy(source: str, target: str) -> None:
    """Copy what a small directory has, with owners, modes, attributes and times."""
    with os.scandir(source) as found:
        for entry in found:
            copied = os.path.join(target, entry.name)
            if entry.is_dir(follow_symlinks=False):
                os.mkdir(copied, 0o700)
                _copy(entry.path, copied)
            else:
                shutil.copyfile(entry.path, copied, follow_symlinks=False)
                _describe(entry.path, copied)
    _describe(source, target)


def _describe(source: str, target: str) -> None:
    status = os.lstat(source)
    if os.geteuid() == 0:
        os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
    shutil.copystat(source, target, follow_symlinks=False)
