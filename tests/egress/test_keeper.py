from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

WORK = """
import os, signal, sys, time
from carrel.egress.launch import Keeper
def work(begun):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    {before}
    begun()
    print(os.getpid(), flush=True)
    {after}
sys.exit(Keeper(work).run())
"""

WAITS = "while True: time.sleep(0.05)"  # a pause would never end if the signal came just before it


@contextmanager
def keeping(before: str = "", after: str = WAITS) -> Iterator[subprocess.Popen[str]]:
    code = WORK.format(before=before, after=after)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def child(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_what_dies_is_there_again() -> None:
    with keeping() as process:
        seen = []
        for _ in range(5):
            seen.append(child(process))
            os.kill(seen[-1], signal.SIGKILL)
        assert len({*seen, process.pid}) == 6
        child(process)


def test_what_ends_by_itself_ends_the_keeper() -> None:
    with keeping(after="return") as process:
        assert child(process)
        assert process.wait(20) == 0


def test_what_cannot_begin_is_not_tried_again() -> None:
    with keeping(before="raise ValueError('no')") as process:
        assert process.wait(20) == 1
        assert process.stdout is not None
        assert process.stdout.read() == ""


def test_who_ends_the_keeper_ends_what_it_keeps() -> None:
    with keeping() as process:
        kept = child(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not os.path.exists(f"/proc/{kept}")


def test_what_is_kept_outlives_the_keeper() -> None:
    with keeping() as process:
        kept = child(process)
        process.kill()
        process.wait()
        os.kill(kept, 0)
        os.killpg(process.pid, signal.SIGKILL)
