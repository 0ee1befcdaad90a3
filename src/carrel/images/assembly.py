"""Makes a root file system from unpacked layers: directories of its own, and hard links to the files of the layers.

The layers were made by `unpack.py` and nobody writes to them, so their paths lead through no link.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from carrel.errors import ImageRefused
from carrel.primitives import walk

LAYER_RECORD = "layer.json"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass
class _UnpackedLayer:
    """One layer: its open tree, and what it does to those below. Paths are relative, and empty for the root."""

    tree: int
    whiteouts: dict[str, frozenset[str]]
    opaque: frozenset[str]
    folders: dict[str, tuple[int, int, int, int, dict[str, str]]]
    """Mode, owner, group, time and extended attributes of the directories that the layer names."""
    borrowed: dict[str, dict[str, str]]


def assemble(target: str, layers: Sequence[str]) -> None:
    """Fill the empty directory `target` from the layers, the lowest first."""
    opened = [_open_layer(path) for path in layers]
    root = os.open(target, walk.DIRECTORY)
    try:
        _Assembly(root, opened).run()
    finally:
        os.close(root)
        for layer in opened:
            os.close(layer.tree)


def _open_layer(path: str) -> _UnpackedLayer:
    with open(os.path.join(path, LAYER_RECORD), encoding="ascii") as file:
        record = json.load(file)
    borrowed: dict[str, dict[str, str]] = {}
    for name, target in record["borrowed"].items():
        parent, _, base = name.rpartition("/")
        borrowed.setdefault(parent, {})[base] = target
    return _UnpackedLayer(
        tree=os.open(os.path.join(path, "tree"), walk.DIRECTORY),
        whiteouts={parent: frozenset(names) for parent, names in record["whiteouts"].items()},
        opaque=frozenset(record["opaque"]),
        folders=record["folders"],
        borrowed=borrowed,
    )


class _Assembly:
    def __init__(self, root: int, layers: Sequence[_UnpackedLayer]):
        self._root = root
        self._layers = layers
        self._owners = os.geteuid() == 0

    def run(self) -> None:
        """Make one directory after the other, then set their attributes, the deepest first."""
        made: list[tuple[str, list[int]]] = []
        waiting = [("", list(reversed(range(len(self._layers)))))]
        while waiting:
            path, sources = waiting.pop()
            made.append((path, sources))
            waiting += self._fill(path, sources)
        for path, sources in reversed(made):
            self._finish_folder(path, sources)

    def _fill(self, path: str, sources: list[int]) -> list[tuple[str, list[int]]]:
        """Link the files of one directory and make the directories in it. `sources` are the layers that have it and
        are not hidden, the highest first. Returns the new directories with theirs.
        """
        folders: dict[str, list[int]] = {}
        closed: set[str] = set()
        target = os.open(path or ".", walk.DIRECTORY, dir_fd=self._root)
        try:
            for number in range(len(self._layers) - 1, sources[-1] - 1 if sources else -1, -1):
                layer = self._layers[number]
                if number in sources:
                    self._link_entries(path, number, target, folders, closed)
                closed |= layer.whiteouts.get(path, frozenset())
                if path in layer.opaque:
                    break
            for name in folders:
                os.mkdir(name, 0o700, dir_fd=target)
        finally:
            os.close(target)
        return [(f"{path}/{name}" if path else name, found) for name, found in folders.items()]

    def _link_entries(
        self, path: str, number: int, target: int, folders: dict[str, list[int]], closed: set[str]
    ) -> None:
        layer = self._layers[number]
        source = _open_folder(layer.tree, path)
        try:
            with os.scandir(source) as found:
                entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
            for name, is_folder in entries:
                if name in closed:
                    continue
                if is_folder:
                    folders.setdefault(name, []).append(number)
                    continue
                closed.add(name)
                if name not in folders:
                    _link(source, name, target, name)
        finally:
            os.close(source)
        for name, origin in layer.borrowed.get(path, {}).items():
            if name not in closed:
                closed.add(name)
                if name not in folders:
                    self._borrow(number, origin, target, name)

    def _borrow(self, number: int, origin: str, target: int, name: str) -> None:
        """Link the file that `origin` is in the layers below."""
        parent, _, base = origin.rpartition("/")
        for lower in range(number - 1, -1, -1):
            layer = self._layers[lower]
            again = layer.borrowed.get(parent, {}).get(base)
            if again is not None:
                return self._borrow(lower, again, target, name)
            found = _state(layer.tree, origin)
            if found is not None:
                if stat.S_ISDIR(found.st_mode):
                    break
                source = _open_folder(layer.tree, parent)
                try:
                    return _link(source, base, target, name)
                finally:
                    os.close(source)
            if self._hides(layer, origin):
                break
        raise ImageRefused(
            f"the layer is refused: the entry {name[:200]!r} is a hard link to {origin[:200]!r}, which is not there",
            field="image",
        )

    def _hides(self, layer: _UnpackedLayer, origin: str) -> bool:
        """Return whether a layer that lacks `origin` hides it in those below."""
        parent, _, base = origin.rpartition("/")
        while True:
            if base in layer.whiteouts.get(parent, ()) or parent in layer.opaque:
                return True
            found = _state(layer.tree, parent)
            if found is not None and not stat.S_ISDIR(found.st_mode):
                return True
            if not parent:
                return False
            parent, _, base = parent.rpartition("/")

    def _finish_folder(self, path: str, sources: list[int]) -> None:
        """Set the attributes that the highest layer gives to a directory. One that no layer names belongs to root."""
        named = (self._layers[each].folders.get(path) for each in sources)
        mode, uid, gid, mtime_ns, xattrs = next(filter(None, named), (0o755, 0, 0, 0, {}))
        target = os.open(path or ".", walk.DIRECTORY, dir_fd=self._root)
        try:
            if self._owners and (uid or gid):
                os.fchown(target, uid, gid)
            for name, value in xattrs.items():
                with suppress(OSError):  # a file system may not have them
                    os.setxattr(target, name, bytes.fromhex(value))
            os.fchmod(target, mode if path else mode | 0o755)  # everybody must be able to enter the root
            os.utime(target, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(target)


def _link(source: int, name: str, target: int, new: str) -> None:
    try:
        os.link(name, new, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        return
    except OSError as error:
        if error.errno != errno.EMLINK:
            raise
    # The file system allows no more links to it: a copy is the same file in another place.
    found = os.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), new, dir_fd=target)
        return
    origin = walk.open_for_reading(name, source)
    copy = os.open(new, _NEW, 0o600, dir_fd=target)
    try:
        walk.copy_content(origin, copy)
        if os.geteuid() == 0:
            os.fchown(copy, found.st_uid, found.st_gid)
        for key in os.listxattr(origin):
            os.setxattr(copy, key, os.getxattr(origin, key))
        os.fchmod(copy, stat.S_IMODE(found.st_mode))
        os.utime(copy, ns=(found.st_mtime_ns, found.st_mtime_ns))
    finally:
        os.close(origin)
        os.close(copy)


def _open_folder(tree: int, path: str) -> int:
    return os.open(path or ".", walk.DIRECTORY, dir_fd=tree)


def _state(tree: int, path: str) -> os.stat_result | None:
    try:
        return os.stat(path or ".", dir_fd=tree, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
