"""What processes and memory file systems hold, as the kernel tells it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.sandboxes import until

from carrel.supervisor.load import SandboxLoad, measure

HOLD = "import sys; held = bytearray(%d); held[::4096] = b'x' * len(held[::4096]); print(flush=True); sys.stdin.read()"


@contextmanager
def holding(size: int) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD % size], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def test_memory_and_processes() -> None:
    with holding(64 << 20) as large, holding(0) as small:
        found = measure(large)
        assert found.processes == 1 and not found.stopped
        assert 64 << 20 <= found.memory_bytes - measure(small).memory_bytes < 80 << 20
        everything = measure(os.getpid())
        assert everything.processes >= 3 and everything.memory_bytes > found.memory_bytes


async def test_a_stopped_process_is_seen() -> None:
    with holding(0) as pid:
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: measure(pid).stopped)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: not measure(pid).stopped)


def test_what_is_gone_holds_nothing() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert measure(process.pid, ["/no/such/place"]) == SandboxLoad(1, 0, stopped=False)


def test_memory_file_systems_count() -> None:
    before = measure(os.getpid()).memory_bytes
    facts = os.statvfs("/dev/shm")
    used = (facts.f_blocks - facts.f_bfree) * facts.f_frsize
    assert measure(os.getpid(), ["/dev/shm"]).memory_bytes >= min(before, used)
