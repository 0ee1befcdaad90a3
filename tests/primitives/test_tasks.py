from __future__ import annotations

import asyncio

from carrel.primitives.tasks import cancel


async def test_cancelled_tasks_have_ended_when_it_returns() -> None:
    ended = []

    async def work(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    async def fail() -> None:
        raise ValueError

    tasks = [asyncio.create_task(work(1)), asyncio.create_task(work(2)), asyncio.create_task(fail())]
    await asyncio.sleep(0)
    await cancel([*tasks, None])
    assert sorted(ended) == [1, 2]
    await cancel([])
