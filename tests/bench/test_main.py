from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from bench.__main__ import BENCHMARKS, chosen, main, module_of
from bench.measure import BenchFailed

ROOT = Path(__file__).resolve().parents[2]


def test_help_names_every_benchmark() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "bench", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stderr == ""
    for each in BENCHMARKS.values():
        assert f"{each.name:<12}{each.about}" in shown.stdout


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_a_module_that_runs(name: str) -> None:
    run = module_of(name).run
    assert inspect.iscoroutinefunction(run)
    assert list(inspect.signature(run).parameters) == ["progress"]


def test_none_named_means_all_and_a_name_counts_once() -> None:
    assert chosen([]) == [name for name in BENCHMARKS if name not in {"kubernetes", "e2b"}]
    assert chosen(["rate", "start", "rate"]) == ["rate", "start"]


def test_an_unknown_name_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BenchFailed, match="start, image_start"):
        chosen(["strat"])
    assert main(["start", "strat"]) == 2
    shown = capsys.readouterr()
    assert "no benchmark is named 'strat'" in shown.err
    assert shown.out == ""
