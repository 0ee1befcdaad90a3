from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from carrel.control.images.shared_pulls import SharedPulls
from carrel.images.storage import LayerProgress, Progress, StoredImage

IMAGE = cast(StoredImage, object())
STEP = LayerProgress("sha256:0", "download", 1, 2)


async def test_one_pull_for_all_who_ask_at_once() -> None:
    pulls, started, go = SharedPulls(), 0, asyncio.Event()
    seen: list[tuple[str, LayerProgress]] = []

    async def fetch(say: Progress) -> StoredImage:
        nonlocal started
        started += 1
        await go.wait()
        say(STEP)
        return IMAGE

    def waiter(name: str) -> asyncio.Task[StoredImage]:
        return asyncio.ensure_future(pulls.join("a", fetch, lambda each: seen.append((name, each))))

    first, second, leaves = waiter("first"), waiter("second"), waiter("leaves")
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.wait([leaves])
    go.set()
    assert await asyncio.gather(first, second) == [IMAGE, IMAGE]
    assert (started, sorted(seen)) == (1, [("first", STEP), ("second", STEP)])
    await waiter("again")
    assert started == 2, "a pull that has ended is not joined"


async def test_a_pull_that_nobody_waits_for_ends_and_its_failure_is_everybodys() -> None:
    pulls, ended = SharedPulls(), asyncio.Event()

    async def endless(_say: Progress) -> StoredImage:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return IMAGE

    async def failing(_say: Progress) -> StoredImage:
        await asyncio.sleep(0)
        raise ValueError("no route")

    def ignore(_each: Any) -> None: ...

    alone = asyncio.ensure_future(pulls.join("a", endless, ignore))
    await asyncio.sleep(0)
    alone.cancel()
    await ended.wait()
    both = await asyncio.gather(*(pulls.join("b", failing, ignore) for _ in range(2)), return_exceptions=True)
    assert [str(each) for each in both] == ["no route", "no route"]
    with pytest.raises(asyncio.CancelledError):
        await alone
