"""The control plane's end of a zygote."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from tests.support.sandboxes import KINDS, House, provider

from carrel.errors import PlatformError, ProviderUnavailable
from carrel.providers.zygotes import ZygoteClient


@pytest.mark.parametrize("plain", [kind == "process" for kind in KINDS])
async def test_a_zygote_that_cannot_start_says_why(tmp_path: Path, plain: bool) -> None:
    client = ZygoteClient(str(tmp_path), str(tmp_path / "missing"), plain=plain)
    for _ in range(2):
        with pytest.raises(ProviderUnavailable, match="No such file"):
            await client.request("describe")
    await client.close()
    assert os.listdir(tmp_path) == []


async def test_concurrent_first_requests_share_one_zygote() -> None:
    async with provider(KINDS[0]) as house:
        client = ZygoteClient(str(house.directory / "run"), str(house.directory / "ws"), plain=KINDS[0] == "process")
        answers = await asyncio.gather(*(client.request("describe") for _ in range(10)))
        assert len({answer["pid"] for answer in answers}) == 1
        await client.close()
        assert os.listdir(house.directory / "run") == []


async def test_asking_one_that_is_being_started_makes_no_second_connection(tmp_path: Path) -> None:
    """What came by a second one was never read: whoever asked waited in vain, and the loop never slept."""
    client = ZygoteClient(str(tmp_path), str(tmp_path), plain=True)
    first = asyncio.create_task(client.request("describe"))
    asked = []
    while not first.done():
        asked.append(asyncio.create_task(client.known("list")))
        await asyncio.sleep(0 if len(asked) < 1000 else 0.01)
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*asked)
    assert answers[-1] == {"ids": []}
    await client.close()
    assert os.listdir(tmp_path) == []


async def test_unknown_and_malformed_requests_are_refused(houses: dict[str, House]) -> None:
    house = houses["process"]
    client = ZygoteClient(str(house.directory / "run"), str(house.directory / "ws"), plain=True)
    for op, body, words in (
        ("nonsense", {}, "does not know"),
        ("start", {"id": "x", "workspace": "y"}, "one listening socket"),
        ("start", {"bogus": 1}, "bogus"),
        ("remove", {}, "id"),
        ("end", {"pid": "x", "start_time": 1}, "invalid literal"),
    ):
        with pytest.raises(PlatformError, match=words):
            await client.request(op, **body)
    with pytest.raises(PlatformError, match="too large"):
        await client.request("describe", filler="x" * 300_000)
    assert (await client.request("describe"))["sandboxes"] == 1
    await client.close()


async def test_a_zygote_that_is_not_there_knows_nothing(tmp_path: Path) -> None:
    client = ZygoteClient(str(tmp_path), str(tmp_path), plain=True)
    assert await client.known("remove", id="x") == {}
    await client.close()
    assert os.listdir(tmp_path) == []


async def test_the_environment_of_a_zygote_has_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CARREL_TEST_SECRET", "hush")
    where = tmp_path / "z"
    where.mkdir()
    client = ZygoteClient(str(where), str(where), plain=True)
    pid = (await client.request("describe"))["pid"]
    assert b"hush" not in Path(f"/proc/{pid}/environ").read_bytes()
    await client.close()
    shutil.rmtree(where)
