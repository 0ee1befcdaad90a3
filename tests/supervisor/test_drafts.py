from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from carrel.supervisor.drafts import Draft
from carrel.supervisor.paths import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Place(os.open(tmp_path, os.O_PATH | os.O_DIRECTORY), b"name", b"name", "path") as made:
        yield made


def test_nothing_of_the_name_shows_before_it_is_published(tmp_path: Path, place: Place) -> None:
    draft = Draft(place, 0o640)
    draft.write(b"half")
    assert not (tmp_path / "name").exists()
    draft.write(memoryview(b" whole"))
    entry = draft.publish(exclusive=False)
    draft.discard()
    assert (tmp_path / "name").read_bytes() == b"half whole"
    assert entry.status.st_mode & 0o7777 == 0o640
    assert os.listdir(tmp_path) == ["name"]


def test_a_discarded_draft_leaves_nothing(tmp_path: Path, place: Place) -> None:
    draft = Draft(place, 0o600)
    draft.write(b"x")
    assert len(os.listdir(tmp_path)) == 1
    draft.discard()
    assert os.listdir(tmp_path) == []


def test_an_exclusive_draft_loses_to_a_newcomer(tmp_path: Path, place: Place) -> None:
    draft = Draft(place, 0o600)
    (tmp_path / "name").write_text("first")
    with pytest.raises(FileExistsError):
        draft.publish(exclusive=True)
    draft.discard()
    assert (tmp_path / "name").read_text() == "first"
    assert os.listdir(tmp_path) == ["name"]
