"""Many and large files in and out, in calls with a context and without, and how much memory that takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from carrel.client import AsyncClient, AsyncSandbox, Client, Sandbox
from carrel.errors import CarrelError, FileMissing, InvalidPath, InvalidRequest

LARGE = 100 * 1024 * 1024
MANY = 2000
BOUND = 48 * 1024 * 1024
COPY = "import shutil; shutil.copyfile('in/large', 'out'); print(len(open('out', 'rb').read()))"
DOUBLE = """
import os
os.mkdir('twice')
for name in os.listdir('many'):
    open('twice/' + name, 'w').write(open('many/' + name).read() * 2)
"""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    block = bytes(range(256)) * 4096
    with path.open("wb") as file:
        for number in range(LARGE // len(block)):
            file.write(number.to_bytes(8, "big") + block[8:])
    return path


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def peak(pid: str | int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@contextmanager
def bounded(data_dir: Path) -> Iterator[None]:
    """Neither this process nor the server may hold much more memory meanwhile."""
    pids = ["self", json.loads((data_dir / "server.json").read_bytes())["pid"]]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = [peak(pid) for pid in pids]
    yield
    grown = [peak(pid) - old for pid, old in zip(pids, before, strict=True)]
    assert max(grown) < BOUND, grown


def test_a_large_file_without_a_context(client: Client, large: Path, tmp_path: Path, data_dir: Path) -> None:
    client.python.run("1")
    with bounded(data_dir):
        done = client.python.run(
            COPY.replace("len(open('out', 'rb').read())", "1"), files={"in/large": large}, into=tmp_path / "got"
        )
    assert (done.exit_code, done.files_produced, done.files) == (0, ["out"], {}), done
    assert digest(tmp_path / "got/out") == digest(large)


def test_a_large_file_in_a_sandbox(box: Sandbox, large: Path, tmp_path: Path, data_dir: Path) -> None:
    box.python.run("1")
    with bounded(data_dir):
        done = box.python.run(COPY, files={"in/large": large}, into=tmp_path / "got", check=True)
    assert (done.stdout, done.files_produced) == (f"{LARGE}\n", ["out"])
    assert digest(tmp_path / "got/out") == digest(large)
    assert digest(large) == hashlib.blake2b(box.files.read("in/large")).hexdigest()


def test_many_files(client: Client, box: Sandbox, tmp_path: Path, data_dir: Path) -> None:
    given = {f"many/{number}": b"%d" % number for number in range(MANY)}
    few = dict(list(given.items())[:300])
    with bounded(data_dir):
        done = client.python.run(DOUBLE, files=given, into=tmp_path / "a")
        ran = box.python.run(DOUBLE, files=few, into=tmp_path / "b")
    assert (len(done.files_produced), len(ran.files_produced)) == (MANY, 300)
    assert not done.files_truncated and not ran.files_truncated
    for place, count in (("a", MANY), ("b", 300)):
        found = {path.name: path.read_text() for path in (tmp_path / place / "twice").iterdir()}
        assert found == {str(number): f"{number}{number}" for number in range(count)}


def test_what_is_small_comes_with_the_result(client: Client) -> None:
    given = {"large": b"x" * 600_000}
    done = client.python.run("open('a', 'w').write('1'); open('b', 'wb').truncate(9 << 20)", files=given)
    assert sorted(done.files_produced) == ["a", "b"] and done.files == {"a": "MQ=="}


def test_files_at_once(box: Sandbox, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho ran\n")
    script.chmod(0o755)
    written = box.files.write_many({"bin/script": script, "empty": b"", "not\udcffutf8": b"x", "a/b/c": b"deep"})
    assert (written.files, written.bytes) == (4, script.stat().st_size + 5)
    assert box.commands.run("bin/script").stdout == "ran\n"
    saved = box.files.download_many(["a/b/c", "empty", "not\udcffutf8"], tmp_path / "got")
    assert [path.read_bytes() for path in saved] == [b"deep", b"", b"x"]
    with pytest.raises(FileMissing):
        box.files.download_many(["absent", "a/b/c"], tmp_path / "more")
    assert (tmp_path / "more/a/b/c").read_bytes() == b"deep", "the others are there"
    assert box.files.write_many({}).files == 0


def test_what_cannot_be(client: Client, box: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        client.python.run("1", files={"a": tmp_path / "absent"})
    with pytest.raises(CarrelError):
        box.files.write_many({"good": b"1", "../bad": b"2"})
    with pytest.raises(InvalidPath):
        client.python.run("1", files={"a": b"x" * 600_000, "../../bad": b""})
    with pytest.raises(InvalidRequest):
        client.python.run("", files={"a": b"x" * 600_000})
    assert client.python.run("print(1)").output == "1\n"


async def test_asynchronously(async_client: AsyncClient, async_box: AsyncSandbox, tmp_path: Path) -> None:
    given = {"a": b"x" * 600_000, "b": b"1"}
    code = "import os; os.rename('a', 'c')"
    await async_client.python.run(code, files=given, into=tmp_path / "a")
    await async_box.python.run(code, files=given, into=tmp_path / "b")
    assert [len((tmp_path / place / "c").read_bytes()) for place in "ab"] == [600_000, 600_000]
