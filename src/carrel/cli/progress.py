"""What a person sees on stderr while something takes long: bytes, or the time so far. Not on a terminal: nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 0.4
"""What is over sooner is not worth a line that comes and goes."""
_LARGE = 8 * 1024 * 1024


@contextmanager
def copying(title: str, total: int | None = None) -> Iterator[Callable[[int], object] | None]:
    """A bar to tell of each piece that was copied, or None when the copy is too short to see or nobody watches."""
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


@contextmanager
def waiting(title: str, *, quiet: bool = False) -> Iterator[None]:
    """A spinner with the time so far, once it takes longer than a moment. With `quiet` never."""
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
