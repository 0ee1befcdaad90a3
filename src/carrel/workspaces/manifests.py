"""What the archive writes down: which bundles hold a snapshot, which it is about to use, which it is about to remove.

Also decides which bundles are better written anew. Pure: nothing is read or written here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from carrel.errors import SnapshotDamaged
from carrel.workspaces.volumes.objects import Spot, digest

MOST_BUNDLES = 32
"""A snapshot in more small bundles than this is gathered into fewer, so that a restore needs few downloads."""

SMALL = 32 << 20
"""A bundle of this size is worth a download of its own."""

_ENOUGH_BUNDLES = 16
_BUNDLE = re.compile(r"bundles/([A-Za-z0-9_][A-Za-z0-9._+:=@-]{0,199})/([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A pack of objects in the archive. Of `stored` bytes of objects in it, the snapshot needs `live`."""

    name: str
    size: int
    digest: str
    stored: int
    live: int


@dataclass(frozen=True, slots=True)
class Attachment:
    """Bytes kept with a snapshot: their object and where it lies, so that one request reads them."""

    key: str
    bundle: str
    spot: Spot


@dataclass(frozen=True, slots=True)
class Manifest:
    """One snapshot in the archive. A manifest that can be read is whole: its bundles were there before it."""

    volume: str
    snapshot_id: str
    tree: str
    size: int
    files: int
    created_at: float
    bundles: tuple[Bundle, ...]
    attachment: Attachment | None = None
    version: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class Intent:
    """What somebody is about to need: bundles that are there, and those to come whose names start with `prefix`."""

    prefix: str
    bundles: frozenset[str]
    version: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class _Note:
    bundles: frozenset[str]
    version: Literal[1] = 1


_MANIFEST = TypeAdapter(Manifest)
_INTENT = TypeAdapter(Intent)
_NOTE = TypeAdapter(_Note)


def split_bundle_name(name: str) -> tuple[str, str]:
    """The volume and the token in a bundle's name; `ValueError` when it is none."""
    found = _BUNDLE.fullmatch(name)
    if found is None:
        raise ValueError("the name of a bundle is none")
    return found[1], found[2]


def pack_manifest(manifest: Manifest) -> bytes:
    """A line of JSON and a line with its check sum."""
    return _sealed(_MANIFEST.dump_json(manifest))


def unpack_manifest(raw: bytes, what: str) -> Manifest:
    """What `pack_manifest` wrote; `SnapshotDamaged` names `what` when it is damaged."""
    try:
        manifest = _MANIFEST.validate_json(_unsealed(raw))
        bytes.fromhex(manifest.tree)
        for bundle in manifest.bundles:
            split_bundle_name(bundle.name)
    except ValueError:
        raise SnapshotDamaged(
            f"the archive's manifest {what} is damaged",
            hint="restore another snapshot; delete this one to let the archive be tidied",
            object=what,
        ) from None
    return manifest


def pack_intent(intent: Intent) -> bytes:
    """As a manifest is written."""
    return _sealed(_INTENT.dump_json(intent))


def unpack_intent(raw: bytes, what: str) -> Intent:
    """What `pack_intent` wrote; `SnapshotDamaged` names `what` when it is damaged."""
    try:
        return _INTENT.validate_json(_unsealed(raw))
    except ValueError:
        raise SnapshotDamaged(f"the archive's intent {what} is damaged", object=what) from None


def pack_note(names: Iterable[str]) -> bytes:
    """The bundles that somebody is about to remove."""
    return _sealed(_NOTE.dump_json(_Note(frozenset(names))))


def unpack_note(raw: bytes, what: str) -> frozenset[str]:
    """What `pack_note` wrote; `SnapshotDamaged` names `what` when it is damaged."""
    try:
        return _NOTE.validate_json(_unsealed(raw)).bundles
    except ValueError:
        raise SnapshotDamaged(f"the archive's note {what} is damaged", object=what) from None


def _sealed(body: bytes) -> bytes:
    return body + b"\n" + digest(body).hex().encode() + b"\n"


def _unsealed(raw: bytes) -> bytes:
    body, _, check = raw.partition(b"\n")
    if check != digest(body).hex().encode() + b"\n":
        raise ValueError("the check sum is another")
    return body


def better_anew(bundles: Iterable[Bundle]) -> set[str]:
    """The bundles whose needed objects the next snapshot should bring again instead of referring to them.

    Those that are mostly garbage; and, when there are too many small ones, the smallest: so each byte is written anew
    only a few times, however many snapshots there are.
    """
    kept = {bundle.name: bundle for bundle in bundles}
    anew = {name for name, bundle in kept.items() if bundle.live * 2 < bundle.stored}
    small = [bundle for name, bundle in kept.items() if name not in anew and bundle.size < SMALL]
    if len(small) > MOST_BUNDLES:
        small.sort(key=lambda bundle: bundle.size)
        anew |= {bundle.name for bundle in small[: len(small) - _ENOUGH_BUNDLES]}
    return anew
