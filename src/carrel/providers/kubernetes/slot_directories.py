"""The directories of the shared volume that slots have as their workspace until they get an owner.

A pod keeps the directory that it was started with, whatever its name becomes. So the directory of a slot takes the name
of a workspace that has no files yet: one rename, which is done or not done after a kill. Blocking; raises `OSError`.
"""

from __future__ import annotations

import os
from contextlib import suppress

from carrel.primitives.trees import remove_tree

FOLDER = ".carrel-slots"


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
        """Let the directory of a slot become a workspace, which must be empty."""
        os.rename(os.path.join(self._folder, name), workspace)

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


def is_empty(workspace: str) -> bool:
    """Whether a workspace has no files yet."""
    try:
        with os.scandir(workspace) as entries:
            return next(entries, None) is None
    except OSError:
        return False
