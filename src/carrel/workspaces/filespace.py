"""Plans a sync between a workspace and its filespace, path by path. Pure: no I/O, no clock.

Three states of a path decide: the last common state (the base), the state in the workspace, and that in the filespace.
A side that differs from the base has changed. If one side changed, the other follows. If both changed:

- push: the workspace's write gets the current time, so it is the last and wins;
- pull: the filespace's write has a time and the workspace's has none yet, so the filespace's wins;
- both: a pull, then a push of the rest;
- a deletion on one side never wins over a write on the other.

Without a base (it is lost, or the workspace is new to the filespace) equal files are common, the filespace wins over a
different file, and a file that only the workspace has is new. Nothing is deleted then.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgpack
import zstandard
from blake3 import blake3

from carrel.models import SyncDirection

NOT_SYNCED = frozenset({".venv", ".context.json", ".cache", "node_modules", "__pycache__"})
"""Names that are never synced, with everything below them, anywhere in a workspace."""

_FORMAT = 1
_DIGEST = 32
_BIGGEST = 1 << 30


def synced(path: str) -> bool:
    """Return whether a file with this path is synced."""
    return NOT_SYNCED.isdisjoint(path.split("/")) and "\0" not in path


class Content(NamedTuple):
    """The synced part of a file: the hash of its bytes, and its permissions."""

    hash: str
    mode: int


class FileStat(NamedTuple):
    """The stat values of a file; while they stay the same, the file need not be read again."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


UNSURE = FileStat(0, 0, 0, 0)
"""Facts of a file that may change without a change of its stat values: they match no file."""


class LocalFile(NamedTuple):
    """A file of the workspace. `facts` are its current facts, `known` those to store for the next sync."""

    content: Content
    facts: FileStat
    known: FileStat
    allocated: int = 0


class BaseRow(NamedTuple):
    """The common state of a path. A row that is not `placed` is known from the filespace but has no file here."""

    version: int
    content: Content
    size: int
    facts: FileStat
    placed: bool


class Pending(NamedTuple):
    """Content that a sync was about to write; a killed sync may have written it or not.

    Into the workspace: the entry of that `version`. Into the filespace: with the batch of that number.
    """

    content: Content
    version: int = 0
    batch: int = 0


class SyncEntry(Protocol):
    """An entry of the filespace. A tombstone is `deleted` and has the hash of the deleted content; `version` orders
    all changes.
    """

    @property
    def path(self) -> str: ...  # noqa: D102
    @property
    def hash(self) -> str | None: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def mode(self) -> int: ...  # noqa: D102
    @property
    def deleted(self) -> bool: ...  # noqa: D102
    @property
    def version(self) -> int: ...  # noqa: D102


@dataclass(slots=True)
class Base:
    """The last common state of a workspace and its filespace, as the workspace's server stores it.

    `cursor` is the version up to which the filespace's changes are in the workspace, `merged` whether a pull has ever
    finished, `synced_at` when (by the database's clock). A push leaves a mark in the filespace, under the workspace's
    own `name`, with its `token` and the number of stored batches.
    """

    rows: dict[str, BaseRow] = field(default_factory=dict)
    pending: dict[str, Pending] = field(default_factory=dict)
    cursor: int = 0
    merged: bool = False
    synced_at: float = 0.0
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    token: str = ""

    @property
    def mark(self) -> str:
        """The path of the mark, which no file can have."""
        return f"\0{self.name}"

    def pack(self) -> bytes:
        """Encode, with a check sum that reveals a torn file."""
        rows = [
            (path, row.version, bytes.fromhex(row.content.hash), row.content.mode, row.size, row.facts, row.placed)
            for path, row in self.rows.items()
        ]
        pending = [
            (path, bytes.fromhex(each.content.hash), each.content.mode, each.version, each.batch)
            for path, each in self.pending.items()
        ]
        value = (_FORMAT, self.cursor, self.merged, self.synced_at, self.name, self.token, rows, pending)
        body = zstandard.ZstdCompressor(1).compress(msgpack.packb(value, unicode_errors="surrogateescape"))
        return blake3(body).digest() + body

    @classmethod
    def unpack(cls, raw: bytes) -> Base:
        """Decode; returns an empty base, as if it were lost, when it is damaged or has another format."""
        body = raw[_DIGEST:]
        if not body or blake3(body).digest() != raw[:_DIGEST]:
            return cls()
        data = zstandard.ZstdDecompressor().decompress(body, max_output_size=_BIGGEST)
        value = msgpack.unpackb(data, use_list=False, unicode_errors="surrogateescape")
        if value[0] != _FORMAT:
            return cls()
        _, cursor, merged, synced_at, name, token, rows, pending = value
        return cls(
            {
                path: BaseRow(version, Content(key.hex(), mode), size, FileStat._make(facts), placed)
                for path, version, key, mode, size, facts, placed in rows
            },
            {path: Pending(Content(key.hex(), mode), version, batch) for path, key, mode, version, batch in pending},
            cursor,
            merged,
            synced_at,
            name,
            token,
        )


@dataclass(slots=True)
class SyncPlan:
    """The work of a sync. `rows` is the base to store if none of it is done."""

    rows: dict[str, BaseRow] = field(default_factory=dict)
    writes: list[SyncEntry] = field(default_factory=list)
    removals: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    tombstones: dict[str, int] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)


