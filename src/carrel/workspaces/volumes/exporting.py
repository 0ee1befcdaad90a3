"""Copies a snapshot to another object store; reads only objects that the other store lacks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from carrel.workspaces.volumes.capture import FRESH_NS, WORKERS, Folder, Known, capture
from carrel.workspaces.volumes.objects import Batch, ObjectStore, Reader
from carrel.workspaces.volumes.trees import EntryKind, unpack_tree

_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class Exported:
    """A snapshot as objects: its tree, every object it needs, and facts that spare the next export reading files."""

    tree: bytes
    size: int
    files: int
    needed: set[bytes]
    known: Known = field(default_factory=dict)


def export_tree(reader: Reader, tree: bytes, target: ObjectStore, batch: Batch) -> set[bytes]:
    """Copy the objects of a stored tree that `target` lacks, and return every object that the tree needs."""
    trees: set[bytes] = set()
    parts: set[bytes] = set()
    lacking: list[bytes] = []
    pending = [tree]
    while pending:
        key = pending.pop()
        # Separate from `parts`: a file with the same bytes as a directory's object must not hide the directory.
        if key in trees:
            continue
        trees.add(key)
        raw = reader.read(key)
        if not target.has(key, 0):
            batch.add(key, raw, packed=True)
        for node in unpack_tree(raw).entries.values():
            if node.kind is EntryKind.DIRECTORY:
                pending.append(node.tree)
            for _, length, part in node.extents:
                if part not in parts:
                    parts.add(part)
                    if not target.has(part, length):
                        lacking.append(part)
    _copy(reader, lacking, batch)
    return trees | parts


def _copy(reader: Reader, keys: Sequence[bytes], batch: Batch) -> None:
    def some(start: int) -> None:
        for key in keys[start : start + _AT_A_TIME]:
            batch.add(key, reader.read(key))

    with ThreadPoolExecutor(WORKERS, thread_name_prefix="carrel-export") as pool:
        jobs = [pool.submit(some, start) for start in range(0, len(keys), _AT_A_TIME)]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def export_files(root: int, target: ObjectStore, batch: Batch, known: Known) -> Exported:
    """Read what `target` lacks of a plain tree that does not change; `known` are the facts from its last export."""
    found = capture(target, batch, root, known, trusted=False)
    needed = {folder.tree for folder in found.known.values()}
    for folder in found.known.values():
        for row in folder.rows.values():
            needed.update(part for _, _, part in row[5])
    return Exported(found.tree, found.bytes, found.files, needed, _doubted(found.known))


def _doubted(known: Known) -> Known:
    """Mark files as unknown that may have changed after the snapshot with the same times.

    The snapshot may be old, so the clock does not say what was written just before it. The newest time in it does:
    nothing in it was changed later.
    """
    newest = max((row[1] for folder in known.values() for row in folder.rows.values()), default=0)
    newest = max(newest, *(folder.signature[1] for folder in known.values()))
    limit = newest - FRESH_NS
    return {path: _doubt(folder, limit) for path, folder in known.items()}


def _doubt(folder: Folder, limit: int) -> Folder:
    fresh = [name for name, row in folder.rows.items() if row[0] and row[1] > limit]
    if not fresh and folder.signature[1] <= limit:
        return folder
    rows = dict(folder.rows)
    for name in fresh:
        rows[name] = (0, *rows[name][1:])
    signature = folder.signature if folder.signature[1] <= limit else (0, 0, 0)
    return Folder(folder.tree, signature, folder.xattrs, rows, folder.folders, files=folder.files, size=folder.size)
