"""How a directory is written down: one object per directory, which names its subdirectories by their hash.

So a tree that did not change costs nothing, and two snapshots are compared by looking only where the hashes differ.
Pure: no files are touched here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import msgpack

from carrel.errors import SnapshotDamaged
from carrel.workspaces.volumes.base import Change, ChangeKind

_VERSION = 1


class Kind(IntEnum):
    """What an entry is."""

    FILE = 0
    DIRECTORY = 1
    LINK = 2


Extents = tuple[tuple[int, int, bytes], ...]
"""Offset, length and object of each piece of a file that has data; what lies between is a hole."""


@dataclass(frozen=True, slots=True)
class Node:
    """One name in a directory. `group` is equal for hard links to one file; `tree` is a directory's object."""

    kind: Kind
    mode: int = 0
    mtime_ns: int = 0
    size: int = 0
    extents: Extents = ()
    target: bytes = b""
    tree: bytes = b""
    xattrs: dict[str, bytes] | None = None
    group: bytes | None = None

    def same(self, other: Node) -> bool:
        """Whether only times and subdirectories may differ."""
        return (self.kind, self.mode, self.size, self.extents, self.target, self.xattrs or {}) == (
            other.kind,
            other.mode,
            other.size,
            other.extents,
            other.target,
            other.xattrs or {},
        )


@dataclass(slots=True)
class Tree:
    """One directory: its own attributes and its entries by name."""

    mode: int
    mtime_ns: int
    xattrs: dict[str, bytes] | None = None
    entries: dict[bytes, Node] = field(default_factory=dict)


def pack_tree(tree: Tree) -> bytes:
    """The bytes of a directory; equal directories give equal bytes."""
    rows: list[tuple[object, ...]] = []
    for name, node in sorted(tree.entries.items()):
        if node.kind is Kind.DIRECTORY:
            rows.append((name, 1, node.tree))
        elif node.kind is Kind.LINK:
            rows.append((name, 2, node.mtime_ns, node.target))
        else:
            rows.append(
                (name, 0, node.mode, node.mtime_ns, node.size, node.extents, _sorted(node.xattrs), node.group or b"")
            )
    packed: bytes = msgpack.packb((_VERSION, tree.mode, tree.mtime_ns, _sorted(tree.xattrs), rows))
    return packed


def unpack_tree(raw: bytes) -> Tree:
    """The directory these bytes describe; `SnapshotDamaged` when they describe none."""
    try:
        version, mode, mtime_ns, xattrs, rows = msgpack.unpackb(raw, use_list=False)
        if version != _VERSION:
            raise ValueError(f"version {version}")
        tree = Tree(int(mode), int(mtime_ns), dict(xattrs) or None)
        for row in rows:
            name = row[0]
            if not isinstance(name, bytes) or name in {b"", b".", b".."} or b"/" in name or b"\0" in name:
                raise ValueError("a name that no directory can hold")
            if row[1] == Kind.DIRECTORY:
                tree.entries[name] = Node(Kind.DIRECTORY, tree=row[2])
            elif row[1] == Kind.LINK:
                tree.entries[name] = Node(Kind.LINK, mtime_ns=row[2], target=row[3])
            else:
                _, _, file_mode, mtime, size, extents, attributes, group = row
                tree.entries[name] = Node(
                    Kind.FILE, file_mode, mtime, size, extents, xattrs=dict(attributes) or None, group=group or None
                )
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise SnapshotDamaged(f"a directory of the snapshot cannot be understood: {error}") from None
    return tree


def _sorted(xattrs: dict[str, bytes] | None) -> list[tuple[str, bytes]]:
    return sorted(xattrs.items()) if xattrs else []


def compare(a: bytes, b: bytes, load: Callable[[bytes], Tree]) -> list[Change]:
    """What leads from one tree to the other, sorted by path."""
    changes: list[Change] = []
    pending = [(b"", a, b)]
    while pending:
        prefix, left, right = pending.pop()
        if left == right:
            continue
        old, new = load(left), load(right)
        if prefix and ((old.mode, old.xattrs or {}) != (new.mode, new.xattrs or {})):
            changes.append(Change(prefix[:-1], ChangeKind.CHANGED))
        for name in old.entries.keys() | new.entries.keys():
            before, after = old.entries.get(name), new.entries.get(name)
            path = prefix + name
            if before is not None and after is not None:
                if before.kind is Kind.DIRECTORY and after.kind is Kind.DIRECTORY:
                    pending.append((path + b"/", before.tree, after.tree))
                elif before.kind is Kind.DIRECTORY or after.kind is Kind.DIRECTORY:
                    changes.append(Change(path, ChangeKind.CHANGED))
                    changes += _all_beneath(path, before, ChangeKind.REMOVED, load)
                    changes += _all_beneath(path, after, ChangeKind.ADDED, load)
                elif not before.same(after):
                    changes.append(Change(path, ChangeKind.CHANGED))
                continue
            kind = ChangeKind.ADDED if before is None else ChangeKind.REMOVED
            changes.append(Change(path, kind))
            changes += _all_beneath(path, before or after, kind, load)
    return sorted(changes, key=lambda change: (change.path, change.kind))


def _all_beneath(path: bytes, node: Node | None, kind: ChangeKind, load: Callable[[bytes], Tree]) -> list[Change]:
    found: list[Change] = []
    pending = [(path, node)]
    while pending:
        at, here = pending.pop()
        if here is not None and here.kind is Kind.DIRECTORY:
            for name, child in load(here.tree).entries.items():
                found.append(Change(at + b"/" + name, kind))
                pending.append((at + b"/" + name, child))
    return found
