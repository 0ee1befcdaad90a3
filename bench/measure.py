"""Samples and their statistics: medians, percentiles, ratios, tables, and the file with the figures.

Pure except for that file; knows nothing of sandboxes.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
Figures = dict[str, float | int | str]
"""The figures of benchmarks by their public names, as one flat object."""


class BenchFailed(Exception):
    """A benchmark cannot run here, or failed. People read the message."""


def median(samples: Sequence[float]) -> float:
    """Return the median of the samples."""
    if not samples:
        raise BenchFailed("nothing was measured")
    return statistics.median(samples)


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that at least `share` percent of all samples do not exceed (nearest rank)."""
    if not samples:
        raise BenchFailed("nothing was measured")
    if not 0 < share <= 100:
        raise ValueError(f"a percentile lies above 0 and at most at 100, not at {share}")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the ratio of the medians: for many short samples that were taken in turns."""
    return median(ours) / median(theirs)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of each round: for few long samples, where the machine may
    change between rounds.
    """
    if len(ours) != len(theirs):
        raise ValueError("paired samples come in equal numbers")
    return median([mine / other for mine, other in zip(ours, theirs, strict=True)])


Contender = Callable[[], Awaitable[float]]
"""Does one thing once and returns how much it took (or achieved)."""


def timed(work: Callable[[], T], right: Callable[[T], bool] = lambda _result: True) -> Contender:
    """Return a function that measures the seconds of a call and checks its result."""

    async def turn() -> float:
        await asyncio.sleep(0)  # allows an interrupt
        began = time.perf_counter()
        result = work()
        took = time.perf_counter() - began
        assert right(result), result
        return took

    return turn


def timed_async(work: Callable[[], Awaitable[T]], right: Callable[[T], bool]) -> Contender:
    """Do the same as `timed` for a coroutine function."""

    async def turn() -> float:
        began = time.perf_counter()
        result = await work()
        took = time.perf_counter() - began
        assert right(result), result
        return took

    return turn


async def rounds(
    contenders: Mapping[str, Contender], count: int, *, warm_up: int = 0, progress: Progress | None = None
) -> dict[str, list[float]]:
    """Measure every contender once per round, for `count` rounds.

    The order rotates by one each round, so that none always follows the same other one.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(-warm_up, count):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            took = await contenders[name]()
            if number >= 0:
                samples[name].append(took)
        if progress is not None:
            progress(number + 1, count)
    return samples


Progress = Callable[[int, int], None]


@dataclass
class Table:
    """Rows of words and numbers for people."""

    title: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *cells: str | float | None) -> None:
        """Add a row; None becomes a dash."""
        self.rows.append(tuple(show(cell) for cell in cells))

    def lines(self) -> Iterable[str]:
        """Format the table, words to the left and numbers to the right."""
        grid = [tuple(self.columns), *self.rows]
        widths = [max(len(row[column]) for row in grid) for column in range(len(self.columns))]
        yield self.title
        for row in grid:
            cells = [row[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            yield ("  " + "  ".join(cells)).rstrip()


def show(cell: str | float | None) -> str:
    """Format a cell with its significant digits."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    if cell == 0 or abs(cell) >= 100:
        return f"{cell:.0f}"
    return f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"


@dataclass
class Report:
    """The result of one benchmark."""

    figures: Figures
    tables: list[Table]


def rounded(figures: Figures) -> Figures:
    """Round to four significant digits; more would suggest a false precision."""
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in figures.items()}


def read_figures(path: Path) -> Figures:
    """Read the stored figures; empty if there are none or the file is invalid."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def keep_figures(path: Path, figures: Figures) -> None:
    """Add the figures to those of other benchmarks. The file is replaced atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = {**read_figures(path), **figures}
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".latest-")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(merged, file, indent=1, sort_keys=True)
            file.write("\n")
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
