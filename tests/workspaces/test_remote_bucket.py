from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.s3 import S3Server

from carrel.errors import ArchiveUnavailable, CarrelError, InvalidRequest
from carrel.workspaces.remote import Remote

MB = 1 << 20


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


def _asks(remote: Remote, source: Path) -> list[CarrelError]:
    found = []
    for ask in (
        lambda: remote.put("a", b"x"),
        lambda: remote.put_file("a", str(source)),
        lambda: remote.get("a"),
        lambda: remote.get_range("a", 0, 1),
        lambda: remote.get_file("a", f"{source}.got"),
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


@pytest.mark.usefixtures("s3_client")
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
