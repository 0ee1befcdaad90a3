"""Work that nobody waits for."""

from __future__ import annotations

import asyncio

import pytest

from carrel.integrations.a2a.background import Background


async def test_the_end_of_the_owner_ends_the_work() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with Background() as background:
        task = background.start(work(), "work")
        await asyncio.sleep(0)
    assert task is not None
    assert task.cancelled()
    assert ended.is_set()
    assert background.start(work(), "too late") is None


async def test_a_failure_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    done = asyncio.Event()

    async def fails() -> None:
        raise ValueError("broken")

    async def works() -> None:
        done.set()

    async with Background() as background:
        background.start(fails(), "this one")
        background.start(works(), "that one")
        await done.wait()
    assert "this one failed" in caplog.text
