"""Which files of a person's folder a checkpoint records.

Folders that a build makes again are left out by their name. `.git` is never left out, and neither is anything in it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet

from carrel.primitives import walk
from carrel.workspaces.volumes.capture import Rules

IGNORED = (
    "node_modules",
    "bower_components",
    "__pycache__",
    ".venv",
    ".tox",
    ".nox",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".gradle",
    ".next",
    ".nuxt",
    ".turbo",
    ".parcel-cache",
    ".terraform",
)
"""Directories of these names are not recorded."""
_BESIDE = {"target": ("Cargo.toml", "pom.xml", "build.sbt"), "venv": ("requirements.txt", "pyproject.toml", "setup.py")}
"""Directories that are not recorded if one of these files is beside them: the name alone may mean something else."""
MOST_NAMED = 100
"""How many left out entries a checkpoint names."""
_LONGEST_SHOWN = 1000


def is_build_folder(path: str, name: str, beside: AbstractSet[str], always: Collection[str] = IGNORED) -> bool:
    """Return whether a directory is left out. `path` is the directory that it is in, `beside` are the names there."""
    if name not in always and beside.isdisjoint(_BESIDE.get(name, ())):
        return False
    return ".git" not in path.split("/")


class FolderRules(Rules):
    """The rules for one capture of a folder; it collects what was left out."""

    def __init__(self, owner: tuple[int, int], most_bytes: int, more: Iterable[str] = ()):
        self._always = frozenset((*IGNORED, *more))
        self.may_ignore = self._always | _BESIDE.keys()
        self.owner = owner
        self.most_bytes = most_bytes
        self.ignored: list[str] = []
        self.left_out: list[str] = []
        self.ignored_count = self.left_out_count = 0
        self._guard = threading.Lock()

    def ignores(self, visited: walk.Visited, name: str) -> bool:
        """Return whether this is a build folder, outside of `.git`."""
        if visited.path_bytes > walk.LONGEST_PATH:
            return False
        beside = set() if name in self._always else {entry for entry, _ in visited.entries}
        if not is_build_folder(visited.path, name, beside, self._always):
            return False
        self.ignored_count += 1
        if len(self.ignored) < MOST_NAMED:
            self.ignored.append(_below(visited, name))
        return True

    def skipped(self, visited: walk.Visited | None, name: str, why: str) -> None:
        """Note an entry that cannot be recorded."""
        with self._guard:
            self.left_out_count += 1
            if len(self.left_out) < MOST_NAMED:
                self.left_out.append(f"{_below(visited, name)} ({why})")

    def open_directory(self, name: str, parent: int) -> int:
        """Open a directory. One that nobody but its owner may read is left out."""
        try:
            return walk.open_for_reading(name, parent, walk.DIRECTORY)
        except PermissionError:
            self.skipped(None, name, "not readable")
            raise FileNotFoundError(name) from None

    def open_file(self, name: str, parent: int) -> int:
        """Open a file. One that nobody but its owner may read is left out."""
        try:
            return walk.open_for_reading(name, parent)
        except PermissionError:
            self.skipped(None, name, "not readable")
            raise FileNotFoundError(name) from None


def _below(visited: walk.Visited | None, name: str) -> str:
    if visited is None or not visited.number:
        return name
    if visited.path_bytes > _LONGEST_SHOWN:
        return f"…/{name}"
    return f"{visited.path}/{name}"
