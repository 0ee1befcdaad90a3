"""Which files are a program: every name of it on the default PATH, through merged directories and links.

A link is followed, and what it leads to belongs to the program only when its own name says so (`python3` to
`python3.11`, `nc` to `nc.openbsd`, but not `wget` to `busybox` or `sh` to `dash`): another program must not be masked
along. Only reads.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator

_OWN = ("/etc/carrel/bin", "/etc/carrel/tools")
PATH = (*_OWN, "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_MOST_LINKS = 40
_File = tuple[int, int]
_JUST_NOW_NS = 1_000_000_000

Stamps = dict[str, tuple[int, int, int] | None]
"""Directories as they were when they were looked into: device, inode and time of change; None for one not there."""


class Catalogue:
    """The programs of one root; a root other than `/` is given by its directory."""

    def __init__(self, root: str = "") -> None:
        self._root = root
        self._listed: dict[str, list[str]] = {}
        self.stamps: Stamps = {}
        seen: dict[_File, str] = {}
        for directory in PATH:
            stamp = self.stamps[directory] = _stamp(root + directory)
            if stamp is not None:
                seen.setdefault(stamp[:2], directory)
        self.directories = tuple(seen.values())

    def find(self, program: str) -> list[str]:
        """The paths at which a program is to be masked. A program that is not there has none."""
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
        # Most places have no such file: asking first is cheaper than an error.
        return [place for place in places if os.access(self._root + place, os.F_OK, follow_symlinks=False)]

    def _chain(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        """A path and all that it leads to, link by link; nothing when there is no such file."""
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
    """Whether a catalogue with these stamps would find the same again."""
    now = time.time_ns()
    for directory, stamp in stamps.items():
        # A change can have the time of one before it: what has just changed is never trusted.
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
    """Whether a file of this own name is the program: the name alone, or with a version, a flavour or a platform."""
    at = own.find(name)
    while at >= 0:
        rest = own[at + len(name) :]
        if own[:at][-1:] in {"", "-"} and (not rest or rest[0] in "-." or rest[0].isdecimal()):
            return True
        at = own.find(name, at + 1)
    return False
