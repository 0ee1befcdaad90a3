"""Tells the person at the terminal why `carrel here` takes a while, such as for the first record of a large folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

FIRST_S = 1.0
"""Whoever waits for less is not told anything."""
NEXT_S = 0.5
_CLEAR = "\x1b[2K\r"


@contextmanager
def explained(words: str, *, after_output: bool = False) -> Iterator[None]:
    """Show on stderr what the block does, and for how many seconds so far; the line is gone when it ends.

    Nothing is shown where stderr is no terminal. `after_output`: a program may have left the cursor in its last line.
    """
    if not os.isatty(2):
        yield
        return
    import threading

    began, ended = time.monotonic(), threading.Event()

    def show() -> None:
        wait_s, before = FIRST_S, "\n" if after_output else ""
        while not ended.wait(wait_s):
            line = f"carrel: {words} ({time.monotonic() - began:.0f} s)"
            _write(f"{before}{_CLEAR}{line[: (os.get_terminal_size(2).columns or 80) - 1]}")
            wait_s, before = NEXT_S, ""
        if wait_s == NEXT_S:
            _write(_CLEAR)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _write(text: str) -> None:
    with suppress(OSError):
        os.write(2, text.encode())
