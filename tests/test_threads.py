from __future__ import annotations

import asyncio
import threading

import pytest

from carrel.threads import run_to_end


async def test_who_gives_up_waits_for_the_work_and_undoes_it() -> None:
    begun, go_on = threading.Event(), threading.Event()
    undone: list[str] = []

    def work() -> str:
        begun.set()
        assert go_on.wait(30)
        return "made"

    waiting = asyncio.ensure_future(run_to_end(work, undone.append))
    await asyncio.to_thread(begun.wait, 30)
    for _ in range(3):  # again and again
        waiting.cancel()
        await asyncio.sleep(0)
    assert not waiting.done() and not undone
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert undone == ["made"]


async def test_what_fails_has_nothing_to_undo() -> None:
    undone: list[object] = []
    with pytest.raises(OSError, match="no room"):
        await run_to_end(lambda: (_ for _ in ()).throw(OSError("no room")), undone.append)
    assert undone == [] and await run_to_end(lambda: 1) == 1
