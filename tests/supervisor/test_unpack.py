"""The program of the init container of a pod."""

from __future__ import annotations

import os
import socket
import time

import pytest

from carrel.supervisor import unpack


@pytest.fixture
def source(tmp_path):
    bundle = tmp_path / "bundle"
    (bundle / "lib").mkdir(parents=True)
    (bundle / "lib/one.so").write_bytes(b"one")
    (bundle / "lib/link").symlink_to("one.so")
    (bundle / "lib/folder").symlink_to("../lib")
    (tmp_path / "secret").write_text("slot")
    (tmp_path / "target").mkdir()
    return tmp_path


def words(place, probe="", own=""):
    return ["unpack", *(f"{place}/{name}" for name in ("bundle", "target", "secret", "copy")), probe, own]


def test_the_bundle_and_the_credentials_are_copied(source):
    unpack.main(words(source))
    target = source / "target"
    assert (target / "lib/one.so").read_bytes() == b"one"
    assert os.readlink(target / "lib/link") == "one.so" and os.readlink(target / "lib/folder") == "../lib"
    assert (target / "lib").stat().st_mode & 0o777 == (target / "lib/one.so").stat().st_mode & 0o777 == 0o755
    assert (source / "copy").read_text() == "slot" and (source / "copy").stat().st_mode & 0o777 == 0o600


def test_a_pod_makes_a_directory_of_its_own(source):
    unpack.main(words(source, own=str(source / "own")))
    assert (source / "own").stat().st_mode & 0o777 == 0o700


def test_a_pod_that_reaches_what_it_must_not_is_refused(source, monkeypatch):
    monkeypatch.setattr(unpack, "PATIENCE_S", 0.1)
    refused = pytest.raises(SystemExit, match="does not enforce network policies")
    with socket.create_server(("127.0.0.1", 0)) as server, refused:
        unpack.main(words(source, f"127.0.0.1:{server.getsockname()[1]}"))


def test_policies_may_take_a_moment(source, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(time, "sleep", lambda _: server.close())
        unpack.main(words(source, f"127.0.0.1:{port}"))


def test_a_disk_that_is_full_is_named(source, monkeypatch):
    (source / "secret").unlink()
    with pytest.raises(SystemExit, match=r"the pod cannot be prepared: .*secret"):
        unpack.main(words(source))
