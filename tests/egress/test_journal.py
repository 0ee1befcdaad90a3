from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.access_log import Journal, read


def test_what_was_not_written_down_is_found_again(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    journal = Journal(path)
    assert (journal.left, journal.last) == ({}, 0)
    for number in (1, 2, 3):
        journal.opened(number, {"number": number, "host": "é", "ended": None})
    journal.written([2, 9])
    again = Journal(path)  # the first one was killed: it was not closed
    assert list(again.left) == [1, 3] and again.last == 3
    again.written([1, 3])
    again.close()
    assert not (tmp_path / "journal").exists()
    journal._open.clear()
    (tmp_path / "journal").touch()
    journal.close()


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path))
    journal.opened(1, {"a": 1})
    journal.opened(2, {"a": 2})
    path.write_bytes(path.read_bytes()[:-3])
    assert read(str(path)) == ({1: {"a": 1}}, 1)
    journal.close()


def test_it_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path), most_bytes=2000)
    journal.opened(1, {"stays": True})
    for number in range(2, 1000):
        journal.opened(number, {"text": "x" * 50})
        journal.written([number])
    assert path.stat().st_size < 3000
    found, last = read(str(path))
    assert found == {1: {"stays": True}} and last >= 990
    journal.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60), st.integers(50, 500))
def test_any_history(tmp_path_factory: object, steps: list[tuple[bool, int]], most: int) -> None:
    path = str(tmp_path_factory.mktemp("j") / "journal")  # type: ignore[attr-defined]
    journal, model = Journal(path, most_bytes=most), {}
    for opens, number in steps:
        if opens:
            journal.opened(number, {"n": number})
            model[number] = {"n": number}
        else:
            journal.written([number])
            model.pop(number, None)
    assert read(path)[0] == model
    journal.close()


_FULL = """
import resource, sys
from carrel.egress.access_log import Journal, read

path = sys.argv[1]
journal, out = Journal(path), []
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for number in range(1, 31):
    if number == 21:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    try:
        journal.opened(number, {"number": number, "text": "x" * 60})
        out.append(number)
    except OSError:
        assert number < 21
assert 0 < len(out) < 30
assert list(read(path)[0]) == out, (read(path)[0], out)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    journal._rewrite()  # into a shorter one, for which there is no room either
    raise AssertionError
except OSError:
    pass
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.opened(31, {"number": 31})
assert list(Journal(path).left) == [*out, 31]
"""


def test_without_room_nothing_goes_out_and_what_did_is_found(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", _FULL, str(tmp_path / "journal")], check=True, timeout=60, env=environment)


def test_what_follows_damage_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path))
    journal.opened(1, {"a": 1})
    with path.open("ab") as file:
        file.write(b"\x05\0\0\0?????" + bytes(4096))
    assert read(str(path)) == ({1: {"a": 1}}, 1)
    again = Journal(str(path))
    assert again.left == {1: {"a": 1}}
    journal.written([1])
    journal._open.clear()
    again.close()
    os.close(journal._file)


def test_draft_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    (tmp_path / "journal.0123456789abcdef.new").write_bytes(b"half")
    Journal(str(tmp_path / "journal")).close()
    assert os.listdir(tmp_path) == []
