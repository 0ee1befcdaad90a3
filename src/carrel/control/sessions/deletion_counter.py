"""Counts the files of a folder that are deleted while a sandbox works on it.

A file counts if it was there when the counter was made and is gone: deleted, or moved to where nothing is watched. One
that is there again, as after a checkout of git, does not count. Folders that a build makes again are not watched. Where
names cannot be remembered every file counts; `complete` says whether everything could be watched. Blocking; the agent
may change the tree at any moment, so directories are opened beneath the folder and no link is followed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection

from carrel.primitives.inotify import Inotify, NameEvent
from carrel.primitives.libc import open_without_links
from carrel.workspaces.folder_rules import is_build_folder

MOST_NAMES = 500_000
"""How many names of files are remembered. In directories beyond it every file counts."""
MOST_WATCHES = 50_000
MOST_READS = 16
"""How many times one look reads the queue."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class DeletionCounter:
    """The deleted files of one folder since the last `reset`. `ignored` are the names of folders that do not count."""

    def __init__(self, folder: str, ignored: Collection[str]):
        self._ignored = frozenset(ignored)
        self._names = 0
        self._paths: dict[int, str] = {}
        self._before: dict[int, set[str] | None] = {}
        """The files of each watched directory that were there at the beginning; None if they are not remembered."""
        self._moved: dict[int, str] = {}
        """The paths of files that were moved away, by the number of the move, until the next look."""
        self.complete = True
        self.gone: dict[str, None] = {}
        """The paths that are gone, relative to the folder, in the order of their deletion."""
        self._top = open_without_links(folder, flags=_DIRECTORY)
        try:
            self._queue = Inotify(gone=True)
        except BaseException:
            os.close(self._top)
            raise
        try:
            self._search("", new=False)
        except BaseException:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """The descriptor that is readable when something has changed."""
        return self._queue.fd

    def close(self) -> None:
        self._queue.close()
        os.close(self._top)

    def reset(self) -> None:
        """Count from 0 again."""
        self.gone.clear()

    def look(self) -> int:
        """Read what has changed since the last call; return how many files are gone."""
        earlier, self._moved = self._moved, {}
        for _ in range(MOST_READS):
            events = self._queue.read()
            for event in events:
                if event.kind == "lost":
                    self._count_again()
                else:
                    self._note(event, earlier)
            if not events:
                break
        return len(self.gone)

    def _note(self, event: NameEvent, earlier: dict[int, str]) -> None:
        watch = event.watch
        if event.kind == "ended":
            self._paths.pop(watch, None)
            self._names -= len(self._before.pop(watch, None) or ())
            return
        above = self._paths.get(watch)
        if above is None:
            return
        name = os.fsdecode(event.name)
        path = _join(above, name)
        if event.directory:
            if event.kind == "appeared" and not self._is_ignored(above, name, set()):
                self._search(path, new=True)
        elif event.kind == "gone":
            self._lose(watch, above, {name})
            if event.move and path in self.gone:
                self._moved[event.move] = path
        else:
            was = self._moved.pop(event.move, "") or earlier.pop(event.move, "")
            if was in self.gone:  # it has another name now
                del self.gone[was]
                self.gone[path] = None
            self._find(watch, above, {name})

    def _lose(self, watch: int, path: str, names: set[str]) -> None:
        """Count the names in a directory that were there at the beginning and are gone."""
        before = self._before[watch]
        if before is not None:
            names = names & before
            before -= names
            self._names -= len(names)
        self.gone.update(dict.fromkeys(_join(path, name) for name in names))

    def _find(self, watch: int, path: str, names: set[str]) -> None:
        """Do not count names any more that are there again."""
        found = {name for name in names if _join(path, name) in self.gone} if self.gone else set()
        before = self._before[watch]
        if before is not None:
            before |= found
            self._names += len(found)
        for name in found:
            del self.gone[_join(path, name)]

    def _search(self, top: str, *, new: bool) -> None:
        """Watch a directory and all below it. In one that is `new` nothing was there at the beginning."""
        pending = [top]
        while pending:
            path = pending.pop()
            try:
                here = open_without_links(path or ".", self._top, _DIRECTORY)
            except OSError:
                if not path:
                    raise
                continue  # gone, or replaced, or closed to this user as well
            try:
                known, moved = self._watch(here, path)
                files, directories = _entries(here)
            except FileNotFoundError:
                continue
            except OSError:
                self.complete = False  # the watches of this user are used up
                continue
            finally:
                os.close(here)
            if new:
                self._find(known, path, files)
                if moved and top:  # everything below it is watched already
                    continue
            elif self._names + len(files) > MOST_NAMES:
                self._before[known] = None
                self.complete = False
            else:
                self._before[known] = files
                self._names += len(files)
            pending += [_join(path, each) for each in directories if not self._is_ignored(path, each, files)]

    def _watch(self, here: int, path: str) -> tuple[int, bool]:
        """Watch a directory; return the watch, and whether it was watched already."""
        if len(self._paths) >= MOST_WATCHES:
            raise OSError(errno.ENOSPC, "too many directories")
        watch = self._queue.watch(here)
        known = watch in self._paths
        self._paths[watch] = path
        self._before.setdefault(watch, set())
        return watch, known

    def _count_again(self) -> None:
        """Events were lost: watch what is new, then compare every directory with the beginning."""
        self._search("", new=True)
        for watch, path in self._paths.items():
            self._lose(watch, path, (self._before[watch] or set()) - self._present(path))

    def _present(self, path: str) -> set[str]:
        try:
            here = open_without_links(path or ".", self._top, _DIRECTORY)
        except OSError:
            return set()
        try:
            return _entries(here)[0]
        except OSError:
            return set()
        finally:
            os.close(here)

    def _is_ignored(self, path: str, name: str, beside: set[str]) -> bool:
        return is_build_folder(path, name, beside, self._ignored)


def _entries(directory: int) -> tuple[set[str], list[str]]:
    """Return the names of the files in a directory, and those of its directories."""
    files, directories = set(), []
    with os.scandir(directory) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                files.add(entry.name)
    return files, directories


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
