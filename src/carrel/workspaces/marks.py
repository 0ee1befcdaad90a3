"""Which volumes are being made, and which are whole but not recorded: kept as empty files, so that the next start knows
what a killed server had not finished. Blocking; knows no driver and no record.
"""

from __future__ import annotations

import os
from contextlib import suppress

_MAKING, _WHOLE = "making-", "whole-"


class Marks:
    """The marks of one server. A volume without a mark is whole and recorded."""

    def __init__(self, directory: str):
        self._directory = directory

    def prepare(self) -> None:
        """Make the directory."""
        os.makedirs(self._directory, 0o700, exist_ok=True)

    def making(self, volume: str) -> None:
        """The volume is about to be made: until `whole`, what lies there is nothing."""
        os.close(os.open(self._path(_MAKING, volume), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def whole(self, volume: str) -> None:
        """The volume has its files. Until `clear`, it counts only if there is a record of it."""
        with suppress(FileNotFoundError):
            os.rename(self._path(_MAKING, volume), self._path(_WHOLE, volume))

    def clear(self, volume: str) -> None:
        """The volume is recorded, or gone."""
        for kind in (_MAKING, _WHOLE):
            with suppress(FileNotFoundError):
                os.unlink(self._path(kind, volume))

    def unfinished(self) -> dict[str, bool]:
        """The volumes with a mark; True for those that are whole."""
        found = {}
        for name in os.listdir(self._directory):
            for kind in (_MAKING, _WHOLE):
                if name.startswith(kind):
                    found[name.removeprefix(kind)] = kind == _WHOLE
        return found

    def _path(self, kind: str, volume: str) -> str:
        return os.path.join(self._directory, kind + volume)
