"""Takes protected names away that appear in a folder while a sandbox works on it.

Mounts protect what exists when a sandbox starts. What is made later, such as a hook in a new repository, would be used
outside of the sandbox: so it is renamed as soon as it appears, never deleted. A new git repository is left as long as
it can run nothing. Everything is done by descriptors beneath the folder and follows no link: the agent may change the
tree at any moment. Blocking; knows paths, not rules.
"""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from carrel.control.sessions.repository_checks import CONFIG, HOOKS, is_harmless
from carrel.isolation.inside import WORKSPACE
from carrel.isolation.masks import split
from carrel.primitives.inotify import Inotify
from carrel.primitives.libc import open_without_links, rename_new

HELD = ".held-by-carrel"
MOST_ENTRIES = 1_000_000
"""How many entries are looked at in one search of a folder."""
MOST_WATCHES = 50_000
_LONGEST_NAME = 255
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Held:
    """A protected path that was taken away, and the path that it has now; both relative to the folder."""

    path: str
    now: str


def fold(name: str) -> str:
    """Return a name in the form in which file systems and programs that ignore case compare it. Characters that are not
    shown are left out, as some file systems do.
    """
    if name.isascii():
        return name.lower().rstrip(". ")
    shown = "".join(letter for letter in name if unicodedata.category(letter) != "Cf")
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", shown).casefold()).rstrip(". ")


class PatternPosition:
    """A place in a folder, as far as patterns are concerned. Next positions are kept: most names have the same one."""

    __slots__ = ("_fixed", "_names", "_next", "_paths", "_states", "leads_on", "protects")

    OTHER = "/"
    """Stands for every name that no pattern has."""

    def __init__(self, paths: ProtectedPaths, states: frozenset[tuple[int, int]]):
        self._paths, self._states = paths, states
        parts = [(paths.patterns[index], at) for index, at in states]
        self.protects = any(at == len(pattern) for pattern, at in parts)
        """Whether a path here is protected."""
        self.leads_on = any(0 < at < len(pattern) and pattern[at - 1] is not None for pattern, at in parts)
        """Whether it was reached by a name that a pattern gives, and a protected path may be below. Anything but a
        directory here, such as a link or a `.git` file, would lead the path elsewhere.
        """
        ahead = [pattern[at] for pattern, at in parts if at < len(pattern)]
        self._names = {part for part in ahead if isinstance(part, str)}
        self._fixed = all(part is None or isinstance(part, str) for part in ahead)
        self._next: dict[str, PatternPosition | None] = {}

    def enter(self, name: str) -> PatternPosition | None:
        """Return the position of a name; None if no protected path can be there or below."""
        folded = fold(name)
        if not self._fixed:
            return self._enter(name, folded)
        key = folded if folded in self._names else self.OTHER
        if key not in self._next:
            self._next[key] = self._enter(key, key)
        return self._next[key]

    def names_of_files(self) -> set[str] | None:
        """Return the folded names that a file must have to be protected here; None if others may be too."""
        if not self._fixed:
            return None
        other = self.enter(self.OTHER)
        return None if other is not None and (other.protects or other.leads_on) else self._names

    def _enter(self, name: str, folded: str) -> PatternPosition | None:
        ahead = set()
        for index, at in self._states:
            pattern = self._paths.patterns[index]
            part = pattern[at] if at < len(pattern) else ""
            if part is None:
                ahead.add((index, at))
            elif part == folded if isinstance(part, str) else part(name) or part(folded):
                ahead.add((index, at + 1))
        return self._paths.at(ahead)


class ProtectedPaths:
    """Patterns of paths in a folder."""

    def __init__(self, patterns: Iterable[str]):
        """`patterns` are those of masks, below `/workspace`; others say nothing about the folder."""
        found = (split(each) for each in patterns)
        self.patterns = [
            tuple(fold(part) if isinstance(part, str) else part for part in parts[1:])
            for parts in found
            if parts[:1] == (WORKSPACE[1:],)
        ]
        self._positions: dict[frozenset[tuple[int, int]], PatternPosition] = {}
        self.top = self.at({(index, 0) for index in range(len(self.patterns))})

    def at(self, states: set[tuple[int, int]]) -> PatternPosition | None:
        """Return the position with these parts of the patterns ahead, and those behind a `**` that matches no name."""
        more = {(i, at + 1) for i, at in states if at < len(self.patterns[i]) and self.patterns[i][at] is None}
        key = frozenset(states | more)
        if key and key not in self._positions:
            self._positions[key] = PatternPosition(self, key)
        return self._positions.get(key)


