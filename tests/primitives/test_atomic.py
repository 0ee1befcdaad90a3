from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from carrel.primitives.atomic import draft, write_all, write_file


@pytest.mark.parametrize("durable", [False, True])
def test_write_replaces_the_whole_file_with_its_mode(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"the former content, which is longer")
    write_file(str(path), b"new", mode=0o640, durable=durable)
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["f"]


def test_failure_keeps_the_former_file_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"former")
    with pytest.raises(RuntimeError), draft(str(path)) as descriptor:
        write_all(descriptor, b"half")
        raise RuntimeError
    assert path.read_bytes() == b"former" and os.listdir(tmp_path) == ["f"]


def test_draft_has_no_final_name_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with draft(str(path)) as descriptor:
        write_all(descriptor, b"x")
        assert not path.exists()
    assert path.read_bytes() == b"x"


def test_without_replace_the_first_writer_wins(tmp_path: Path) -> None:
    path, won = tmp_path / "f", []
    start = threading.Barrier(8)

    def write(number: int) -> None:
        start.wait()
        try:
            write_file(str(path), bytes([number]) * 1000, replace=False)
            won.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and path.read_bytes() == bytes(won) * 1000
    assert os.listdir(tmp_path) == ["f"]


def test_draft_lies_in_the_temporary_directory(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with draft(str(tmp_path / "f"), temporary=str(tmp_path / "tmp")):
        assert os.listdir(tmp_path) == ["tmp"] and len(os.listdir(tmp_path / "tmp")) == 1
    assert sorted(os.listdir(tmp_path)) == ["f", "tmp"] and os.listdir(tmp_path / "tmp") == []


def test_paths_are_relative_to_the_descriptor(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        write_file("f", b"x", dir_fd=directory, durable=True)
        with pytest.raises(FileExistsError):
            write_file("f", b"y", dir_fd=directory, replace=False)
    finally:
        os.close(directory)
    assert (tmp_path / "f").read_bytes() == b"x" and os.listdir(tmp_path) == ["f"]


def test_a_link_with_the_final_name_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"kept")
    (tmp_path / "f").symlink_to("other")
    write_file(str(tmp_path / "f"), b"x")
    assert not (tmp_path / "f").is_symlink() and (tmp_path / "other").read_bytes() == b"kept"


@pytest.mark.parametrize("name", ["x" * 255, "\N{GRINNING FACE}" * 63])
def test_file_may_have_the_longest_name(tmp_path: Path, name: str) -> None:
    write_file(str(tmp_path / name), b"x")
    assert os.listdir(tmp_path) == [name]


def test_write_all_repeats_short_writes() -> None:
    read_end, write_end = os.pipe()
    data = os.urandom(300_000)
    received = bytearray()

    def read() -> None:
        while chunk := os.read(read_end, 7_000):
            received.extend(chunk)

    thread = threading.Thread(target=read)
    thread.start()
    write_all(write_end, data)
    os.close(write_end)
    thread.join()
    os.close(read_end)
    assert received == data


def test_draft_has_the_name_the_caller_gives(tmp_path: Path) -> None:
    with draft(str(tmp_path / "f"), aside=str(tmp_path / ".mine")) as descriptor:
        write_all(descriptor, b"x")
        assert os.listdir(tmp_path) == [".mine"]
    assert os.listdir(tmp_path) == ["f"]


def test_something_else_in_place_of_the_draft_does_no_harm(tmp_path: Path) -> None:
    aside = tmp_path / ".mine"
    with pytest.raises(RuntimeError), draft(str(tmp_path / "f"), aside=str(aside)):
        aside.unlink()
        aside.mkdir()
        raise RuntimeError
    assert os.listdir(tmp_path) == [".mine"]
