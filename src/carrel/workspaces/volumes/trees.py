"""The format of directories in snapshots: one object per directory, which names its subdirectories by their hash.

So an unchanged tree costs nothing, and a comparison reads only directories with different hashes. Pure: no I/O.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import msgpack

from carrel.errors import LimitExceeded, SnapshotDamaged
from carrel.primitives.walk import LONGEST_NAME, LONGEST_PATH, too_deep
from carrel.workspaces.volumes.base import Change, ChangeKind

MOST_CHANGED_BYTES = 256 << 20
"""The most memory for the list of changes between two snapshots."""
_CHANGE_BYTES = 128
_VERSION = 1


class EntryKind(IntEnum):
    """The kind of an entry."""

    FILE = 0
    DIRECTORY = 1
    LINK = 2


Extents = tuple[tuple[int, int, bytes], ...]
"""Offset, length and object of each part of a file that has data; between them are holes."""


@dataclass(frozen=True, slots=True)
class Node:
    """One name in a directory. `group` is equal for hard links to one file; `tree` is a directory's object."""

    kind: EntryKind
    mode: int = 0
    mtime_ns: int = 0
    size: int = 0
    extents: Extents = ()
    target: bytes = b""
    tree: bytes = b""
    xattrs: dict[str, bytes] | None = None
    group: bytes | None = None

    def same(self, other: Node) -> bool:
        """Return whether only times, subdirectories and hard links differ."""
        return self._content() == other._content()

    def _content(self) -> tuple[object, ...]:
        return self.kind, self.mode, self.size, self.extents, self.target, self.xattrs or {}


@dataclass(slots=True)
class Tree:
    """One directory: its own attributes and its entries by name."""

    mode: int
    mtime_ns: int
    xattrs: dict[str, bytes] | None = None
    entries: dict[bytes, Node] = field(default_factory=dict)


def pack_entries(
    mode: int, mtime_ns: int, xattrs: dict[str, bytes] | None, parts: dict[bytes, tuple[object, ...]]
) -> bytes:
    """Encode a directory from encoded entries."""
    rows = [(name, *parts[name]) for name in sorted(parts)]
    packed: bytes = msgpack.packb((_VERSION, mode, mtime_ns, _sorted(xattrs), rows))
    return packed


def unpack_tree(raw: bytes) -> Tree:
    """Decode a directory; `SnapshotDamaged` when the bytes are not one."""
    try:
        version, mode, mtime_ns, xattrs, rows = msgpack.unpackb(raw, use_list=False)
        if version != _VERSION:
            raise ValueError(f"version {version}")
        tree = Tree(int(mode), int(mtime_ns), dict(xattrs) or None)
        for row in rows:
            name = row[0]
            if not isinstance(name, bytes) or name in {b"", b".", b".."} or b"/" in name or b"\0" in name:
                raise ValueError("a name that no file can have")
            if row[1] == EntryKind.DIRECTORY:
                tree.entries[name] = Node(EntryKind.DIRECTORY, tree=row[2])
            elif row[1] == EntryKind.LINK:
                tree.entries[name] = Node(EntryKind.LINK, mtime_ns=row[2], target=row[3])
            else:
                _, _, file_mode, mtime, size, extents, attributes, group = row
                tree.entries[name] = Node(
                    EntryKind.FILE,
                    file_mode,
                    mtime,
                    size,
                    extents,
                    xattrs=dict(attributes) or None,
                    group=group or None,
                )
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise SnapshotDamaged(f"a directory of the snapshot cannot be decoded: {error}") from None
    return tree


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """A position in a tree: its parent and its name. The path is made only on demand, because the paths of a deep tree
    take far more memory than the tree itself."""

    above: Position | None = None
    name: bytes = b""
    length: int = 0

    def below(self, name: bytes) -> Position:
        """Return an entry of this directory; `LimitExceeded` when its path is longer than any in a workspace."""
        length = self.length + len(name) + 1
        if length > LONGEST_PATH + LONGEST_NAME + 1:
            raise too_deep([os.fsdecode(part) for part in self.path().split(b"/")])
        return Position(self, name, length)

    def path(self) -> bytes:
        """Return the path from the root of the tree."""
        names = []
        here: Position | None = self
        while here is not None and here.above is not None:
            names.append(here.name)
            here = here.above
        return b"/".join(reversed(names))


