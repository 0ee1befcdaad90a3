from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.journal import Journal, read


def test_what_was_not_written_down_is_found_again(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    journal = Journal(path)
    assert (journal.left, journal.last) == ([], 0)
    for number in (1, 2, 3):
        journal.opened(number, {"number": number, "host": "é", "ended": None})
    journal.written([2, 9])
    again = Journal(path)  # the first one was killed: it was not closed
    assert [item["number"] for item in again.left] == [1, 3] and again.last == 3
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
