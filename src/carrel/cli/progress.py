"""Progress on stderr while something takes long: bytes or elapsed time. Nothing when stderr is not a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carrel.models.images import ImageProgress

PATIENCE_S = 0.4
"""Nothing is shown for operations that are faster."""
_LARGE = 8 * 1024 * 1024


@contextmanager
def copying(title: str, total: int | None = None) -> Iterator[Callable[[int], object] | None]:
    """Show a progress bar. Yields a function to call with each number of copied bytes, or None without a bar."""
    if not sys.stderr.isatty() or (total is not None and total < _LARGE):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    from carrel.cli.printing import plain

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(plain(title), total=total)
        yield lambda count: bar.advance(task, count)


OnProgress = Callable[["ImageProgress"], object]


def pulling() -> AbstractContextManager[OnProgress | None]:
    """Show one bar for all layers of an image that is pulled."""
    return _layers({"download": "pulling", "unpack": "unpacking", "done": "unpacking"})


def pushing() -> AbstractContextManager[OnProgress | None]:
    """Show one bar for all layers of an image that is pushed."""
    return _layers({"upload": "pushing", "done": "pushing"})


@contextmanager
def _layers(words: Mapping[str, str]) -> Iterator[OnProgress | None]:
    """Yield a function to call with the progress of each layer, or None without a bar. Nothing is shown before its
    first call. `words` tells the steps of a layer; the bytes of the first one are counted.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    layers: dict[str, ImageProgress] = {}
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    shown = bar.add_task(next(iter(words.values())), total=None)
    counted = next(iter(words))

    def show(progress: ImageProgress) -> None:
        bar.start()
        layers[progress.layer] = progress
        done = sum(each.done if each.step == counted else each.total for each in layers.values())
        step = next((each.step for each in layers.values() if each.step == counted), progress.step)
        text = f"{words.get(step, step)} {len(layers)} layers"
        bar.update(shown, description=text, completed=done, total=sum(each.total for each in layers.values()))

    try:
        yield show
    finally:
        bar.stop()


@contextmanager
def waiting(title: str, *, quiet: bool = False) -> Iterator[None]:
    """Show a spinner with the elapsed time if the block takes longer than a moment."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    shown = threading.Thread(target=_spin, args=(title, over), name="progress", daemon=True)
    shown.start()
    try:
        yield
    finally:
        over.set()
        shown.join()


def _spin(title: str, over: threading.Event) -> None:
    if over.wait(PATIENCE_S):
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from carrel.cli.printing import plain

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as line:
        line.add_task(plain(title), total=None)
        over.wait()
