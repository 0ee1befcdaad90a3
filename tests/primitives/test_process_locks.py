from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from carrel.primitives.process_locks import FileLock, ProcessLocks, open_lock_file


async def test_processes_exclude_each_other_by_key(tmp_path: Path) -> None:
    path = str(tmp_path / "locks")
    one, other = ProcessLocks(path), ProcessLocks(path)  # each has opened the file, as two processes have
    order: list[str] = []

    async def second() -> None:
        async with other.of("a"):
            order.append("second")

    async with one.of("a"):
        async with other.of("b"):
            order.append("another key")
        async with other.unless_held("a") as free:
            assert not free
        waiting = asyncio.create_task(second())
        await asyncio.sleep(0.02)
        order.append("first")
    await waiting
    assert order == ["another key", "first", "second"]
    async with other.unless_held("a") as free:
        assert free
        async with one.unless_held("a") as again:
            assert not again
    one.close()
    other.close()


async def test_callers_in_one_process_wait_for_each_other(tmp_path: Path) -> None:
    locks = ProcessLocks(str(tmp_path / "locks"))
    inside = 0

    async def work() -> None:
        nonlocal inside
        async with locks.of("a"):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(work() for _ in range(20)))
    async with locks.of("a"), locks.unless_held("a") as free:
        assert not free
    locks.close()


def test_the_locks_of_a_process_that_dies_are_free(tmp_path: Path) -> None:
    path = str(tmp_path / "locks")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        FileLock(open_lock_file(path), 7).take(wait=True)
        os.write(write, b"1")
        signal.pause()
    os.read(read, 1)
    descriptor = open_lock_file(path)
    lock = FileLock(descriptor, 7)
    assert not lock.take(wait=False) and FileLock(descriptor, 8).take(wait=False)
    os.kill(pid, signal.SIGKILL)
    with lock.held():
        pass
    os.waitpid(pid, 0)
    for each in (descriptor, read, write):
        os.close(each)