class Changes:
    """Collects the differences between two trees; `LimitExceeded` when their paths take too much memory."""

    def __init__(self) -> None:
        self._found: list[Change] = []
        self._bytes = 0

    def add(self, path: bytes, kind: ChangeKind) -> None:
        """Add a change."""
        self._bytes += len(path) + _CHANGE_BYTES
        if self._bytes > MOST_CHANGED_BYTES:
            raise LimitExceeded(
                f"the snapshots differ in more than {len(self._found)} paths, too many to list",
                field="after",
                hint="export both snapshots and compare the files",
            )
        self._found.append(Change(path, kind))

    def sorted(self) -> list[Change]:
        """Return all changes, sorted by path."""
        return sorted(self._found, key=lambda change: (change.path, change.kind))


def _sorted(xattrs: dict[str, bytes] | None) -> list[tuple[str, bytes]]:
    return sorted(xattrs.items()) if xattrs else []


def compare(a: bytes, b: bytes, load: Callable[[bytes], Tree]) -> list[Change]:
    """Return the differences between two trees, sorted by path."""
    changes = Changes()
    pending = [(Position(), a, b)]
    while pending:
        here, left, right = pending.pop()
        if left == right:
            continue
        old, new = load(left), load(right)
        if here.above is not None and ((old.mode, old.xattrs or {}) != (new.mode, new.xattrs or {})):
            changes.add(here.path(), ChangeKind.CHANGED)
        for name in old.entries.keys() | new.entries.keys():
            before, after = old.entries.get(name), new.entries.get(name)
            where = here.below(name)
            if before is not None and after is not None:
                if before.kind is EntryKind.DIRECTORY and after.kind is EntryKind.DIRECTORY:
                    pending.append((where, before.tree, after.tree))
                elif before.kind is EntryKind.DIRECTORY or after.kind is EntryKind.DIRECTORY:
                    changes.add(where.path(), ChangeKind.CHANGED)
                    _all_beneath(where, before, ChangeKind.REMOVED, load, changes)
                    _all_beneath(where, after, ChangeKind.ADDED, load, changes)
                elif not before.same(after):
                    changes.add(where.path(), ChangeKind.CHANGED)
                continue
            kind = ChangeKind.ADDED if before is None else ChangeKind.REMOVED
            changes.add(where.path(), kind)
            _all_beneath(where, before or after, kind, load, changes)
    return changes.sorted()


def _all_beneath(
    where: Position, node: Node | None, kind: ChangeKind, load: Callable[[bytes], Tree], changes: Changes
) -> None:
    pending = [(where, node)]
    while pending:
        at, here = pending.pop()
        if here is not None and here.kind is EntryKind.DIRECTORY:
            for name, child in load(here.tree).entries.items():
                below = at.below(name)
                changes.add(below.path(), kind)
                if child.kind is EntryKind.DIRECTORY:
                    pending.append((below, child))


def mark(top: bytes, load: Callable[[bytes], Tree], trees: set[bytes], parts: set[bytes]) -> None:
    """Add the objects that a tree needs. `load` may raise.

    `trees` is separate from `parts`: a file with the bytes of a directory's object must not hide the directory.
    """
    pending = [top]
    while pending:
        key = pending.pop()
        if key in trees:
            continue
        for node in load(key).entries.values():
            if node.kind is EntryKind.DIRECTORY:
                pending.append(node.tree)
            parts.update(part for _, _, part in node.extents)
        trees.add(key)
