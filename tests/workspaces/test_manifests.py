from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import SnapshotDamaged
from carrel.workspaces.manifests import (
    MOST_BUNDLES,
    SMALL,
    Bundle,
    Intent,
    Manifest,
    Note,
    StoredAttachment,
    pack,
    split_bundle_name,
    unpack,
    worth_rewriting,
)
from carrel.workspaces.volumes.objects import digest

NUMBERS = st.integers(0, 2**48)
TOKENS = st.text("0123456789abcdef", min_size=32, max_size=32)
NAMES = st.builds(
    "bundles/{}/{}".format, st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._+:=@-]{0,20}", fullmatch=True), TOKENS
)
BUNDLES = st.builds(Bundle, NAMES, NUMBERS, TOKENS, NUMBERS, NUMBERS)
SPOTS = st.tuples(NUMBERS, NUMBERS, st.integers(0, 1), NUMBERS)
MANIFESTS = st.builds(
    Manifest,
    volume=st.text(max_size=20),
    snapshot_id=st.text(max_size=20),
    tree=st.binary(max_size=32).map(bytes.hex),
    size=NUMBERS,
    files=st.integers(-1, 2**40),
    created_at=st.floats(0, 2**40),
    bundles=st.lists(BUNDLES, max_size=5).map(tuple),
    attachment=st.none() | st.builds(StoredAttachment, TOKENS, NAMES, SPOTS),
    version=st.just(1),
)
INTENTS = st.builds(Intent, NAMES, st.frozensets(NAMES, max_size=5), st.just(1))


@given(MANIFESTS)
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    assert unpack(Manifest, pack(manifest), "m") == manifest


@given(INTENTS, st.frozensets(NAMES, max_size=5))
def test_intents_and_notes_come_back_as_they_were(intent: Intent, names: frozenset[str]) -> None:
    assert unpack(Intent, pack(intent), "i") == intent
    assert unpack(Note, pack(Note(names)), "n").bundles == names


@given(MANIFESTS, st.data())
def test_any_damage_is_named(manifest: Manifest, data: st.DataObject) -> None:
    raw = bytearray(pack(manifest))
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw = raw[:at]
    else:
        raw[at] ^= data.draw(st.integers(1, 255))
    for kind in (Manifest, Intent, Note):
        with pytest.raises(SnapshotDamaged, match="this one"):
            unpack(kind, bytes(raw), "this one")


@given(st.binary(max_size=80))
def test_any_bytes_are_refused(raw: bytes) -> None:
    for kind in (Manifest, Intent, Note):
        with pytest.raises(SnapshotDamaged):
            unpack(kind, raw, "x")


@pytest.mark.parametrize(
    "name", ["", "bundles/v/x", "bundles/../" + "0" * 32, "bundles/a/b/" + "0" * 32, "x/v/" + "0" * 32]
)
def test_a_bundle_is_named_as_a_bundle(name: str) -> None:
    with pytest.raises(ValueError, match="not valid"):
        split_bundle_name(name)
    manifest = Manifest("v", "s", "", 0, 0, 0.0, (Bundle(name, 0, "", 0, 0),))
    with pytest.raises(SnapshotDamaged):
        unpack(Manifest, pack(manifest), "m")


def test_another_version_is_refused() -> None:
    body, _, _ = pack(Manifest("v", "s", "", 0, 0, 0.0, ())).partition(b"\n")
    for version, right in ((b"1", True), (b"2", False)):
        changed = body.replace(b'"version":1', b'"version":' + version)
        raw = changed + b"\n" + digest(changed).hex().encode() + b"\n"
        if right:
            assert unpack(Manifest, raw, "m").volume == "v"
            continue
        with pytest.raises(SnapshotDamaged):
            unpack(Manifest, raw, "m")


SIZES = st.one_of(st.integers(0, 1000), st.integers(SMALL - 60, SMALL * 2))


@given(st.lists(st.tuples(SIZES, SIZES), max_size=80))
def test_few_small_bundles_without_much_garbage_are_kept(sizes: list[tuple[int, int]]) -> None:
    bundles = [Bundle(f"b{at}", max(pair) + 50, "", max(pair), min(pair)) for at, pair in enumerate(sizes)]
    anew = worth_rewriting(bundles)
    assert anew <= {bundle.name for bundle in bundles}
    sound = [bundle for bundle in bundles if bundle.live * 2 >= bundle.stored]
    small = [bundle for bundle in sound if bundle.size < SMALL]
    kept = [bundle for bundle in bundles if bundle.name not in anew]
    assert all(bundle in sound for bundle in kept)
    assert sum(bundle.size < SMALL for bundle in kept) <= MOST_BUNDLES
    if len(small) <= MOST_BUNDLES:
        assert kept == sound
    else:
        merged = [bundle for bundle in sound if bundle.name in anew]
        assert all(bundle.size < SMALL for bundle in merged)
        assert max(bundle.size for bundle in merged) <= min(bundle.size for bundle in small if bundle in kept)


def test_a_workspace_of_many_full_bundles_is_not_written_anew() -> None:
    assert worth_rewriting(Bundle(f"b{at}", 2 * SMALL, "", 2 * SMALL, 2 * SMALL) for at in range(500)) == set()
