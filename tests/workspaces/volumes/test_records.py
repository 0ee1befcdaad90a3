"""Records are whole or refused, and a damaged one is remembered."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carrel.errors import AlreadyExists, NotFound, SnapshotDamaged
from carrel.workspaces.volumes import SnapshotFacts
from carrel.workspaces.volumes.records import Records

FACTS = SnapshotFacts(10, 2, 5, 1)


@pytest.fixture
def records(tmp_path: Path) -> Records:
    (tmp_path / "tmp").mkdir()
    made = Records(str(tmp_path), str(tmp_path / "tmp"))
    made.prepare()
    return made


def test_a_record_comes_back_and_is_never_replaced(records: Records) -> None:
    records.publish("one", b"t" * 32, FACTS, None)
    with pytest.raises(AlreadyExists):
        records.publish("one", b"u" * 32, FACTS, "x")
    assert records.read("one") == (b"t" * 32, FACTS)
    assert records.ids() == ["one"]
    assert records.exists("one")
    records.remove("one")
    records.remove("one")
    assert not records.exists("one")
    with pytest.raises(NotFound):
        records.read("one")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans())
def test_any_damage_is_seen(records: Records, tmp_path: Path, at: int, bit: int, cut: bool) -> None:
    records.publish("one", b"t" * 32, FACTS, None)
    path = tmp_path / "snapshots" / "one"
    raw = bytearray(path.read_bytes())
    at %= len(raw) - 1  # the last line end says nothing
    if cut:
        del raw[at:]
    else:
        raw[at] ^= 1 << bit
    path.write_bytes(raw)
    try:
        with pytest.raises(SnapshotDamaged, match="one"):
            records.read("one")
    finally:
        records.remove("one")


def test_when_damage_was_noticed_stays_until_the_record_goes(records: Records, tmp_path: Path) -> None:
    records.publish("one", b"t" * 32, FACTS, None)
    assert records.damaged_since("one", 12_000_000_000) == 12_000_000_000
    assert records.damaged_since("one", 99_000_000_000) == 12_000_000_000
    records.remove("one")
    assert os.listdir(tmp_path / "damaged") == []
