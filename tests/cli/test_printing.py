from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.cli.printing import age, fitting, plain, print_table, size

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0s"), (59, "59s"), (60, "1m"), (7199, "1h"), (86_400, "1d"), (864_000, "10d")]
)
def test_age(seconds: int, text: str) -> None:
    assert age(NOW - timedelta(seconds=seconds), NOW) == text
    assert age((NOW - timedelta(seconds=seconds)).replace(tzinfo=None), NOW) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0B"), (1023, "1023B"), (1024, "1.0K"), (20_480, "20K"), (2**41, "2.0T")]
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text


@given(st.text())
def test_plain_text_cannot_steer_a_terminal(text: str) -> None:
    assert all(c.isprintable() for c in plain(text))


@given(st.lists(st.tuples(st.integers(1, 300), st.sampled_from([6, 24])), max_size=12), st.integers(0, 400))
def test_only_the_widest_columns_give_way(columns: list[tuple[int, int]], room: int) -> None:
    widths, least = [width for width, _ in columns], [fewest for _, fewest in columns]
    fitted = fitting(widths, room, least)
    cut = [new for new, old in zip(fitted, widths, strict=True) if new < old]
    assert sum(fitted) <= room or fitted == [min(*each) for each in columns]
    for new, old, fewest in zip(fitted, widths, least, strict=True):
        assert min(old, fewest) <= new <= old
        assert new <= max(min(cut, default=new), fewest)


def test_a_table_that_goes_elsewhere_is_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for wrap in (False, True):
        print_table(["A", "B"], [["a" * 150, "b " * 100 + "end"]], wrap=wrap)
        head, row = capsys.readouterr().out.splitlines()
        assert head.split() == ["A", "B"]
        assert "a" * 150 in row and row.rstrip().endswith("end")


def test_a_narrow_terminal_keeps_the_short_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    handle = "apr-de6f4540902500da"
    columns = ["ID", "DECISION", "CONTEXT", "WHAT", "WHY"]
    print_table(columns, [[handle, "deny", "conversation-42", "x" * 200, "y" * 60]])
    row = capsys.readouterr().out.splitlines()[1]
    assert f"{handle}  deny      conversation-42  xx" in row and row.count("…") == 2


@pytest.mark.parametrize("wrap", [False, True])
def test_a_terminal_that_is_too_narrow_is_run_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wrap: bool
) -> None:
    """What other commands are given stays in one piece."""
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    handle = "apr-de6f4540902500da"
    print_table(["ID", "STATE", "CONTEXT", "WHAT"], [[handle, "pending", "conversation-42", "x" * 80]], wrap=wrap)
    assert f"{handle}  pend" in capsys.readouterr().out
