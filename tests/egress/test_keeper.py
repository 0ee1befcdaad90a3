from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest
from tests.support.fork_server import EGRESS, Forked, start

pytestmark = pytest.mark.usefixtures("planes_fork")

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
def keeping(before: str = "", after: str = WAITS) -> Iterator[tuple[Forked, TextIO]]:
    """A keeper in a session of its own, and what it and its child print."""
    code = WORK.format(before=before, after=after)
    reads, writes = os.pipe()
    with open(reads) as output:
        with open(writes, "wb") as given:
            words = [sys.executable, "-c", code]
            process = start(words, program=EGRESS, env=os.environ, stdout=given, stderr=sys.__stderr__)
        try:
            yield process, output
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def child(output: TextIO) -> int:
    return int(output.readline())


def test_what_dies_is_there_again() -> None:
    with keeping() as (process, output):
        seen = []
        for _ in range(5):
            seen.append(child(output))
            os.kill(seen[-1], signal.SIGKILL)
        assert len({*seen, process.pid}) == 6
        child(output)


def test_what_ends_by_itself_ends_the_keeper() -> None:
    with keeping(after="return") as (process, output):
        assert child(output)
        assert process.wait(20) == 0


def test_what_cannot_begin_is_not_tried_again() -> None:
    with keeping(before="raise ValueError('no')") as (process, output):
        assert process.wait(20) == 1
        assert output.read() == ""


def test_who_ends_the_keeper_ends_what_it_keeps() -> None:
    with keeping() as (process, output):
        kept = child(output)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not os.path.exists(f"/proc/{kept}")


def test_what_is_kept_outlives_the_keeper() -> None:
    with keeping() as (process, output):
        kept = child(output)
        process.kill()
        process.wait()
        os.kill(kept, 0)
        os.killpg(process.pid, signal.SIGKILL)