@dataclass
class FolderGuard:
    """Guards one folder. `known` are the protected paths that mounts protect: nobody inside can have made them. Without
    it these are the ones that the first search finds, for a sandbox that has just started.
    """

    folder: str
    paths: ProtectedPaths
    known: set[str] | None = None
    complete: bool = True
    """Whether everything could be searched and watched."""
    count: int = 0
    newest: tuple[Held, ...] = ()
    """What was taken away: how many paths, and the last ones."""

    def __post_init__(self) -> None:
        self._top = open_without_links(self.folder, flags=_DIRECTORY)
        self._queue: Inotify | None = None
        self._replaced: dict[str, None] = {}
        self._watched: dict[int, tuple[str, PatternPosition | None]] = {}
        """The path of each watch, and its position; None for a path that is examined again as a whole."""

    @property
    def fd(self) -> int:
        """The descriptor that is readable when names have appeared, once `watch` was called."""
        assert self._queue is not None
        return self._queue.fd

    def close(self) -> None:
        os.close(self._top)
        if self._queue is not None:
            self._queue.close()

    def watch(self) -> list[Held]:
        """Watch for protected names from now on, and take away those that appeared before."""
        self._queue = self._queue or Inotify()
        return self.sweep()

    def sweep(self) -> list[Held]:
        """Take away every protected path that is not known."""
        return self._hold(self._search("", self.paths.top) if self.paths.top else ())

    def look(self) -> list[Held]:
        """Take away what has appeared since the last call."""
        assert self._queue is not None
        held: list[Held] = []
        again: dict[str, None] = {}
        for event in self._queue.read():
            if event.kind == "lost":
                self._replaced |= dict.fromkeys(self.known or ())
                return [*held, *self.sweep()]
            if event.kind == "ended":
                self._watched.pop(event.watch, None)
            place = self._watched.get(event.watch)
            if place is None:
                continue
            above, position = place
            name = os.fsdecode(event.name)
            if position is None:
                again[above] = None  # once, however often it has changed
            elif (ahead := position.enter(name)) is not None:
                found = list(self._examine(above, name, ahead))
                self._replaced |= dict.fromkeys(path for path in found if path in (self.known or ()))
                held += self._hold(found)
        return held + self._hold(again)

    def take_replaced(self) -> list[str]:
        """Return the known paths that `look` has seen appear again, once. Their mounts are gone."""
        replaced, self._replaced = self._replaced, {}
        return list(replaced)

    def _search(self, top: str, position: PatternPosition) -> Iterable[str]:
        """Yield the protected paths in a directory, watching every directory on the way that may get one."""
        stack, left = [(top, position)], MOST_ENTRIES
        while stack:
            path, position = stack.pop()
            try:
                here = open_without_links(path or ".", self._top, _DIRECTORY)
            except OSError:
                continue  # gone, or replaced, or closed to this user as well
            try:
                self._watch(here, path, position)
                names = position.names_of_files()
                with os.scandir(here) as found:
                    for entry in found:
                        left -= 1
                        if left < 0:
                            self.complete = False
                            return
                        directory = entry.is_dir(follow_symlinks=False)
                        if names is not None and not directory and fold(entry.name) not in names:
                            continue  # as most files of a folder
                        ahead = position.enter(entry.name)
                        if ahead is None:
                            continue
                        child = f"{path}/{entry.name}" if path else entry.name
                        if self._catches(ahead, entry.name, directory=directory):
                            yield child
                        elif directory:
                            stack.append((child, ahead))
            finally:
                os.close(here)

    def _examine(self, above: str, name: str, position: PatternPosition) -> Iterable[str]:
        """Yield what is protected of a name that appeared in a directory, or below it."""
        path = f"{above}/{name}" if above else name
        try:
            found = open_without_links(path, self._top, os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            directory = False  # a link, or gone by now
        else:
            directory = stat.S_ISDIR(os.fstat(found).st_mode)
            os.close(found)
        if self._catches(position, name, directory=directory):
            yield path
        elif directory:
            yield from self._search(path, position)

    @staticmethod
    def _catches(position: PatternPosition, name: str, *, directory: bool) -> bool:
        caught = position.protects or (position.leads_on and not directory)
        return caught and HELD not in name

    def _watch(self, opened: int, path: str, position: PatternPosition | None, *, file: bool = False) -> bool:
        """Watch a directory or a file, once `watch` was called; return False if it cannot be watched."""
        if self._queue is None:
            return True
        try:
            if len(self._watched) >= MOST_WATCHES:
                raise OSError(errno.ENOSPC, "too many watches")
            self._watched[(self._queue.watch_file if file else self._queue.watch)(opened)] = path, position
        except OSError as error:
            self.complete = self.complete and error.errno == errno.EACCES  # nobody can read it, so it is taken away
            return False
        return True

    def _hold(self, found: Iterable[str]) -> list[Held]:
        paths, held = list(found), []
        if self.known is None:
            self.known = set(paths)
        for path in paths:
            if path in self.known:
                continue
            above, _, name = path.rpartition("/")
            with suppress(OSError):  # gone by now
                here = open_without_links(above or ".", self._top, _DIRECTORY)
                try:
                    if self._may_stay(here, path):
                        continue
                    now = _take_away(here, name)
                finally:
                    os.close(here)
                held.append(Held(path, f"{above}/{now}" if above else now))
        return held

    def _may_stay(self, directory: int, path: str) -> bool:
        """Whether a path in an open directory belongs to a repository that can run nothing; it is watched then."""
        above, _, name = path.rpartition("/")
        if above.rpartition("/")[2] != ".git" or name not in {CONFIG, HOOKS}:
            return False
        with suppress(OSError):
            found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            try:
                # First the watch: what changes after it is seen.
                return self._watch(found, path, None, file=name == CONFIG) and is_harmless(directory, name)
            finally:
                os.close(found)
        return False


def _take_away(directory: int, name: str) -> str:
    """Rename an entry to a name that nobody uses; return it."""
    for number in range(100):
        now = _held_name(name, f"{HELD}-{number}" if number else HELD)
        with suppress(FileExistsError):
            rename_new(directory, os.fsencode(name), directory, os.fsencode(now))
            return now
    now = _held_name(name, f"{HELD}-{os.urandom(8).hex()}")
    rename_new(directory, os.fsencode(name), directory, os.fsencode(now))
    return now


def _held_name(name: str, ending: str) -> str:
    short = os.fsencode(name)[: _LONGEST_NAME - len(ending)]
    return os.fsdecode(short) + ending
