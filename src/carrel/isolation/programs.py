"""Finds the files of a program: all its names on the default PATH, through merged directories and links.

A link is followed, but its target belongs to the program only if its name says so (`python3` to `python3.11`, `nc` to
`nc.openbsd`, but not `wget` to `busybox` or `sh` to `dash`): no other program may be masked too.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence

_OWN = ("/etc/carrel/bin", "/etc/carrel/tools")
PATH = (*_OWN, "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_MOST_LINKS = 40
_File = tuple[int, int]
_JUST_NOW_NS = 1_000_000_000

Stamps = dict[str, tuple[int, int, int] | None]
"""Directories when they were read: device, inode and change time; None for a directory that did not exist."""


class ProgramCatalogue:
    """The programs of one root directory, by default `/`, on the default PATH and in `more` directories."""

    def __init__(self, root: str = "", more: Sequence[str] = ()) -> None:
        self._root = root
        self._listed: dict[str, list[str]] = {}
        self.stamps: Stamps = {}
        seen: dict[_File, str] = {}
        for directory in (*PATH, *more):
            stamp = self.stamps[directory] = _stamp(root + directory)
            if stamp is not None:
                seen.setdefault(stamp[:2], directory)
        self.directories = tuple(seen.values())

    def find(self, program: str) -> list[str]:
        """Return the paths at which to mask a program; none if it is not installed."""
        name = os.path.basename(program)
        found: dict[str, None] = {}
        for start in self._starts(program):
            last: os.stat_result | None = None
            for path, status in self._chain(start):
                last = status
                if path == start or is_called(os.path.basename(path), name):
                    found[path] = None
            if last is not None and stat.S_ISREG(last.st_mode) and last.st_nlink > 1:
                found.update(dict.fromkeys(self._twins(name, last)))
        return list(found)

    def _starts(self, program: str) -> list[str]:
        if "/" in program:
            self._look(program)
            places = [program]
        else:
            places = [f"{directory}/{program}" for directory in self.directories]
        # Most directories have no such file, and this check is cheaper than an exception.
        return [place for place in places if os.access(self._root + place, os.F_OK, follow_symlinks=False)]

    def _chain(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield a path and the targets that it leads to, link by link; nothing if there is no such file."""
        for _ in range(_MOST_LINKS):
            try:
                status = os.lstat(self._root + path)
                points_to = os.readlink(self._root + path) if stat.S_ISLNK(status.st_mode) else None
            except OSError:
                return
            if stat.S_ISDIR(status.st_mode):
                return
            yield path, status
            if points_to is None:
                return
            path = os.path.join(os.path.dirname(path), points_to)
            self._look(path)

    def _look(self, path: str) -> None:
        directory = os.path.dirname(path)
        if directory not in self.stamps:
            self.stamps[directory] = _stamp(self._root + directory)

    def _twins(self, name: str, status: os.stat_result) -> Iterator[str]:
        """Hard links to a file under other names of the same program."""
        for directory in self.directories:
            for entry in self._names(directory):
                if name in entry and is_called(entry, name):
                    path = f"{directory}/{entry}"
                    try:
                        found = os.lstat(self._root + path)
                    except OSError:
                        continue
                    if (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino):
                        yield path

    def _names(self, directory: str) -> list[str]:
        if directory not in self._listed:
            try:
                self._listed[directory] = os.listdir(self._root + directory)
            except OSError:
                self._listed[directory] = []
        return self._listed[directory]


def is_unchanged(stamps: Stamps, root: str = "") -> bool:
    """Whether a catalogue with these stamps would still find the same paths."""
    now = time.time_ns()
    for directory, stamp in stamps.items():
        # Two changes can have the same time, so a directory that changed a moment ago is never trusted.
        if _stamp(root + directory) != stamp or (stamp is not None and stamp[2] > now - _JUST_NOW_NS):
            return False
    return True


def _stamp(directory: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(directory)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def is_called(own: str, name: str) -> bool:
    """Whether a file name means the program: the name alone, or with a version, a variant or a platform."""
    at = own.find(name)
    while at >= 0:
        rest = own[at + len(name) :]
        if own[:at][-1:] in {"", "-"} and (not rest or rest[0] in "-." or rest[0].isdecimal()):
            return True
        at = own.find(name, at + 1)
    return False
