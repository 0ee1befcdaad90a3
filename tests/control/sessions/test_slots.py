"""Slots of a control plane, with a provider whose slots are real sandboxes.

`CARREL_CLAIMS=500` makes the claims that many, `CARREL_CLAIM_SEED=7` repeats an order of kills.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from tests.support.calls import ADMIN
from tests.support.killed import killed
from tests.support.sandboxes import until
from tests.support.slot_claims import FILES, many_claims, said, start
from tests.support.slots import SlotProvider, slot_provider
from tests.support.stored_images import layer, small, store

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.errors import InvalidRequest, LimitExceeded, NotFound, Unsupported
from carrel.isolation import probe
from carrel.models import SandboxRequest, State
from carrel.models.events import EventFilter, EventKind, StoredEvent
from carrel.models.pools import PoolInfo, PoolResize
from carrel.providers.base import Handle, Launch

pytestmark = pytest.mark.skipif(probe.host().missing is not None, reason="needs the namespace provider")

CLAIMS = int(os.environ.get("CARREL_CLAIMS", "64"))
SEED = int(os.environ.get("CARREL_CLAIM_SEED", "1"))


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"max_sandboxes": 100})


@pytest.fixture
def provider(settings: Settings) -> SlotProvider:
    return slot_provider(settings)


@pytest.fixture
async def plane(settings: Settings, provider: SlotProvider) -> AsyncIterator[ControlPlane]:
    plane = await ControlPlane.open(settings, providers={"namespace": provider})
    yield plane
    await plane.close()
    assert provider.slots == {}, "no slot outlives the server"


def pool(plane: ControlPlane, template: str | None = None) -> PoolInfo | None:
    found = [each for each in plane.pools.list().items if each.template == template]
    assert len(found) <= 1
    return found[0] if found else None


async def filled(plane: ControlPlane, count: int = 2, template: str | None = None) -> PoolInfo:
    """Wait until a pool has that many slots, and no others."""

    def full() -> PoolInfo | None:
        found = pool(plane, template)
        return found if found is not None and (found.ready, found.starting) == (count, 0) else None

    info = await until(full, what=f"{count} slots, not {pool(plane, template)}")
    assert isinstance(info, PoolInfo)
    return info


def handle_of(plane: ControlPlane, name: str) -> Handle:
    box = plane.sessions.find_live(name)
    assert box is not None
    return box.handle


async def test_the_first_start_is_cold_and_the_next_claims(plane: ControlPlane, provider: SlotProvider) -> None:
    assert plane.pools.list().items == []
    first = await start(plane, "first")
    assert handle_of(plane, "first")["id"] == first
    info = await filled(plane)
    assert (info.provider, info.wanted, info.claimed, info.cold_starts, info.last_failure) == (
        "namespace", 2, 0, 1, None,
    )  # fmt: skip
    slots = set(provider.slots)
    second = await start(plane, "second", env={"WHO": "second"})
    handle = handle_of(plane, "second")
    assert handle["id"] in slots and handle["id"] != second, "the slot keeps its id"
    assert await said(plane, "second", FILES + "echo $WHO; echo x > mine") == "second\n"
    assert Path(plane.driver.directory, "ctx-second", "mine").read_text() == "x\n"
    assert (await filled(plane)).claimed == 1 and provider.cold == 1
    text = plane.metrics.render()[0].decode()
    assert 'carrel_pool_claims_total{provider="namespace",result="claimed"} 1.0' in text
    assert 'carrel_pool_slots{provider="namespace",state="ready"} 2.0' in text


async def test_what_cannot_come_late_starts_cold(plane: ControlPlane, provider: SlotProvider) -> None:
    await start(plane, "first")
    await filled(plane)
    await start(plane, "small", limits={"memory_mb": 64})
    assert provider.claims == [] and provider.cold == 2, "a slot with another memory limit is not what was asked for"
    await until(lambda: len(plane.pools.list().items) == 2)
    assert {each.memory_mb for each in plane.pools.list().items} == {2048, 64}


async def test_a_slot_that_died_is_not_noticed(plane: ControlPlane, provider: SlotProvider) -> None:
    await start(plane, "first")
    await filled(plane)
    for handle in list(provider.slots.values()):
        os.kill(int(handle["pid"] or 0), signal.SIGKILL)
        await until(lambda handle=handle: _gone(provider, handle))
    await start(plane, "second")
    assert await said(plane, "second", "echo hi") == "hi\n"
    assert handle_of(plane, "second")["id"] == (await plane.sessions.get("second")).id, "it started cold"
    assert plane.metrics.render()[0].decode().count('result="died"} 2.0') == 1
    info = pool(plane)
    assert info is not None and info.last_failure == "a slot could not be claimed: the slot has ended by itself"
    await until(lambda: plane._slots.check() if pool(plane).ready < 2 else _done())  # type: ignore[union-attr]


async def _gone(provider: SlotProvider, handle: Handle) -> bool:
    return not await provider.alive(handle)


async def _done() -> bool:
    return True


async def test_dead_slots_are_found_by_the_check(plane: ControlPlane, provider: SlotProvider) -> None:
    await start(plane, "first")
    await filled(plane)
    old = dict(provider.slots)
    for handle in old.values():
        os.kill(int(handle["pid"] or 0), signal.SIGKILL)
        await until(lambda handle=handle: _gone(provider, handle))

    async def renewed() -> bool:
        await plane._slots.check()
        info = pool(plane)
        return info is not None and info.ready == 2 and not set(provider.slots) & set(old)

    await until(renewed)
    assert set(await provider.running()) == {handle_of(plane, "first")["id"], *provider.slots}


@pytest.mark.parametrize("when", ["looks", "claims", "fails"])
async def test_a_cancelled_claim_leaves_nothing(
    plane: ControlPlane, provider: SlotProvider, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    await start(plane, "first")
    await filled(plane)
    reached = asyncio.Event()
    claim = provider.claim

    async def looking(_handle: Handle) -> bool:
        reached.set()
        await asyncio.Event().wait()
        return True

    async def slow(slot: Handle, launch: Launch) -> Handle:
        if when == "fails":
            await provider.remove(slot)
            raise Unsupported("a mask cannot be applied")
        handle = await claim(slot, launch)
        reached.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await provider.remove(handle)
            raise
        return handle

    monkeypatch.setattr(provider, *(("alive", looking) if when == "looks" else ("claim", slow)))
    task = asyncio.ensure_future(start(plane, "second"))
    if when == "fails":
        with pytest.raises(Unsupported, match="a mask cannot be applied"):
            await task
    else:
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    monkeypatch.undo()
    await filled(plane)
    assert set(await provider.running()) == {handle_of(plane, "first")["id"], *provider.slots}
    await start(plane, "second")
    assert await said(plane, "second", FILES) == ""


async def test_a_pool_that_cannot_start_slots_says_why_and_waits(plane: ControlPlane, provider: SlotProvider) -> None:
    provider.failing = "the daemon is down"
    await start(plane, "first")
    info = await until(lambda: (found := pool(plane)) and found.last_failure and found)
    assert (info.last_failure, info.ready) == ("the daemon is down", 0)
    await start(plane, "second")
    provider.failing = None
    await until(lambda: plane._slots.check() if pool(plane).ready < 2 else _done())  # type: ignore[union-attr]
    await plane._slots.check()
    assert (await filled(plane, 4)).last_failure is None, "it had run dry and grew"


async def happened(plane: ControlPlane, kind: EventKind) -> list[dict[str, object]]:
    """Return the bodies of all events of a kind that no context has."""
    await plane.events.append([plane.events.draft(EventKind.LOG, None, None, {})])  # the ones before it are stored too
    wanted, found = EventFilter(kinds=frozenset({kind})), list[StoredEvent]()
    async with aclosing(plane.events.follow(wanted, 0, until=await plane.events.settled())) as pages:
        async for page in pages:
            found += page.events
    assert {(each.context_id, each.session_id) for each in found} <= {(None, None)}
    return [json.loads(each.body) for each in found]


async def test_a_dry_pool_is_told_once_until_it_is_full_again(plane: ControlPlane, provider: SlotProvider) -> None:
    await start(plane, "first")
    await filled(plane)
    assert await happened(plane, EventKind.POOL_DRY) == []
    provider.failing = "the daemon is down"
    for number in range(5):
        await start(plane, f"next-{number}")
    told = await happened(plane, EventKind.POOL_DRY)
    assert len(told) == 1, "the third to the fifth found none"
    assert (told[0]["provider"], told[0]["size"], told[0]["most"]) == ("namespace", 2, 8)
    provider.failing = None
    await until(lambda: plane._slots.check() if pool(plane).ready < 8 else _done())  # type: ignore[union-attr]
    await filled(plane, 8)
    provider.failing = "the daemon is down again"
    for number in range(9):
        await start(plane, f"last-{number}")
    assert len(await happened(plane, EventKind.POOL_DRY)) == 2


async def test_slots_make_room_for_sandboxes(settings: Settings) -> None:
    provider = slot_provider(settings)
    small = settings.model_copy(update={"max_sandboxes": 3})
    plane = await ControlPlane.open(small, providers={"namespace": provider})
    try:
        await start(plane, "a")
        await filled(plane)
        await start(plane, "b", limits={"memory_mb": 64})
        await until(lambda: len(provider.slots) == 1)
        await start(plane, "c", limits={"memory_mb": 64})
        await until(lambda: not provider.slots)
        with pytest.raises(LimitExceeded):
            await start(plane, "d")
        assert len(await provider.running()) == 3
    finally:
        await plane.close()


async def test_sizes_come_from_templates_and_change_while_it_runs(
    plane: ControlPlane, provider: SlotProvider, settings: Settings
) -> None:
    folder = Path(settings.data_dir, "templates", "mine")
    folder.mkdir(parents=True)
    (folder / "template.toml").write_text("pool = { size = 1, max = 3 }\n")
    await start(plane, "first", template="mine")
    info = await filled(plane, 1, "mine")
    assert (info.size, info.max) == (1, 3)
    await start(plane, "other")
    await filled(plane, 2)
    [info] = (await plane.pools.resize(ADMIN, "mine", PoolResize(size=2))).items
    assert (info.template, info.size) == ("mine", 2)
    await filled(plane, 2, "mine")
    resized = await plane.pools.resize(ADMIN, "namespace", PoolResize(size=0))
    assert [each.wanted for each in resized.items] == [0, 2], "a template with a size of its own keeps it"
    await filled(plane, 0)
    await start(plane, "third")
    assert handle_of(plane, "third")["id"] == (await plane.sessions.get("third")).id
    for name, size, error in (("nothing", 1, NotFound), ("namespace", 9, InvalidRequest)):
        with pytest.raises(error):
            await plane.pools.resize(ADMIN, name, PoolResize(size=size))
    (folder / "template.toml").unlink()
    folder.rmdir()
    plane.templates._known.clear()
    await until(lambda: plane._slots.check() if pool(plane, "mine") else _done())
    await until(lambda: len(provider.slots) == 0)


async def test_an_idle_pool_ends_its_slots(settings: Settings) -> None:
    provider = slot_provider(settings)
    idle = settings.model_copy(update={"pool": settings.pool.model_copy(update={"idle_s": 0.2})})
    plane = await ControlPlane.open(idle, providers={"namespace": provider})
    try:
        await start(plane, "first")
        await until(lambda: provider.slots)
        await until(lambda: plane._slots.check() if pool(plane) else _done())
        assert provider.slots == {} and await provider.running() == [handle_of(plane, "first")["id"]]
    finally:
        await plane.close()


async def test_slots_keep_their_image_until_it_changes_or_is_removed(
    plane: ControlPlane, provider: SlotProvider
) -> None:
    content, storage = layer(small), plane.images._storage
    await store(storage, "small:1", content, environment={"PATH": "/usr/bin:/bin", "GREETING": "hello"})
    await start(plane, "first", image="small:1")
    await filled(plane)
    old = set(provider.slots)
    await start(plane, "second", image="small:1")
    assert handle_of(plane, "second")["id"] in old
    assert await said(plane, "second", "echo $GREETING") == "hello\n"
    for name in ("first", "second"):
        await plane.sessions.terminate(ADMIN, name)
    await filled(plane)
    assert storage.collect((), max_bytes=0, unused_s=0).images == (), "slots hold their image"
    await store(storage, "small:1", content, environment={"PATH": "/usr/bin:/bin", "GREETING": "changed"})
    await until(lambda: plane._slots.check() if pool(plane) else _done())
    assert provider.slots == {}, "a slot from an image that its name does not mean any more is ended"
    await start(plane, "third", image="small:1")
    await filled(plane)
    await plane.sessions.terminate(ADMIN, "third")
    await plane.images.remove(ADMIN, "small:1")
    assert provider.slots == {} and pool(plane) is None


async def test_own_work_of_carrel_makes_no_pool_known(plane: ControlPlane) -> None:
    await plane.sessions.start_own(SandboxRequest(), acts_for="")
    await asyncio.gather(*plane._slots._learning)
    assert plane.pools.list().items == []


async def test_a_new_server_takes_over_claimed_slots_and_ends_the_others(
    plane: ControlPlane, provider: SlotProvider, settings: Settings
) -> None:
    await start(plane, "first")
    await filled(plane)
    await start(plane, "second")
    ephemeral = await start(plane, None)
    await said(plane, "second", "echo kept > file; (sleep 4321 &)")
    handles = {name: handle_of(plane, name) for name in ("first", "second", ephemeral)}
    assert str(handles["second"]["id"]).startswith("slot-")
    await filled(plane)
    slots = set(provider.slots)
    await killed(plane)
    other_provider = slot_provider(settings)
    other = await ControlPlane.open(settings, providers={"namespace": other_provider})
    try:
        assert other.recovered.adopted == 3
        assert set(await other_provider.running()) == {handle["id"] for handle in handles.values()}
        assert not slots & set(await other_provider.running())
        assert handle_of(other, "second") == handles["second"]
        assert await said(other, "second", "cat file; pgrep -c sleep") == "kept\n1\n"
        assert await said(other, ephemeral, "echo alive") == "alive\n"
        await other.sessions.stop("second")
        await start(other, "second")
        assert await said(other, "second", "cat file") == "kept\n"
    finally:
        await other.close()
        provider.slots.clear()  # the new server has ended them


async def test_a_half_claimed_slot_is_ended_and_its_files_stay(
    plane: ControlPlane, provider: SlotProvider, settings: Settings
) -> None:
    """As if the server was killed after the claim and before the handle was written."""
    await start(plane, "first")
    await filled(plane)
    await start(plane, "second")
    await said(plane, "second", "echo kept > file")
    record = await plane.sessions.record("second")
    await filled(plane)
    await plane.store.update(record.id, fence=record.fence, state=State.CREATING, handle=None)
    await killed(plane)
    other_provider = slot_provider(settings)
    other = await ControlPlane.open(settings, providers={"namespace": other_provider})
    try:
        assert await other_provider.running() == [handle_of(other, "first")["id"]]
        assert (await other.sessions.get("second")).state is State.STOPPED
        await start(other, "second")
        assert await said(other, "second", "cat file") == "kept\n"
    finally:
        await other.close()
        provider.slots.clear()


async def test_many_claims_while_slots_are_killed(settings: Settings) -> None:
    provider = slot_provider(settings)
    sized = settings.model_copy(update={"pool": settings.pool.model_copy(update={"size": 8, "max": 8})})
    plane = await ControlPlane.open(sized, providers={"namespace": provider})
    try:
        await many_claims(plane, provider, CLAIMS, SEED)
    finally:
        await plane.close()
