from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from carrel.client import AsyncSandbox, Sandbox
from carrel.errors import AlreadyExists, EditMismatch, FileMissing, InvalidPath, InvalidRequest
from carrel.models import FileKind

EVERY_BYTE = bytes(range(256)) * 8


def test_write_and_read(box: Sandbox) -> None:
    info = box.files.write("deep/er/data.bin", EVERY_BYTE, mode=0o750)
    assert (info.size, info.mode, info.kind) == (2048, "750", FileKind.FILE)
    assert box.files.read("deep/er/data.bin") == EVERY_BYTE
    assert box.files.read("deep/er/data.bin", offset=250, length=10) == EVERY_BYTE[250:260]
    box.files.write("text.txt", "grüße\n")
    assert box.files.read_text("text.txt") == "grüße\n"
    with pytest.raises(InvalidRequest, match="not utf-8 text"):
        box.files.read_text("deep/er/data.bin")
    box.files.write("empty", b"")
    assert box.files.read("empty") == b""
    with pytest.raises(AlreadyExists):
        box.files.write("empty", b"x", exclusive=True)
    assert box.files.read("empty") == b""


def test_names_with_any_character(box: Sandbox) -> None:
    for name in ("a b", "per%20cent", "q?a=b&c#d", "ünï", "+plus", "colon:name"):
        box.files.write(name, name)
        assert box.files.read_text(name) == name
        assert box.files.exists(name)


def test_sources(box: Sandbox) -> None:
    def parts() -> Iterator[bytes]:
        yield b"one "
        yield b"two"

    box.files.write("i", parts())
    assert box.files.read("i") == b"one two"
    box.files.write("f", io.BytesIO(EVERY_BYTE))
    assert box.files.read("f") == EVERY_BYTE
    box.files.write("m", memoryview(EVERY_BYTE))
    assert box.files.read("m") == EVERY_BYTE
    with pytest.raises(InvalidRequest, match="not bytes"):
        box.files.write("t", io.StringIO("text"))  # type: ignore[arg-type]


def test_edit_list_stat_move_delete(box: Sandbox) -> None:
    box.files.write("src/a.py", "x = 1\ny = 1\n")
    with pytest.raises(EditMismatch):
        box.files.edit("src/a.py", "1", "2")
    assert box.files.edit("src/a.py", "x = 1", "x = 2").replaced == 1
    assert box.files.edit("src/a.py", " = ", "=", replace_all=True).replaced == 2
    assert box.files.read_text("src/a.py") == "x=2\ny=1\n"
    box.files.mkdir("src/inner/most")
    assert {info.path.rpartition("/")[2] for info in box.files.list("src")} == {"a.py", "inner"}
    assert len(box.files.list("src", recursive=True)) == 3
    assert box.files.list("src", recursive=True, limit=1).truncated
    assert box.files.stat("src/inner").kind is FileKind.DIRECTORY
    box.files.move("src/a.py", "b.py")
    assert box.files.exists("b.py")
    assert not box.files.exists("src/a.py")
    box.files.delete("b.py")
    box.files.delete("src", recursive=True)
    with pytest.raises(FileMissing):
        box.files.stat("src")
    with pytest.raises(FileMissing):
        box.files.read("src")


def test_paths_cannot_leave_the_workspace(box: Sandbox) -> None:
    with pytest.raises((InvalidPath, FileMissing)):
        box.files.read("../../../../etc/passwd")


