"""The documents of the archive: the bundles of a snapshot (manifest), those a node is about to use (intent), and those
it is about to remove (note). Also decides which bundles to rewrite. Pure: no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter

from carrel.errors import SnapshotDamaged
from carrel.workspaces.volumes.objects import Spot, digest

MOST_BUNDLES = 32
"""A snapshot in more small bundles than this is rewritten into fewer, so that a restore needs few downloads."""

SMALL = 32 << 20
"""A bundle of this size is worth its own download."""

_ENOUGH_BUNDLES = 16
_BUNDLE = re.compile(r"bundles/([A-Za-z0-9_][A-Za-z0-9._+:=@-]{0,199})/([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A pack of objects in the archive. The snapshot needs `live` of its `stored` bytes of objects."""

    name: str
    size: int
    digest: str
    stored: int
    live: int


@dataclass(frozen=True, slots=True)
class StoredAttachment:
    """Bytes stored with a snapshot: their object and its position, so that one request reads them."""

    key: str
    bundle: str
    spot: Spot


@dataclass(frozen=True, slots=True)
class Manifest:
    """One snapshot in the archive. A readable manifest is complete: its bundles were stored before it."""

    volume: str
    snapshot_id: str
    tree: str
    size: int
    files: int
    created_at: float
    bundles: tuple[Bundle, ...]
    attachment: StoredAttachment | None = None
    version: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class Intent:
    """The bundles that a node is about to need: existing ones, and new ones whose names start with `prefix`."""

    prefix: str
    bundles: frozenset[str]
    version: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class Note:
    """The bundles that a node is about to remove."""

    bundles: frozenset[str]
    version: Literal[1] = 1


D = TypeVar("D", bound=Manifest | Intent | Note)


_adapters: dict[type, TypeAdapter[Any]] = {}


def _adapter(kind: type) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def split_bundle_name(name: str) -> tuple[str, str]:
    """Return the volume and the token in a bundle's name; `ValueError` when the name is not valid."""
    found = _BUNDLE.fullmatch(name)
    if found is None:
        raise ValueError("the name of a bundle is not valid")
    return found[1], found[2]


def pack(value: Manifest | Intent | Note) -> bytes:
    """Encode a document as a line of JSON and a line with its check sum."""
    body: bytes = _adapter(type(value)).dump_json(value)
    return body + b"\n" + digest(body).hex().encode() + b"\n"


def unpack(kind: type[D], raw: bytes, what: str) -> D:
    """Decode a document; `SnapshotDamaged` names `what` when it is damaged."""
    body, _, check = raw.partition(b"\n")
    try:
        if check != digest(body).hex().encode() + b"\n":
            raise ValueError("wrong check sum")
        value: D = _adapter(kind).validate_json(body)
        if isinstance(value, Manifest):
            bytes.fromhex(value.tree)
            for bundle in value.bundles:
                split_bundle_name(bundle.name)
    except ValueError:
        raise SnapshotDamaged(
            f"the archive's {kind.__name__.lower()} {what} is damaged",
            hint="restore another snapshot; delete this one to let the archive be tidied" if kind is Manifest else None,
            object=what,
        ) from None
    return value


def worth_rewriting(bundles: Iterable[Bundle]) -> set[str]:
    """Return the bundles whose needed objects the next snapshot should store again instead of referring to them.

    These are bundles of mostly garbage and, when there are too many small ones, the smallest: so each byte is rewritten
    only a few times, however many snapshots there are.
    """
    kept = {bundle.name: bundle for bundle in bundles}
    anew = {name for name, bundle in kept.items() if bundle.live * 2 < bundle.stored}
    small = [bundle for name, bundle in kept.items() if name not in anew and bundle.size < SMALL]
    if len(small) > MOST_BUNDLES:
        small.sort(key=lambda bundle: bundle.size)
        anew |= {bundle.name for bundle in small[: len(small) - _ENOUGH_BUNDLES]}
    return anew
