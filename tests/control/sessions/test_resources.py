from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from tests.control.sessions.test_live import Nowhere, _box

from carrel.control.sessions import resources
from carrel.control.sessions.live import LiveSandboxes
from carrel.control.sessions.resources import Resources
from carrel.errors import PlatformError
from carrel.metrics import Metrics
from carrel.providers.base import Handle, ResourceUse


class Counted(Nowhere):
    """Says what its sandboxes use, and counts how often it was asked for how many."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.memory = 100
        self.fails = False

    async def resources(self, handles: Sequence[Handle]) -> Mapping[str, ResourceUse]:
        await asyncio.sleep(0)
        if self.fails:
            raise PlatformError("it is away")
        self.asked.append(len(handles))
        return {str(handle["id"]): ResourceUse(1.5, self.memory, None) for handle in handles}


def shown(metrics: Metrics) -> set[str]:
    text = metrics.render()[0].decode()
    return {line.partition("{")[2].partition("}")[0] for line in text.splitlines() if "sandbox_memory_bytes{" in line}


async def test_who_asks_at_once_shares_one_measurement_of_a_few() -> None:
    live, metrics, provider = LiveSandboxes(), Metrics(), Counted()
    for number in range(5):
        box = _box(provider, f"sbx-{number}", f"c{number}")
        box.last_activity = float(number)
        live.add(box)
    found = Resources(live, metrics, most=2)
    answers = await asyncio.gather(*(found.measure() for _ in range(20)))
    assert all(set(answer) == {"sbx-3", "sbx-4"} for answer in answers), "those that were used last"
    assert provider.asked == [2]
    assert shown(metrics) == {'sandbox="sbx-3",template=""', 'sandbox="sbx-4",template=""'}


async def test_series_end_with_their_sandbox_also_before_the_next_measurement() -> None:
    live, metrics, provider = LiveSandboxes(), Metrics(), Counted()
    box = _box(provider)
    live.add(box)
    found = Resources(live, metrics, most=10)
    assert set(await found.measure()) == {"sbx-1"}

    class Detached:
        def detach(self, box: object) -> None:
            return

    await live.end(box, Detached())
    assert await found.measure() == {}
    assert shown(metrics) == set()
    assert provider.asked == [1]


async def test_the_peak_is_the_most_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "FRESH_S", 0.0)
    live, provider = LiveSandboxes(), Counted()
    live.add(_box(provider))
    found = Resources(live, Metrics(), most=10)
    for memory, peak in ((100, 100), (300, 300), (200, 300)):
        provider.memory = memory
        assert (await found.measure())["sbx-1"] == ResourceUse(1.5, memory, peak)


async def test_a_provider_that_fails_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    live, metrics, good, bad = LiveSandboxes(), Metrics(), Counted(), Counted()
    bad.fails = True
    live.add(_box(good, "sbx-good", "a"))
    live.add(_box(bad, "sbx-bad", "b"))
    assert set(await Resources(live, metrics, most=10).measure()) == {"sbx-good"}


async def test_none_are_measured_if_the_setting_says_so() -> None:
    live, provider = LiveSandboxes(), Counted()
    live.add(_box(provider))
    assert await Resources(live, Metrics(), most=0).measure() == {}
    assert provider.asked == []
