from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from carrel.supervisor import memory_watch

EATER = "x = bytearray({} << 20); print('fed', flush=True); import time; time.sleep(60)"


def eater(megabytes: int) -> subprocess.Popen[bytes]:
    started = subprocess.Popen([sys.executable, "-I", "-S", "-c", EATER.format(megabytes)], stdout=subprocess.PIPE)
    assert started.stdout is not None and started.stdout.readline() == b"fed\n"
    return started


@pytest.fixture
def eaters(monkeypatch):
    """A large and a small process, which are all that the watch sees besides this one."""
    both = [eater(96), eater(16)]
    monkeypatch.setattr(memory_watch, "processes", lambda: [os.getpid(), *(each.pid for each in both)])
    yield both
    for each in both:
        each.kill()
        each.wait()
        each.stdout.close()


async def test_the_largest_process_is_killed_and_only_above_the_limit(eaters) -> None:
    large, small = eaters
    own = memory_watch.private_bytes(f"/proc/{os.getpid()}")
    assert 112 << 20 < memory_watch._enforce(1 << 40, ()) < own + (160 << 20)
    assert (large.poll(), small.poll()) == (None, None)
    watching = asyncio.create_task(memory_watch.watch_memory(own + (64 << 20), ()))
    try:
        assert await asyncio.to_thread(large.wait, 20) == -9
        await asyncio.sleep(2 * memory_watch.SHORTEST_S)
        assert small.poll() is None
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
