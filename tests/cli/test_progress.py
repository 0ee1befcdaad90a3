"""What a person at a real terminal sees of long work."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from carrel.cli.progress import copying, waiting


@contextmanager
def watched(code: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A program whose stderr is a terminal; it goes on when its stdin is closed."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(slave)
    try:
        yield process, master
    finally:
        process.kill()
        process.communicate()
        os.close(master)


def seen_until(master: int, wanted: bytes) -> bytes:
    seen = b""
    deadline = time.monotonic() + 30
    while wanted not in seen:
        ready, _, _ = select.select([master], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no {wanted!r} in {seen!r}"
        seen += os.read(master, 65536)
    return seen


def rest(master: int) -> bytes:
    seen = b""
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:  # the other end is closed
            return seen
        if not data:
            return seen
        seen += data


def test_long_work_shows_its_name_and_the_time() -> None:
    code = "import sys\nfrom carrel.cli.progress import waiting\n"
    code += "with waiting('restoring [red]c\\x1b[1m'): sys.stdin.read()\nprint('done')"
    with watched(code) as (process, master):
        seen = seen_until(master, b"0:00:01")
        assert b"restoring [red]c\\x1b[1m" in seen, "a name is shown as it is"
        output, _ = process.communicate(b"")
        assert output == b"done\n" and process.returncode == 0
        assert rest(master).endswith((b"\x1b[2K", b"\x1b[?25h")), "the line is gone afterwards"


def test_quick_work_shows_nothing() -> None:
    code = "from carrel.cli.progress import waiting\nfor _ in range(3):\n    with waiting('x'): pass\n"
    with watched(code) as (process, master):
        process.communicate(b"")
        assert process.returncode == 0 and rest(master) == b""


def test_with_json_nothing_is_shown() -> None:
    code = "import time\nfrom carrel.cli import progress\nprogress.PATIENCE_S = 0.0\n"
    code += "with progress.waiting('x', quiet=True): time.sleep(0.05)\n"
    with watched(code) as (process, master):
        process.communicate(b"")
        assert process.returncode == 0 and rest(master) == b""


def test_a_failure_passes_through() -> None:
    code = "from carrel.cli.progress import waiting\nwith waiting('x'): raise SystemExit(7)\n"
    with watched(code) as (process, _):
        process.communicate(b"")
        assert process.returncode == 7


def test_a_copy_shows_its_bytes() -> None:
    code = "import sys\nfrom carrel.cli.progress import copying\n"
    code += "with copying('work.tar') as advance:\n    advance(3_000_000)\n    sys.stdin.read()\n"
    with watched(code) as (process, master):
        seen = seen_until(master, b"3.0")
        assert b"work.tar" in seen
        process.communicate(b"")
        assert process.returncode == 0


def test_a_short_copy_shows_none() -> None:
    code = "from carrel.cli.progress import copying\nwith copying('x', 1000) as advance: print(advance)\n"
    with watched(code) as (process, master):
        assert process.communicate(b"")[0] == b"None\n"
        assert rest(master) == b""


def test_away_from_a_terminal_there_is_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with waiting("x"), copying("x") as advance:
        assert advance is None
    assert capfd.readouterr().err == ""
