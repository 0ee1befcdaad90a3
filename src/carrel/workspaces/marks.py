"""Marks on volumes that are being created, or are complete but not recorded in the store. A mark is an empty file, so
that the next start knows what a killed server had not finished. Blocking.
"""

from __future__ import annotations

import os
from contextlib import suppress

_MAKING, _WHOLE = "making-", "whole-"


class Marks:
    """The marks of one server. A volume without a mark is complete and recorded."""

    def __init__(self, directory: str):
        self._directory = directory

    def prepare(self) -> None:
        """Create the directory."""
        os.makedirs(self._directory, 0o700, exist_ok=True)

    def making(self, volume: str) -> None:
        """Mark a volume that is about to be created: until `whole`, its files do not count."""
        os.close(os.open(self._path(_MAKING, volume), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def whole(self, volume: str) -> None:
        """Mark a volume that has its files: until `clear`, it counts only if the store has a record of it."""
        with suppress(FileNotFoundError):
            os.rename(self._path(_MAKING, volume), self._path(_WHOLE, volume))

    def clear(self, volume: str) -> None:
        """Remove the mark of a volume that is recorded or gone."""
        for kind in (_MAKING, _WHOLE):
            with suppress(FileNotFoundError):
                os.unlink(self._path(kind, volume))

    def is_making(self, volume: str) -> bool:
        """Whether a volume is marked as being created."""
        return os.path.exists(self._path(_MAKING, volume))

    def unfinished(self) -> dict[str, bool]:
        """Return the volumes with a mark; True for complete ones."""
        found = {}
        for name in os.listdir(self._directory):
            for kind in (_MAKING, _WHOLE):
                if name.startswith(kind):
                    found[name.removeprefix(kind)] = kind == _WHOLE
        return found

    def _path(self, kind: str, volume: str) -> str:
        return os.path.join(self._directory, kind + volume)
