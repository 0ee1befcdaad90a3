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

    def make(self, name: str) -> str:
        """Make the directory of a slot; return its path in the volume."""
        os.makedirs(self._folder, 0o700, exist_ok=True)
        path = os.path.join(self._folder, name)
        os.mkdir(path, 0o700)
        if os.geteuid() == 0:
            os.chown(path, self._owner, self._owner)
        return os.path.relpath(path, self._volume)

    def give(self, name: str, workspace: str) -> None:
        """Let the directory of a slot become a workspace, which must be empty."""
        os.rename(os.path.join(self._folder, name), workspace)

    def remove(self, name: str) -> None:
        """Remove the directory of a slot that has no owner; it may be gone. That of an owner has another name."""
        remove_tree(os.path.join(self._folder, name))
        with suppress(OSError):  # there are other slots, or those of other servers
            os.rmdir(self._folder)
            os.rmdir(os.path.dirname(self._folder))


def is_empty(workspace: str) -> bool:
    """Whether a workspace has no files yet."""
    try:
        with os.scandir(workspace) as entries:
            return next(entries, None) is None
    except OSError:
        return False
