from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.servers import ROOT, as_user, readable

from carrel.client import local_server, locate
from carrel.client.locate import is_loopback, local_servers
from carrel.errors import CarrelError, InvalidRequest, ServerUnreachable


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CARREL_URL", "CARREL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CARREL_DATA_DIR", str(tmp_path))


def leave(directory: Path, url: str = "http://127.0.0.1:7171") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "server.json").write_text(json.dumps({"url": url, "pid": 1}))
    (directory / "token").write_text("carrel_root\n")
    (directory / "agent-token").write_text("carrel_local\n")


def test_the_local_server_needs_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path)
    assert (locate().url, locate().token) == ("http://127.0.0.1:7171", "carrel_local")
    monkeypatch.delenv("CARREL_DATA_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    leave(tmp_path / "xdg/carrel", "http://127.0.0.1:7272")
    assert locate().url == "http://127.0.0.1:7272"


def test_environment_beats_files_and_arguments_beat_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path)
    monkeypatch.setenv("CARREL_URL", "https://far.example/")
    assert (locate().url, locate().token) == ("https://far.example", None)
    monkeypatch.setenv("CARREL_TOKEN", "carrel_far")
    assert locate().token == "carrel_far"
    assert locate("http://localhost:1", "carrel_given").token == "carrel_given"


def test_the_local_token_goes_to_the_local_server_only(tmp_path: Path) -> None:
    leave(tmp_path)
    assert locate("http://127.0.0.1:7171/").token == "carrel_local"
    assert locate("http://127.0.0.1:7172").token is None
    assert "carrel_local" not in repr(locate())


def test_the_server_of_here_is_found_beside_the_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, of_here = tmp_path / "data", tmp_path / "data-here"
    monkeypatch.setenv("CARREL_DATA_DIR", str(usual))
    leave(of_here, "http://127.0.0.1:7272")
    assert locate().url == "http://127.0.0.1:7272"
    leave(usual)
    assert (locate().url, len(local_servers())) == ("http://127.0.0.1:7171", 2)
    with (of_here / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so the address of the usual one is from a server that was killed
        assert [each.url for each in local_servers()] == ["http://127.0.0.1:7272"]
        with (usual / "lock").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            assert [each.url for each in local_servers()] == ["http://127.0.0.1:7171", "http://127.0.0.1:7272"]
    assert locate("http://127.0.0.1:7272").token == "carrel_local"


def test_the_administrators_token_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path)
    for url in (None, "http://127.0.0.1:7171"):
        assert locate(url, administrator=True).token == "carrel_root"
        assert not locate(url, administrator=True).local_agent and locate(url).local_agent
    assert locate("http://127.0.0.1:7172", administrator=True).token is None
    with pytest.raises(InvalidRequest, match="administrator"):
        locate(token="carrel_given", administrator=True)
    monkeypatch.setenv("CARREL_TOKEN", "carrel_far")
    assert locate(administrator=True).token == locate().token == "carrel_far" and not locate().local_agent
    monkeypatch.delenv("CARREL_TOKEN")
    (tmp_path / "agent-token").unlink()
    assert locate().token is None, "the administrator's token is never taken in place of the agent's"


@pytest.mark.parametrize("token", ["carrel_x\nsecond", "carrel x", "carrel_ü", "carrel_\x00"])
def test_what_cannot_be_a_token_is_neither_sent_nor_shown(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("CARREL_TOKEN", "good")
    assert locate("http://x").token == "good"
    with pytest.raises(InvalidRequest) as refused:
        locate("http://x", token)
    assert refused.value.field == "token" and refused.value.hint
    assert token not in str(refused.value) and "second" not in str(refused.value)


def test_the_end_of_its_line_is_no_part_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARREL_TOKEN", "carrel_x\r\n")
    assert locate("http://x").token == "carrel_x"
    monkeypatch.setenv("CARREL_TOKEN", " \n")
    assert locate("http://x").token is None


def test_loopback() -> None:
    assert locate("http://[::1]:7070").loopback
    assert locate("http://127.8.8.8").loopback
    assert not locate("http://127.example.org").loopback
    assert not locate("https://carrel.example").loopback
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"url": 5}', "\x00"])
def test_a_broken_file_is_no_server(tmp_path: Path, text: str) -> None:
    (tmp_path / "server.json").write_text(text)
    assert local_server() is None
    with pytest.raises(ServerUnreachable, match="carrel serve"):
        locate()


@pytest.mark.parametrize("url", ["ftp://x", "localhost:7070", "http://", "http://x:port", "http://[", "http://x:99999"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        locate(url)
    assert raised.value.field == "url"


@given(st.text(min_size=1, max_size=60))
def test_any_text_is_an_address_or_an_error(text: str) -> None:
    try:
        assert locate(text, "t").url.startswith(("http://", "https://", "HTTP", "Http"))
    except CarrelError:
        pass


@pytest.mark.skipif(not ROOT, reason="only root has a directory that an ordinary user may not read")
def test_the_directory_of_another_user_is_told_as_such() -> None:
    with tempfile.TemporaryDirectory(prefix="carrel-locate-") as place:
        os.chmod(place, 0o755)
        data = Path(place, "data")
        leave(data)
        data.chmod(0o700)
        environment = {
            "CARREL_DATA_DIR": str(data),
            "PYTHONPATH": readable(Path(place)),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = as_user([os.path.realpath(sys.executable), "-m", "carrel", "ps"])
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 1 and "this user may not read" in done.stderr and "CARREL_TOKEN" in done.stderr
