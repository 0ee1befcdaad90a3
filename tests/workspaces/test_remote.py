from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.s3 import S3Server

from carrel.errors import InvalidRequest, NotFound, PlatformError
from carrel.workspaces.remote import Remote, check_remote_name

MB = 1 << 20


@pytest.fixture
def remote(where: str) -> Remote:
    return Remote.open(where)


@pytest.fixture
def directory(tmp_path: Path) -> Remote:
    return Remote.open(str(tmp_path / "remote"))


def test_bytes_are_kept_replaced_listed_and_removed(remote: Remote) -> None:
    assert list(remote.list("a")) == []
    remote.put("a/b", b"one")
    remote.put("a/b", b"other")
    remote.put("a/c+d:e=f@g-h_i.j", b"")
    remote.put("ab/c", b"x")
    remote.put("a/d/e/f", b"deep")
    assert remote.get("a/b") == b"other"
    assert remote.get("a/c+d:e=f@g-h_i.j") == b""
    assert list(remote.list("a")) == ["a/b", "a/c+d:e=f@g-h_i.j", "a/d/e/f"]
    entries = {entry.name: entry for entry in remote.entries("a")}
    assert (entries["a/b"].size, entries["a/d/e/f"].size) == (5, 4)
    assert abs(entries["a/b"].modified - entries["a/d/e/f"].modified) < 60
    remote.delete(["a/b", "a/never", "a/d/e/f"])
    remote.delete([])
    assert list(remote.list("a")) == ["a/c+d:e=f@g-h_i.j"]
    for ask in (remote.get, lambda name: remote.get_range(name, 0, 1)):
        with pytest.raises(NotFound):
            ask("a/b")


def test_files_travel_in_pieces(remote: Remote, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(12 * MB + 17)
    source = tmp_path / "source"
    source.write_bytes(data)
    remote.put_file("big", str(source))
    target = tmp_path / "target"
    remote.get_file("big", str(target))
    assert target.read_bytes() == data
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert remote.get_range("big", 5 * MB - 3, 10) == data[5 * MB - 3 : 5 * MB + 7]
    assert remote.get_range("big", len(data) - 4, 100) == data[-4:]
    assert remote.get_range("big", len(data) + 4, 100) == b""
    assert remote.get_range("big", 3, 0) == b""
    source.unlink()
    source.write_bytes(b"")
    remote.put_file("big", str(source))
    assert remote.get("big") == b""
    remote.get_file("big", str(tmp_path / "empty"))
    assert (tmp_path / "empty").read_bytes() == b""


def test_a_file_is_new_or_nothing(remote: Remote, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(NotFound):
        remote.get_file("never", str(target))
    assert not target.exists()
    target.write_text("mine")
    remote.put("x", b"theirs")
    with pytest.raises(PlatformError):
        remote.get_file("x", str(target))
    assert target.read_text() == "mine"
    with pytest.raises(PlatformError):
        remote.put_file("y", str(tmp_path / "missing"))
    with pytest.raises(NotFound):
        remote.get("y")
    with pytest.raises(PlatformError):
        remote.get_file("x", "/dev/full/nowhere")


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "../a", "a/../b", "a//b", ".", "a/.aside/b", "a\nb", "a\0", "é", "a" * 900]
)
def test_a_name_that_means_another_place_is_refused(directory: Remote, tmp_path: Path, name: str) -> None:
    for ask in (
        lambda: directory.put(name, b""),
        lambda: directory.put_file(name, "/dev/null"),
        lambda: directory.get(name),
        lambda: directory.get_file(name, str(tmp_path / "x")),
        lambda: directory.get_range(name, 0, 1),
        lambda: list(directory.list(name)),
        lambda: directory.delete([name]),
    ):
        with pytest.raises(InvalidRequest):
            ask()


@given(st.text(st.sampled_from("aZ0._-+/:=@ ~%\n\0é"), max_size=20))
def test_names_that_pass_stay_below_their_place(name: str) -> None:
    try:
        check_remote_name(name)
    except InvalidRequest:
        return
    assert os.path.normpath(os.path.join("/top", name)) == f"/top/{name}"
    assert not any(part.startswith(".") for part in name.split("/"))


def test_a_description_is_for_people(s3: S3Server, monkeypatch: pytest.MonkeyPatch, directory: Remote) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "word-of-mine")
    remote = Remote.open("s3://bucket/some/prefix?endpoint=https://host:9000&region=eu-1&virtual_hosted=true")
    assert remote.description == "s3://bucket/some/prefix at https://host:9000"
    assert Remote.open("s3://bucket").description == "s3://bucket"
    assert directory.description.startswith("/")
