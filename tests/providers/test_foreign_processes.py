"""The end of processes that are known by pid and start time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from carrel.isolation import cgroups
from carrel.providers import foreign_processes


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_it_is_ended(child: subprocess.Popen[bytes]) -> None:
    started = cgroups.start_time(child.pid)
    assert foreign_processes.runs(child.pid, started)
    await foreign_processes.end(child.pid, started)
    assert not foreign_processes.runs(child.pid, started)
    assert child.wait() == -9
    await foreign_processes.end(child.pid, started)


async def test_one_that_ends_by_itself_is_left_in_peace(child: subprocess.Popen[bytes]) -> None:
    waiting = asyncio.create_task(foreign_processes.end(child.pid, cgroups.start_time(child.pid), patience_s=20))
    await asyncio.sleep(0)
    assert child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.flush()
    await waiting
    assert child.wait() == 0


async def test_another_process_of_that_pid_is_not_touched(child: subprocess.Popen[bytes]) -> None:
    await foreign_processes.end(child.pid, cgroups.start_time(child.pid) + 1)
    assert child.poll() is None
    for nobody in (-1, 0x3FFFFF):
        await foreign_processes.end(nobody, 1)
