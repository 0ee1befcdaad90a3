from __future__ import annotations

import time

import pytest

from carrel.control.sessions.live import LiveSandbox, LiveSandboxes
from carrel.errors import PlatformError
from carrel.models import Limits, Network, State, Trust
from carrel.providers.base import Capability, Handle, Launch, Provider
from carrel.store import SessionRecord


class Nowhere(Provider):
    """A provider that only remembers what it removed."""

    name, isolation_level = "nowhere", 1

    def __init__(self) -> None:
        self.removed: list[Handle] = []

    def capabilities(self) -> frozenset[Capability]:
        return frozenset()

    def missing(self) -> str | None:
        return None

    async def start(self, launch: Launch) -> Handle:
        raise NotImplementedError

    async def alive(self, handle: Handle) -> bool:
        return handle not in self.removed

    async def remove(self, handle: Handle) -> None:
        self.removed.append(handle)


class Detached:
    """Nothing is attached."""

    def detach(self, box: LiveSandbox) -> None:
        return


def _box(provider: Provider, name: str = "sbx-1", context: str | None = "c") -> LiveSandbox:
    record = SessionRecord(
        name, context, context is None, State.RUNNING, "nowhere", 1, False, Trust.MEDIUM, Network.NONE, Limits(), 1.0, 1.0
    )  # fmt: skip
    return LiveSandbox(record, provider, {"provider": "nowhere", "id": name, "socket": "/nowhere"}, "/nowhere")


async def test_a_sandbox_is_found_by_id_and_by_context_until_it_ends() -> None:
    provider, live = Nowhere(), LiveSandboxes()
    box, other = _box(provider), _box(provider, "eph-2", None)
    live.add(box)
    live.add(other)
    assert live.find("c") is live.find("sbx-1") is live.get("sbx-1") is box
    assert live.find("eph-2") is other
    assert live.find("") is None and live.get("c") is None
    assert len(live) == 2
    await live.end(box, Detached())
    assert provider.removed == [box.handle]
    assert live.find("c") is None and not live.has(box) and live.all() == [other]


async def test_the_end_of_one_does_not_hide_its_successor() -> None:
    provider, live = Nowhere(), LiveSandboxes()
    old, new = _box(provider), _box(provider)
    live.add(old)
    live.add(new)
    await live.end(old, Detached())
    assert live.find("c") is new


async def test_use_marks_everything_and_a_lease_that_ran_out_refuses() -> None:
    box = _box(Nowhere())
    box.used = box.changed = box.to_push = False
    box.touch()
    assert box.used and box.changed and box.to_push
    assert time.time() - box.last_activity < 10
    box.check_lease()
    box.leased_until = 0.0
    with pytest.raises(PlatformError, match="could not be renewed"):
        box.check_lease()
