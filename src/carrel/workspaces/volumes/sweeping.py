"""Removes objects that nothing needs. What frees room without taking any comes first, so that it works on a full disk.

Knows which objects are needed only from its caller.
"""

from __future__ import annotations

import errno
import os

from carrel.errors import SnapshotDamaged
from carrel.workspaces.volumes.base import Collected
from carrel.workspaces.volumes.objects import Batch, ObjectStore, Pack, Reader


def sweep(store: ObjectStore, live: set[bytes], keep_ns: int = 0) -> Collected:
    """Remove every object that is neither in `live` nor as old as `keep_ns`. The exclusive lock must be held.

    A pack that is mostly garbage is written anew without it, if there is room; one that cannot be read is left for a
    person.
    """
    dead: list[Pack] = []
    mixed: list[Pack] = []
    for pack in store.packs():
        kept = sum(key in live for key in pack.objects)
        garbage = sum(length for key, length in pack.objects.items() if key not in live)
        if kept == pack.total or (kept and garbage * 2 < sum(pack.objects.values())):
            continue
        if os.stat(pack.path).st_mtime_ns > keep_ns:
            (mixed if kept else dead).append(pack)
    loose = [path for key, path in store.loose_files() if key not in live and os.stat(path).st_mtime_ns > keep_ns]
    if dead or mixed or loose:
        store.new_generation()
    freed = _remove([pack.path for pack in dead] + loose)
    stored, rewritten = _rewrite(store, mixed, live)
    freed += _remove([pack.path for pack in rewritten]) - stored
    objects = sum(pack.total for pack in dead) + len(loose)
    objects += sum(pack.total - sum(key in live for key in pack.objects) for pack in rewritten)
    store.refresh()
    return Collected(objects, max(freed, 0))


def _rewrite(store: ObjectStore, mixed: list[Pack], live: set[bytes]) -> tuple[int, list[Pack]]:
    """Store what is needed of some packs again: the bytes that took, and the packs of which all was."""
    done = []
    try:
        with Reader(store) as reader, Batch(store) as batch:
            for pack in mixed:
                try:
                    for key in pack.objects:
                        if key in live:
                            batch.add(key, reader.read(key), packed=True)
                except SnapshotDamaged:
                    continue  # what can still be read of it is needed
                done.append(pack)
            batch.finish()
            return batch.stored, done
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        return 0, []  # next time, when there is room


def _remove(paths: list[str]) -> int:
    freed = 0
    for path in paths:
        freed += os.stat(path).st_size
        os.unlink(path)
    return freed


def newest_ns(store: ObjectStore) -> int:
    """When the newest object was written."""
    paths = [pack.path for pack in store.packs()] + [path for _, path in store.loose_files()]
    return max((os.stat(path).st_mtime_ns for path in paths), default=0)