class _KnownEntry(NamedTuple):
    """An entry that the filespace had at the last sync, made from a row."""

    path: str
    hash: str | None
    size: int
    mode: int
    deleted: bool
    version: int


def plan(
    base: Base,
    local: Mapping[str, LocalFile],
    remote: Iterable[SyncEntry],
    direction: SyncDirection,
    *,
    complete: bool = False,
) -> SyncPlan:
    """Make the plan. `remote` are the entries after the base's cursor, or with `complete` all of the filespace."""
    found = {entry.path: entry for entry in remote}
    mark = found.get(base.mark)
    arrived = mark.size if mark is not None and mark.hash == base.token else 0
    entries = {path: entry for path, entry in found.items() if synced(path)}
    made = SyncPlan()
    rows, pending = base.rows, base.pending
    for path, here in local.items():
        row = rows.get(path)
        # The fast path for every file that did not change.
        if (
            row is not None
            and row.placed
            and row.content == here.content
            and path not in entries
            and path not in pending
            and not complete
        ):
            made.rows[path] = row if row.facts == here.known else row._replace(facts=here.known)
            continue
        _decide(path, base, arrived, here, entries.get(path), direction, complete, made)
    for path in {**rows, **pending, **entries}:
        if path not in local:
            _decide(path, base, arrived, None, entries.get(path), direction, complete, made)
    return made


def _decide(
    path: str,
    base: Base,
    arrived: int,
    here: LocalFile | None,
    entry: SyncEntry | None,
    direction: SyncDirection,
    complete: bool,
    made: SyncPlan,
) -> None:
    row = base.rows.get(path)
    if entry is None and row is not None:
        if complete:
            entry = _KnownEntry(path, None, 0, 0, True, row.version)
        elif not row.placed:
            entry = _KnownEntry(path, row.content.hash, row.size, row.content.mode, False, row.version)
    there = content_of(entry)
    mine = None if here is None else here.content
    if row is not None and not row.placed:
        made.rows[path] = row
        row = None
    pending = base.pending.get(path)
    if pending is not None and pending.batch:
        if pending.batch <= arrived:
            same = entry is not None and there == pending.content
            row = BaseRow(entry.version if same and entry is not None else 0, pending.content, 0, UNSURE, True)
    elif pending is not None and here is not None:
        if mine == pending.content:
            row = BaseRow(pending.version, pending.content, here.facts.size, here.known, True)
        elif entry is not None and there == pending.content and (row is None or mine != row.content):
            row = BaseRow(entry.version, pending.content, entry.size, UNSURE, True)  # changed since it was written here
    if mine is not None and entry is not None and _deleted(entry, mine, base):
        # The deletion is newer than this base, or than this snapshot of the workspace.
        row = BaseRow(0, mine, 0, UNSURE, True)
    common = None if row is None else row.content
    if row is not None:
        made.rows[path] = row
    if entry is None:
        there = common
    elif there == common and row is not None:
        made.rows[path] = row = row._replace(version=entry.version)
    if mine == there:
        _adopt(path, here, entry, row, made)
    elif mine == common:
        _follow(path, entry, direction, made)
    elif there == common:
        _lead(path, mine, row, direction, made)
    else:
        _resolve(path, base, mine, entry, direction, made)


def content_of(entry: SyncEntry | None) -> Content | None:
    """Return the content of an entry; None for a tombstone."""
    if entry is None or entry.deleted or entry.hash is None:
        return None
    return Content(entry.hash, entry.mode)


def _deleted(entry: SyncEntry, mine: Content, base: Base) -> bool:
    """Return whether the entry is a new tombstone of exactly the content that the workspace has."""
    return base.merged and entry.deleted and entry.version > base.cursor and (entry.hash, entry.mode) == mine


def _adopt(path: str, here: LocalFile | None, entry: SyncEntry | None, row: BaseRow | None, made: SyncPlan) -> None:
    """Plan for equal sides: store the common state."""
    made.rows.pop(path, None)
    version = entry.version if entry is not None else 0 if row is None else row.version
    if here is not None:
        made.rows[path] = BaseRow(version, here.content, here.facts.size, here.known, True)


def _follow(path: str, entry: SyncEntry | None, direction: SyncDirection, made: SyncPlan) -> None:
    """Plan for a change in the filespace only."""
    if direction is SyncDirection.PUSH or entry is None:
        return
    if content_of(entry) is None:
        made.removals.append(path)
    else:
        made.writes.append(entry)


def _lead(path: str, mine: Content | None, row: BaseRow | None, direction: SyncDirection, made: SyncPlan) -> None:
    """Plan for a change in the workspace only."""
    if direction is SyncDirection.PULL:
        return
    if mine is not None:
        made.uploads.append(path)
    elif row is not None:
        made.tombstones[path] = row.version


def _resolve(
    path: str,
    base: Base,
    mine: Content | None,
    entry: SyncEntry | None,
    direction: SyncDirection,
    made: SyncPlan,
) -> None:
    """Plan for different changes on both sides."""
    there = content_of(entry)
    if there is None:  # a write beats a deletion
        if direction is not SyncDirection.PUSH:
            made.rows.pop(path, None)
        if direction is not SyncDirection.PULL:
            made.uploads.append(path)
    elif mine is None or direction is not SyncDirection.PUSH:
        if direction is not SyncDirection.PUSH and entry is not None:
            made.writes.append(entry)
    elif base.merged:
        made.uploads.append(path)
    made.conflicts.append(path)
