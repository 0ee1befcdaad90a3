from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from bench.measure import (
    BenchFailed,
    Table,
    keep_figures,
    median,
    paired_ratio,
    percentile,
    ratio,
    read_figures,
    rounded,
    rounds,
    show,
)
from hypothesis import given
from hypothesis import strategies as st

SAMPLES = st.lists(st.floats(min_value=1e-6, max_value=1e6), min_size=1, max_size=200)


@given(SAMPLES, st.floats(min_value=0.1, max_value=100))
def test_a_percentile_is_a_sample_that_enough_others_do_not_exceed(samples: list[float], share: float) -> None:
    found = percentile(samples, share)
    assert found in samples
    assert sum(each <= found for each in samples) >= math.floor(len(samples) * share / 100)
    assert sum(each < found for each in samples) < max(1, math.ceil(len(samples) * share / 100))


@given(SAMPLES)
def test_percentiles_are_ordered(samples: list[float]) -> None:
    assert min(samples) <= percentile(samples, 50) <= percentile(samples, 99) <= percentile(samples, 100)
    assert percentile(samples, 100) == max(samples)
    assert percentile(samples, 50) <= median(samples) or len(samples) % 2


def test_p99_of_a_hundred_leaves_out_the_worst() -> None:
    assert percentile([float(each) for each in range(1, 101)], 99) == 99.0


@pytest.mark.parametrize("share", [0, -1, 101])
def test_a_share_outside_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile([1.0], share)


def test_nothing_measured_is_a_failure_not_a_zero() -> None:
    with pytest.raises(BenchFailed):
        median([])
    with pytest.raises(BenchFailed):
        percentile([], 99)


def test_ratios() -> None:
    assert ratio([2.0, 100.0, 4.0], [1.0, 2.0, 50.0]) == 2.0
    # The machine became ten times slower in the third round, for both.
    assert paired_ratio([2.0, 2.0, 20.0], [1.0, 1.0, 10.0]) == 2.0
    with pytest.raises(ValueError, match="equal numbers"):
        paired_ratio([1.0], [1.0, 2.0])


async def test_rounds_interleave_turn_the_order_and_drop_the_warm_up() -> None:
    turns: list[str] = []

    async def first() -> float:
        turns.append("a")
        return float(len(turns))

    async def second() -> float:
        turns.append("b")
        return float(len(turns))

    seen: list[tuple[int, int]] = []
    samples = await rounds(
        {"a": first, "b": second}, 2, warm_up=1, progress=lambda done, total: seen.append((done, total))
    )
    assert turns == ["b", "a", "a", "b", "b", "a"]
    assert samples == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
    assert seen[-1] == (2, 2)


def test_figures_of_other_benchmarks_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "results" / "latest.json"
    keep_figures(path, {"start_ms": 3.0, "rate8_api": 1.0})
    keep_figures(path, {"start_ms": 2.5})
    assert read_figures(path) == {"start_ms": 2.5, "rate8_api": 1.0}
    assert [each.name for each in path.parent.iterdir()] == ["latest.json"]


@pytest.mark.parametrize("content", ["", "[1]", "{", "\x00"])
def test_a_broken_file_of_figures_does_not_stop_a_run(tmp_path: Path, content: str) -> None:
    path = tmp_path / "latest.json"
    path.write_text(content)
    keep_figures(path, {"start_ms": 1.0})
    assert json.loads(path.read_text()) == {"start_ms": 1.0}


def test_figures_are_rounded_and_words_left_alone() -> None:
    assert rounded({"a": 1.234567, "b": 123456.7, "c": "6.1", "d": 500}) == {
        "a": 1.235,
        "b": 123500,
        "c": "6.1",
        "d": 500,
    }


@pytest.mark.parametrize(
    ("cell", "text"), [(None, "–"), ("x", "x"), (0.0, "0"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1234")]
)
def test_cells(cell: str | float | None, text: str) -> None:
    assert show(cell) == text


def test_a_table_is_aligned() -> None:
    table = Table("speeds", ("", "ms"))
    table.add("bubblewrap", 5.5)
    table.add("carrel", 12.25)
    assert list(table.lines()) == ["speeds", "                ms", "  bubblewrap  5.50", "  carrel      12.2"]
