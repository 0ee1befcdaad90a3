"""What a sync between a workspace and its filespace has to do, decided per path. Pure: no file, no store, no clock.

Three states of a path decide: what both sides last had in common (the base), what the workspace has, what the
filespace has. A side that differs from the base has changed. Where one side changed, the other follows. Where both did:

- push: the workspace's write is stamped now, so it is the last and wins;
- pull: the filespace's write has a time and the workspace's has none yet, so the filespace's wins;
- both: a pull, then a push of what is left;
- a deletion on one side never wins over a write on the other.

Without a base (it is lost, or the workspace is new to the filespace) equal files are taken as common, the filespace
wins over a file that differs, and a file that only the workspace has is new. Nothing is deleted then.
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
"""Names that stay out of a filespace, with all beneath them, wherever they are in a workspace."""

_FORMAT = 1
_DIGEST = 32
_BIGGEST = 1 << 30


def synced(path: str) -> bool:
    """Whether a path may be that of a file in a filespace."""
    return NOT_SYNCED.isdisjoint(path.split("/")) and "\0" not in path


class Content(NamedTuple):
    """What of a file is synced: its bytes, by their hash, and its permissions."""

    hash: str
    mode: int


class Facts(NamedTuple):
    """What the kernel says of a file: as long as it says the same, the file need not be read again."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


UNSURE = Facts(0, 0, 0, 0)
"""The facts of a file that may change without them showing it."""


class LocalFile(NamedTuple):
    """A file of the workspace. `known` are the facts that will do the next time, `facts` what they are now."""

    content: Content
    facts: Facts
    known: Facts
    allocated: int = 0


class Row(NamedTuple):
    """What both sides had in common; a row that is not `placed` is known of the filespace and has no file here."""

    version: int
    content: Content
    size: int
    facts: Facts
    placed: bool


class Pending(NamedTuple):
    """What a sync was about to write; one that was killed may have done it.

    Into the workspace the entry of that `version`; into the filespace with the batch of that number.
    """

    content: Content
    version: int = 0
    batch: int = 0


class Entry(Protocol):
    """An entry of the filespace."""

    @property
    def path(self) -> str:
        """Relative to the workspace."""
        ...

    @property
    def hash(self) -> str | None:
        """Names the content; of a tombstone what was deleted."""
        ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    @property
    def mode(self) -> int:
        """Permissions."""
        ...

    @property
    def deleted(self) -> bool:
        """Whether it is a tombstone."""
        ...

    @property
    def version(self) -> int:
        """Its place among the changes of the filespace."""
        ...


@dataclass(slots=True)
class Base:
    """What a workspace and its filespace last had in common, as one workspace remembers it.

    `cursor` is the version up to which the filespace's changes are in the workspace, `merged` whether a pull has ever
    ended, `synced_at` when (by the database's clock). A push leaves a mark in the filespace, under the workspace's own
    `name`, that tells its `token` and how many batches are stored.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    pending: dict[str, Pending] = field(default_factory=dict)
    cursor: int = 0
    merged: bool = False
    synced_at: float = 0.0
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    token: str = ""

    @property
    def mark(self) -> str:
        """The path of the mark; no file can have it."""
        return f"\0{self.name}"

    def pack(self) -> bytes:
        """For a file or an archive, with a check sum: a torn one must not be believed."""
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
        """What `pack` made; an empty one, which is a lost one, when it is damaged or of another format."""
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
                path: Row(version, Content(key.hex(), mode), size, Facts._make(facts), placed)
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
class Plan:
    """What has to be done, and what is known already.

    `rows` are the base as it is when nothing of the rest is done.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    writes: list[Entry] = field(default_factory=list)
    removals: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    tombstones: dict[str, int] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)


class _Placeless(NamedTuple):
    """An entry the filespace had at the last sync, or no longer has."""

    path: str
    hash: str | None
    size: int
    mode: int
    deleted: bool
    version: int


def plan(
    base: Base,
    local: Mapping[str, LocalFile],
    remote: Iterable[Entry],
    direction: SyncDirection,
    *,
    complete: bool = False,
) -> Plan:
    """Decide. `remote` is what changed after the base's cursor, or with `complete` everything the filespace has."""
    found = {entry.path: entry for entry in remote}
    mark = found.get(base.mark)
    arrived = mark.size if mark is not None and mark.hash == base.token else 0
    entries = {path: entry for path, entry in found.items() if synced(path)}
    made = Plan()
    rows, pending = base.rows, base.pending
    for path, here in local.items():
        row = rows.get(path)
        # The one case of every file of a workspace where nothing changed.
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
    entry: Entry | None,
    direction: SyncDirection,
    complete: bool,
    made: Plan,
) -> None:
    row = base.rows.get(path)
    if entry is None and row is not None:
        if complete:
            entry = _Placeless(path, None, 0, 0, True, row.version)
        elif not row.placed:
            entry = _Placeless(path, row.content.hash, row.size, row.content.mode, False, row.version)
    there = content_of(entry)
    mine = None if here is None else here.content
    if row is not None and not row.placed:
        made.rows[path] = row
        row = None
    pending = base.pending.get(path)
    if pending is not None and pending.batch:
        if pending.batch <= arrived:
            same = entry is not None and there == pending.content
            row = Row(entry.version if same and entry is not None else 0, pending.content, 0, UNSURE, True)
    elif pending is not None and here is not None:
        if mine == pending.content:
            row = Row(pending.version, pending.content, here.facts.size, here.known, True)
        elif entry is not None and there == pending.content and (row is None or mine != row.content):
            row = Row(entry.version, pending.content, entry.size, UNSURE, True)  # changed since it was written here
    if mine is not None and entry is not None and _deleted(entry, mine, base):
        # This base, or this picture of the workspace, is older than that.
        row = Row(0, mine, 0, UNSURE, True)
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
        _settle(path, base, mine, entry, direction, made)


def content_of(entry: Entry | None) -> Content | None:
    """The content of an entry; None for a tombstone."""
    if entry is None or entry.deleted or entry.hash is None:
        return None
    return Content(entry.hash, entry.mode)


def _deleted(entry: Entry, mine: Content, base: Base) -> bool:
    """Whether what is new of the filespace is that the very content was deleted which the workspace has."""
    return base.merged and entry.deleted and entry.version > base.cursor and (entry.hash, entry.mode) == mine


def _adopt(path: str, here: LocalFile | None, entry: Entry | None, row: Row | None, made: Plan) -> None:
    """Both sides are the same."""
    made.rows.pop(path, None)
    version = entry.version if entry is not None else 0 if row is None else row.version
    if here is not None:
        made.rows[path] = Row(version, here.content, here.facts.size, here.known, True)


def _follow(path: str, entry: Entry | None, direction: SyncDirection, made: Plan) -> None:
    """Only the filespace changed."""
    if direction is SyncDirection.PUSH or entry is None:
        return
    if content_of(entry) is None:
        made.removals.append(path)
    else:
        made.writes.append(entry)


def _lead(path: str, mine: Content | None, row: Row | None, direction: SyncDirection, made: Plan) -> None:
    """Only the workspace changed."""
    if direction is SyncDirection.PULL:
        return
    if mine is not None:
        made.uploads.append(path)
    elif row is not None:
        made.tombstones[path] = row.version


def _settle(
    path: str,
    base: Base,
    mine: Content | None,
    entry: Entry | None,
    direction: SyncDirection,
    made: Plan,
) -> None:
    """Both changed, and not to the same."""
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
