from __future__ import annotations

import os
import random
import socket
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import ArchiveUnavailable, CarrelError, InvalidRequest, NotFound, PlatformError
from carrel.workspaces.remote import Remote, check_remote_name
from s3 import S3Server

MB = 1 << 20


@pytest.fixture
def remote(where: str) -> Remote:
    return Remote.open(where)


@pytest.fixture
def directory(tmp_path: Path) -> Remote:
    return Remote.open(str(tmp_path / "remote"))


def test_bytes_are_kept_replaced_listed_and_removed(remote: Remote) -> None:
    assert list(remote.list("a")) == []
    assert remote.size("a/b") is None
    remote.put("a/b", b"one")
    remote.put("a/b", b"other")
    remote.put("a/c+d:e=f@g-h_i.j", b"")
    remote.put("ab/c", b"x")
    remote.put("a/d/e/f", b"deep")
    assert remote.get("a/b") == b"other"
    assert remote.get("a/c+d:e=f@g-h_i.j") == b""
    assert remote.size("a/b") == 5
    assert list(remote.list("a")) == ["a/b", "a/c+d:e=f@g-h_i.j", "a/d/e/f"]
    entries = {entry.name: entry for entry in remote.entries("a")}
    assert entries["a/d/e/f"].size == 4
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
    assert remote.size("big") == len(data)
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
    assert remote.size("y") is None
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
        lambda: directory.size(name),
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


@pytest.mark.parametrize(
    "url",
    [
        "", "relative/path", "http://host/x", "s3://", "s3://UPPER", "s3://a", "s3://key:word@bucket/x", "s3://bucket:80/x",
        "s3://bucket/../x", "s3://bucket/a b", "s3://bucket?endpoint=nowhere", "s3://bucket?endpoint=http://me:word@host",
        "s3://bucket?wrong=1", "s3://bucket?region=a&region=b", "s3://bucket?region=a%0ab", "s3://bucket?virtual_hosted=maybe",
        "s3://bucket?=", "s3://bucket?password", "s3://[bucket", "/with\0nul", "s3://bucket#word",
    ],
)  # fmt: skip
def test_a_bad_url_is_refused_without_quoting_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with pytest.raises(InvalidRequest) as caught:
        Remote.open(url)
    assert caught.value.hint is not None
    assert "word" not in str(caught.value)
    assert "upper" not in str(caught.value).lower()


@given(st.text(max_size=60))
def test_any_url_opens_or_is_refused(text: str) -> None:
    try:
        Remote.open("s3://" + text)
    except InvalidRequest:
        pass


def test_without_keys_nothing_is_asked_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    with pytest.raises(InvalidRequest, match="no keys"):
        Remote.open("s3://bucket/prefix")


def test_a_description_is_for_people(s3: S3Server, monkeypatch: pytest.MonkeyPatch, directory: Remote) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "word-of-mine")
    remote = Remote.open("s3://bucket/some/prefix?endpoint=https://host:9000&region=eu-1&virtual_hosted=true")
    assert remote.description == "s3://bucket/some/prefix at https://host:9000"
    assert Remote.open("s3://bucket").description == "s3://bucket"
    assert directory.description.startswith("/")


def test_a_directory_is_its_owners_alone(directory: Remote, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    source.chmod(0o444)
    old = os.umask(0)
    try:
        directory.put("a/b/c", b"")
        directory.put_file("a/d/e", str(source))
    finally:
        os.umask(old)
    for path in [tmp_path / "remote", *(tmp_path / "remote").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_directory_shares_a_file_of_its_file_system_and_copies_others(directory: Remote, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"content")
    directory.put_file("a", str(source))
    assert source.stat().st_ino == (tmp_path / "remote" / "a").stat().st_ino
    directory.put_file("b", "/proc/self/status")
    assert directory.get("b").startswith(b"Name:")
    directory.put_file("b", str(source))  # replaces
    assert directory.get("b") == b"content"


def test_a_directory_forgets_what_a_killed_process_left(directory: Remote, tmp_path: Path) -> None:
    directory.put("a", b"")
    aside = tmp_path / "remote" / ".aside"
    assert list(aside.iterdir()) == []
    (aside / "old").write_bytes(b"half")
    os.utime(aside / "old", (0, 0))
    (aside / "young").write_bytes(b"half")
    directory.put("a", b"")
    assert [path.name for path in aside.iterdir()] == ["young"]
    (aside / "young").unlink()
    directory.delete(["a"])
    assert list(directory.list("a")) == []


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remote = Remote.open(str(tmp_path / "file"))
    for ask in (
        lambda: remote.put("a", b""),
        lambda: remote.get("a"),
        lambda: remote.put_file("a", "/proc/self/status"),
    ):
        with pytest.raises(ArchiveUnavailable) as caught:
            ask()
        assert caught.value.hint


def test_writers_and_removers_of_one_folder_do_not_trip_each_other(directory: Remote) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(60):
                directory.put(f"shared/f{number}", b"x")
                assert directory.get(f"shared/f{number}") == b"x"
                directory.delete([f"shared/f{number}"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def _asks(remote: Remote, source: Path) -> list[CarrelError]:
    found = []
    for ask in (
        lambda: remote.put("a", b"x"),
        lambda: remote.put_file("a", str(source)),
        lambda: remote.get("a"),
        lambda: remote.get_range("a", 0, 1),
        lambda: remote.size("a"),
        lambda: list(remote.list("a")),
        lambda: remote.delete(["a"]),
    ):
        with pytest.raises(CarrelError) as caught:
            ask()
        found.append(caught.value)
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(6 * MB))
    return path


def test_a_bucket_that_is_not_there_is_named(s3: S3Server, monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    remote = Remote.open(s3.url("x", bucket="missing-bucket"))
    for ask in (
        lambda: remote.put("a", b"x"),
        lambda: remote.put_file("a", str(source)),
        lambda: list(remote.list("a")),
    ):
        with pytest.raises(ArchiveUnavailable, match="missing-bucket") as caught:
            ask()
        assert "make the bucket" in str(caught.value.hint)


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_keys_are_refused_and_not_shown(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, source: Path, wrong: str
) -> None:
    for name, value in (s3.environment | {wrong: "not-the-right-one"}).items():
        monkeypatch.setenv(name, value)
    for error in _asks(Remote.open(s3.url("x")), source):
        assert isinstance(error, ArchiveUnavailable)
        assert "refuses" in error.detail
        for value in ("not-the-right-one", *s3.environment.values()):
            assert value not in str(error.problem())


def test_a_server_that_is_down_and_comes_back(s3: S3Server, monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    remote = Remote.open(s3.url("down"))
    remote.put("a", b"before")
    s3.stop()
    try:
        assert {type(error) for error in _asks(remote, source)} == {ArchiveUnavailable}
    finally:
        s3.start()
    assert remote.get("a") == b"before"


def test_a_server_that_hangs_up_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        ended = threading.Event()

        def hang_up() -> None:
            while not ended.is_set():
                server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            remote = Remote.open(f"s3://bucket/x?endpoint=http://127.0.0.1:{server.getsockname()[1]}")
            with pytest.raises(ArchiveUnavailable, match="cannot be reached"):
                remote.get("a")
        finally:
            ended.set()
            socket.create_connection(server.getsockname()).close()
            thread.join()
