"""Clients that append to files through a service, each line once, while something fails."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from carrel.client import AsyncClient
from carrel.errors import CarrelError

T = TypeVar("T")
DEADLINE_S = 150


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for a condition."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await holds():
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(what)


async def patiently(do: Callable[[], Awaitable[T]], said: list[str] | None = None) -> T:
    """Repeat what a server refuses for now, as a client of a service does. `said` gets the codes of the refusals."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await do()
            except CarrelError as error:
                if error.status < 500 and error.code != "not_running":
                    raise
                if said is not None:
                    said.append(error.code)
                await asyncio.sleep(0.2)


class Load:
    """The lines that were appended in each context, and what clients were told meanwhile."""

    def __init__(self, carrel: AsyncClient, contexts: Sequence[str]):
        self._carrel = carrel
        self._stop = asyncio.Event()
        self.appended = dict.fromkeys(contexts, 0)
        self.said: list[str] = []

    async def work(self, context: str) -> None:
        while not self._stop.is_set():
            number, id = self.appended[context], f"k{secrets.token_hex(8)}"

            async def append(number: int = number, id: str = id) -> None:
                box = await self._carrel.sandbox(context)
                try:
                    started = await box.commands.start(f"grep -qx {number} lines || echo {number} >> lines", id=id)
                except CarrelError as error:
                    if error.code != "already_exists":
                        raise
                    started = box.commands.get(id)  # an earlier attempt has started it
                await started.wait()

            await patiently(append, self.said)
            self.appended[context] = number + 1

    async def goes_on(self, what: str) -> None:
        """Wait until every client has appended another line."""
        reached = dict(self.appended)

        async def on() -> bool:
            return all(self.appended[each] > reached[each] for each in self.appended)

        await until(on, what)

    async def check(self) -> None:
        """Compare the files with what was answered."""
        for context, count in self.appended.items():
            box = await self._carrel.sandbox(context)
            lines = (await box.files.read("lines")).decode().split()
            assert lines == [str(number) for number in range(count)], context

    def end(self) -> None:
        self._stop.set()


@asynccontextmanager
async def under_load(carrel: AsyncClient, *contexts: str) -> AsyncIterator[Load]:
    """Work while the block runs; afterwards compare."""
    load = Load(carrel, contexts)
    async with asyncio.TaskGroup() as group:
        for each in contexts:
            group.create_task(load.work(each))
        await load.goes_on("the load does not begin")
        try:
            yield load
        finally:
            load.end()
    await load.check()
