"""Finds what a program outside of /usr needs, so that the sandbox shows that and nothing else of the home directory.

Knows the usual ways to install a tool for one user: npm prefixes, nvm, pyenv, uv, pipx, `pip install --user`, single
files. What it does not find, the user names with `--host-file`.
"""

from __future__ import annotations

import os
from typing import NamedTuple

SHOWN = ("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/")
"""Directories of the host that every sandbox shows."""
HOME = "/home/agent"
"""The home directory inside."""
STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OWN_PATH = "/etc/carrel/bin:/etc/carrel/tools"
_PRIVATE = (".ssh", ".gnupg", ".aws", ".azure", ".config", ".kube", ".docker", ".cargo", ".netrc", ".git-credentials")
_DEEPEST = 8
"""How many interpreters of interpreters are followed."""


class FoundTool(NamedTuple):
    """A program as it is started inside, and the paths of the host that it needs."""

    command: str
    host_paths: dict[str, str]
    """Path inside → path of the host. All are shown read-only."""
    path: str | None
    """The variable PATH, where it differs from the usual one."""


def find_tool(name: str, folder: str, path: str, home: str) -> FoundTool:
    """Return how a program is started inside. One that is not found stays as it is: then the sandbox says so."""
    place = os.path.join(folder, name) if "/" in name else _on_path(name, path)
    if place is None:
        return FoundTool(name, {}, None)
    place = os.path.normpath(place)
    found = _Needed(folder, path, home)
    command = found.add(place)
    if not found.paths:
        return FoundTool(name, {}, None)
    extra = list(dict.fromkeys(found.directories))
    return FoundTool(command, found.paths, ":".join([_OWN_PATH, *extra, STANDARD_PATH]))


def _on_path(name: str, path: str) -> str | None:
    for directory in path.split(":"):
        place = os.path.join(directory, name)
        if directory.startswith("/") and os.access(place, os.X_OK) and os.path.isfile(place):
            return place
    return None


class _Needed:
    """Collects the paths that a program, its interpreter and their libraries need."""

    def __init__(self, folder: str, path: str, home: str):
        self.paths: dict[str, str] = {}
        self.directories: list[str] = []
        self._folder, self._path, self._home = folder, path, home
        self._left = _DEEPEST

    def add(self, place: str) -> str:
        """Add what a program needs; return the path to start it by."""
        self._left -= 1
        real = os.path.realpath(place)
        if self._left < 0 or (self._is_visible(place) and self._is_visible(real)):
            return place
        started = place
        trees = [tree for each in (place, real) if (tree := self._tree(each)) is not None]
        for tree in trees:
            self.paths[tree] = tree
        if not any(_is_inside(place, tree) for tree in trees):
            if any(_is_inside(real, tree) for tree in trees):
                started = real  # it looks for its files beside itself
            elif not self._is_visible(place):
                self.paths[place] = real
        self.directories.append(os.path.dirname(started))
        if (beside := os.path.join(os.path.dirname(place))) in {os.path.join(tree, "bin") for tree in trees}:
            self.directories.append(beside)
        self._interpreter(real)
        return started

    def _is_visible(self, place: str) -> bool:
        return place.startswith(SHOWN) or _is_inside(place, self._folder)

    def _tree(self, place: str) -> str | None:
        """Return the directory that a tool is installed in, if there is one for it alone."""
        if self._is_visible(place):
            return None
        before, found, after = place.partition("/lib/node_modules/")
        if found:
            if os.path.exists(f"{before}/bin/node") and self._is_harmless(before):
                return before
            words = after.split("/")
            package = "/".join(words[: 2 if words[0].startswith("@") else 1])
            return self._checked(f"{before}{found}{package}")
        before, found, _ = place.partition("/node_modules/")
        if found:
            return self._checked(f"{before}/node_modules")
        directory = os.path.dirname(place)
        while len(directory) > 1 and directory != self._home:
            if os.path.exists(f"{directory}/pyvenv.cfg"):
                self._base_of(f"{directory}/pyvenv.cfg")
                return self._checked(directory)
            directory = os.path.dirname(directory)
        above = os.path.dirname(os.path.dirname(place))
        if os.path.basename(os.path.dirname(place)) == "shims" and os.path.isdir(f"{above}/versions"):  # pyenv
            return self._checked(above)
        has_node = os.path.exists(f"{above}/bin/node") and os.path.isdir(f"{above}/lib/node_modules")
        is_version = "/versions/" in place or "/python/" in place or has_node
        if os.path.basename(os.path.dirname(place)) == "bin" and is_version:
            return self._checked(above)
        return None

    def _base_of(self, config: str) -> None:
        """Add the interpreter that a virtual environment was made from."""
        for line in _read(config).decode(errors="replace").splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "home" and value.strip().startswith("/"):
                self.add(os.path.join(value.strip(), "python3"))

    def _interpreter(self, real: str) -> None:
        """Add the interpreter that the first line of a script names."""
        first = _read(real, 256).split(b"\n", 1)[0]
        if not first.startswith(b"#!"):
            return
        words = os.fsdecode(first[2:]).split()
        if words and os.path.basename(words[0]) == "env":
            words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
            words = [found] if words and (found := _on_path(words[0], self._path)) else []
        if not words or not words[0].startswith("/"):
            return
        self.add(words[0])
        user_packages = os.path.join(self._home, ".local/lib")
        if words[0].startswith("/usr/") and _is_inside(real, os.path.join(self._home, ".local/bin")):
            for name in _listed(user_packages):
                if name.startswith("python3"):
                    self.paths[f"{HOME}/.local/lib/{name}"] = f"{user_packages}/{name}"

    def _checked(self, tree: str) -> str | None:
        return tree if self._is_harmless(tree) else None

    def _is_harmless(self, tree: str) -> bool:
        """Whether a directory may be shown: not the home directory or one around it, and none with keys in it."""
        real = os.path.realpath(tree)
        private = [os.path.join(self._home, name) for name in (*_PRIVATE, ".local", ".local/share")]
        return not any(
            _is_inside(each, where) for each in (self._home, *private) for where in (tree, real)
        ) and not any(_is_inside(real, os.path.join(self._home, name)) for name in _PRIVATE)


def _is_inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _read(path: str, size: int = 65536) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError:
        return b""


def _listed(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
