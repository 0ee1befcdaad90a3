"""Callers of a zygote that give up, while it is too busy to hear of it at once: the others and the host are as before."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from tests.support.sandboxes import KINDS, House, provider, until

OTHERS, FILLER = 8, "x" * 60_000
"""Requests that together are more than a socket holds."""


@pytest.fixture(params=KINDS)
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    async with provider(request.param) as house:
        await house.provider.warm()
        yield house


def zygote(house: House) -> int:
    process = house.provider._zygote._process  # type: ignore[attr-defined]
    return int(process.pid)


async def nothing_runs(house: House) -> None:
    async def nothing() -> bool:
        return await house.provider.running() == []

    await until(nothing, what="no sandbox")


async def test_the_others_are_answered(house: House) -> None:
    client = house.provider._zygote  # type: ignore[attr-defined]
    os.kill(zygote(house), signal.SIGSTOP)
    try:
        start = asyncio.create_task(house.provider.start(house.launch()))
        asked = min(await until(lambda: set(client._waiting), what="a request"))
        others = [asyncio.create_task(client.request("describe", filler=FILLER)) for _ in range(OTHERS)]
        await until(lambda: len(client._waiting) > OTHERS, what="all requests")
        start.cancel()
        await until(lambda: asked not in client._waiting, what="one who gives up")
    finally:
        os.kill(zygote(house), signal.SIGCONT)
    with pytest.raises(asyncio.CancelledError):
        await start
    answers = await asyncio.gather(*others)
    assert {answer["pid"] for answer in answers} == {zygote(house)}
    await nothing_runs(house)
