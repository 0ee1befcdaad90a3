from __future__ import annotations

import asyncio
import gc
import threading

from carrel.primitives.keyed_lock import KeyedLocks, KeyedThreadLocks


async def test_one_key_waits_and_another_does_not() -> None:
    locks = KeyedLocks()
    async with locks.of("a"):
        assert locks.of("a").locked()
        async with asyncio.timeout(5), locks.of("b"):
            pass
        same = locks.of("a")
        waiting = asyncio.ensure_future(same.acquire())
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting
    same.release()


async def test_locks_nobody_uses_are_forgotten() -> None:
    locks = KeyedLocks()
    for number in range(100):
        async with locks.of(number):
            pass
    gc.collect()
    assert len(locks._locks) == 0


def test_threads_wait_for_each_other_on_one_key_only() -> None:
    locks, inside = KeyedThreadLocks(), threading.Event()
    order: list[str] = []

    def second() -> None:
        with locks.hold("a"):
            order.append("second")
            inside.set()

    with locks.hold("a"), locks.hold("a"), locks.hold("b"):
        thread = threading.Thread(target=second)
        thread.start()
        order.append("first")
        assert not inside.is_set()
    thread.join(10)
    assert order == ["first", "second"] and locks._locks == {}