def test_upload_and_download_of_a_large_file(box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "large"
    digest = hashlib.sha256()
    with source.open("wb") as file:
        for _ in range(24):
            block = os.urandom(1024 * 1024)
            digest.update(block)
            file.write(block)
    source.chmod(0o755)
    sent: list[int] = []
    box.files.upload(source, "large", progress=sent.append)
    assert sum(sent) == 24 * 1024 * 1024
    assert box.commands.run("sha256sum < large").stdout.split()[0] == digest.hexdigest()
    target = tmp_path / "back"
    received: list[int] = []
    box.files.download("large", target, progress=received.append)
    assert hashlib.sha256(target.read_bytes()).digest() == digest.digest()
    assert sum(received) == 24 * 1024 * 1024
    assert stat.S_IMODE(target.stat().st_mode) & 0o100
    streamed = hashlib.sha256()
    for piece in box.files.stream("large"):
        streamed.update(piece)
    assert streamed.digest() == digest.digest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "large"]


def test_directories_go_both_ways(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "tree/inner").mkdir(parents=True)
    (tmp_path / "tree/empty").mkdir()
    (tmp_path / "tree/a.txt").write_text("a")
    (tmp_path / "tree/inner/b.txt").write_text("b")
    box.files.upload(tmp_path / "tree", "up")
    box.files.download("up", tmp_path / "back")
    assert {str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*")} == {
        "a.txt",
        "empty",
        "inner",
        "inner/b.txt",
    }


def test_a_symlink_in_a_sandbox_is_not_copied_out(box: Sandbox, tmp_path: Path) -> None:
    box.commands.run("mkdir d && ln -s /etc/passwd d/link && echo ok > d/file", check=True)
    box.files.download("d", tmp_path / "d")
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["file"]


def test_a_failed_download_leaves_nothing(box: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileMissing):
        box.files.download("nothing", tmp_path / "x")
    with pytest.raises(InvalidRequest, match="cannot write"):
        box.files.write("f", b"x")
        box.files.download("f", tmp_path / "no/such/dir")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidRequest, match="cannot read"):
        box.files.upload(tmp_path / "absent", "x")


def test_a_device_a_pipe_or_a_link_that_was_named_is_written_into(box: Sandbox, tmp_path: Path) -> None:
    box.files.write("f", b"whole")
    pipe, link, behind = tmp_path / "pipe", tmp_path / "link", tmp_path / "behind"
    os.mkfifo(pipe)
    link.symlink_to(behind)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        box.files.download("f", pipe)
        assert os.read(reader, 100) == b"whole"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.lstat().st_mode), "what everybody uses was replaced by a file"
    box.files.download("f", link)
    assert link.is_symlink() and behind.read_bytes() == b"whole"


def test_names_of_a_sandbox_lead_through_no_local_link(box: Sandbox, tmp_path: Path) -> None:
    outside, directory = tmp_path / "outside", tmp_path / "d"
    outside.write_text("mine")
    directory.mkdir()
    (directory / "f").symlink_to(outside)
    (directory / "g").symlink_to(outside)
    box.files.write("d/f", b"theirs")
    box.files.write("g", b"theirs")
    box.files.download("d", directory)
    box.files.download_many(["g"], directory)
    assert outside.read_text() == "mine"
    assert (directory / "f").read_bytes() == (directory / "g").read_bytes() == b"theirs"


async def test_async_files(async_box: AsyncSandbox, tmp_path: Path) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"1"
        yield b"2"

    await async_box.files.write("n", parts())
    assert await async_box.files.read("n") == b"12"
    (tmp_path / "f").write_bytes(EVERY_BYTE)
    with (tmp_path / "f").open("rb") as file:
        await async_box.files.upload(file, "f")
    await async_box.files.upload(tmp_path / "f", "g")
    assert [piece async for piece in async_box.files.stream("g")]
    await async_box.files.download("f", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == EVERY_BYTE
    assert [info.path.rpartition("/")[2] for info in await async_box.files.list()]


def test_names_that_are_not_utf8_are_listed(box: Sandbox) -> None:
    assert box.commands.run("printf x > \"data/$(printf 'o\\377dd')\"").ok
    [entry] = box.files.list("data")
    assert entry.path == "data/o\udcffdd"
    assert box.files.read(entry.path) == b"x"
    assert box.files.stat(entry.path).path == entry.path
