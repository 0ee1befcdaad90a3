"""One sandbox that asks for very much, and another that asks for little: the second does not wait for the first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from tests.support.indexes import IndexServer, sdist, serving, whole
from tests.support.sandboxes import until

from carrel.egress.index import catalogue, downloads, pages
from carrel.egress.index.front import AllowedPackages, Front, IndexAnswer

MANY = 40


class Slow(IndexServer):
    """An index that keeps some pages back."""

    def __init__(self) -> None:
        super().__init__()
        self.held = asyncio.Event()

    async def answer(self, method: str, target: str, headers: Mapping[str, str]) -> IndexAnswer:
        answer = await super().answer(method, target, headers)
        if target.startswith("/simple/slow"):
            await self.held.wait()
        return answer


@pytest.fixture
async def slow() -> AsyncIterator[Slow]:
    async with serving(Slow()) as server:
        yield server


async def get(front: Front, packages: AllowedPackages, target: str) -> bytes:
    answer = await front.answer("GET", target, {"accept": pages.JSON_TYPE}, packages)
    body = await whole(answer)
    assert answer.status == 200, body
    return body


@asynccontextmanager
async def asking(
    front: Front, packages: AllowedPackages, targets: list[str]
) -> AsyncIterator[list[asyncio.Task[bytes]]]:
    """Somebody who asks for all of these at once."""
    tasks = [asyncio.get_running_loop().create_task(get(front, packages, target)) for target in targets]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def places(front: Front, packages: AllowedPackages, project: str) -> list[str]:
    return [each["url"] for each in json.loads(await get(front, packages, f"/simple/{project}/"))["files"]]


async def test_files_for_one_do_not_keep_another_s_back(front: Front, server: IndexServer) -> None:
    for number in range(MANY):
        server.add(sdist("much", f"{number}.0", str(number).encode()))
    server.add(sdist("little"))
    greedy, modest = AllowedPackages((server.index(),)), AllowedPackages((server.index(),))
    wanted = await places(front, greedy, "much")
    server.gate = gate = asyncio.Event()
    async with asking(front, greedy, wanted) as tasks:
        half = downloads.MOST_AT_ONCE // 2
        await until(lambda: len(server.files_asked()) == half, what="as many files as one may have")
        server.gate = None
        (small,) = await places(front, modest, "little")
        await get(front, modest, small)
        asked = server.files_asked()
        assert len(asked) == half + 1, "the greedy one had no more than half"
        # What the other has queued and this one wants too is no longer the other's to wait for.
        last = next(each for each in wanted if not any(path.endswith(each.rpartition("/")[2]) for path in asked))
        await get(front, modest, last)
        gate.set()
        await asyncio.gather(*tasks)
    assert len(server.files_asked()) == MANY + 1


async def test_pages_for_one_do_not_keep_another_s_back(front: Front, slow: Slow) -> None:
    for number in range(MANY):
        slow.add(sdist(f"slow{number}"))
    slow.add(sdist("little"))
    greedy, modest = AllowedPackages((slow.index(),)), AllowedPackages((slow.index(),))
    async with asking(front, greedy, [f"/simple/slow{number}/" for number in range(MANY)]) as tasks:
        half = catalogue.MOST_AT_ONCE // 2
        await until(lambda: len(slow.asked) == half, what="as many pages as one may have")
        (small,) = await places(front, modest, "little")
        await get(front, modest, small)
        assert len(slow.asked) == half + 2
        slow.held.set()
        await asyncio.gather(*tasks)


async def test_who_wants_what_another_has_waited_for_long_is_not_short_of_time(front: Front, slow: Slow) -> None:
    slow.add(sdist("slow"))
    greedy, modest = AllowedPackages((slow.index(),)), AllowedPackages((slow.index(),))
    loop = asyncio.get_running_loop()
    clock, ahead = loop.time, 0.0
    loop.time = lambda: clock() + ahead  # type: ignore[method-assign]
    permits = front._catalogue._limit
    async with AsyncExitStack() as taken:
        for _ in range(catalogue.MOST_AT_ONCE // 2):
            permit = permits.permit()
            permit.join(greedy.budget)
            await taken.enter_async_context(permit)
        async with asking(front, greedy, ["/simple/slow/"]) as waiting:
            await until(lambda: permits._waiting, what="a page that waits for its permit")
            ahead = catalogue._MOST_TIME_S - 1
            async with asking(front, modest, ["/simple/slow/"]) as wanted:
                await until(lambda: slow.asked, what="its permit")
                ahead += 20
                await asyncio.sleep(0.01)
                slow.held.set()
                await asyncio.gather(*wanted, *waiting)


async def test_a_file_that_has_not_begun_is_forgotten_when_nobody_waits(front: Front, server: IndexServer) -> None:
    for number in range(MANY):
        server.add(sdist("much", f"{number}.0", str(number).encode()))
    greedy = AllowedPackages((server.index(),))
    wanted = await places(front, greedy, "much")
    server.gate = gate = asyncio.Event()
    async with asking(front, greedy, wanted):
        half = downloads.MOST_AT_ONCE // 2
        await until(lambda: len(server.files_asked()) == half, what="as many files as one may have")
        running = front._downloads._running
        assert len(running) == MANY
    await until(lambda: len(running) == half, what="the end of what had not begun")
    gate.set()
    await until(lambda: not running, what="the end of what had")
    assert len(server.files_asked()) == half
