"""Slots: warm sandboxes of slow providers, which get their owner late. Starts them ahead, checks and ends them, and
gives each to one start of a sandbox.

`slot_table` decides how many there are. A sandbox that no slot fits starts cold: nothing that a provider cannot add to
a slot is left out, because then the launches of their slots differ (`Provider.slot_for`). Knows no session.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from carrel.config import PoolSettings
from carrel.control.nodes.workers import Worker
from carrel.control.sessions.capacity import Capacity
from carrel.control.sessions.slot_sizes import PoolSizes
from carrel.control.sessions.slot_table import Slot, SlotKind, SlotPool, SlotState, SlotTable
from carrel.errors import CarrelError, InvalidRequest, PlatformError
from carrel.events import EventLog
from carrel.images.storage import ImageStorage, RootHold
from carrel.metrics import Metrics
from carrel.models.events import EventKind
from carrel.primitives import tasks
from carrel.providers.base import Handle, Launch, Provider
from carrel.threads import run_to_end
from carrel.tracing import span

log = logging.getLogger("carrel.slots")

CHECK_EVERY_S = 2.0
AT_ONCE = max(1, (os.cpu_count() or 2) // 2)
"""How many slots are started at once: agents need the processors too."""
REFILL_AFTER_S = 0.1
"""How long after a claim the next slot is started: the first command of the new sandbox goes before it."""
MOST_POOLS = 64
MOST_CLAIMS = 2
"""How many slots that die a start tries to claim before it starts cold."""
_LONGEST_REASON = 500
_CLOSE_AT_ONCE = 32

SLOT = "slot-"
"""How the ids of all slots begin."""

StillMeans = Callable[[str, str], bool]
"""Whether the name of an image still means the image with a digest. Blocking."""


class Slots:
    """The slots of one server."""

    def __init__(
        self,
        settings: PoolSettings,
        providers: Mapping[str, Provider],
        sizes: PoolSizes,
        capacity: Capacity,
        metrics: Metrics,
        events: EventLog,
        storage: ImageStorage,
        still_means: StillMeans,
        worker: Worker,
    ):
        slots_prefix = slot_prefix(worker)
        self._providers = dict(providers)
        self._sizes = sizes
        self._capacity = capacity
        self._metrics = metrics
        self._events = events
        self._storage = storage
        self._still_means = still_means
        self._table = SlotTable(
            lambda: f"{slots_prefix}{secrets.token_hex(8)}",
            most=worker.share(settings.max),
            at_once=AT_ONCE,
            most_pools=MOST_POOLS,
            idle_s=settings.idle_s or float("inf"),
        )
        self._tasks: dict[Slot, asyncio.Task[None]] = {}
        """What is done with slots: each is started, or ended."""
        self._learning: set[asyncio.Task[None]] = set()
        self._holds: dict[SlotPool, RootHold] = {}
        """Keeps the images of slots on the disk."""
        self._measured = {provider.name for provider in providers.values() if has_slots(provider)}
        self._closing = False

    @property
    def pools(self) -> list[SlotPool]:
        """The pools, in the order in which they became known."""
        return list(self._table.pools)

    # a sandbox starts

    async def start(
        self,
        provider: Provider,
        launch: Launch,
        *,
        template: str | None,
        image: str | None,
        digest: str | None,
        lasting: bool,
    ) -> Handle:
        """Start a sandbox: from a slot if one fits and is ready, otherwise cold. Raises as `Provider.start` does.

        With `lasting`, more sandboxes of this kind are expected: the first one makes its pool known.
        """
        fitting = provider.slot_for(launch)
        if fitting is None:
            return await self._start_cold(provider, launch)
        kind = SlotKind(provider.name, template, image, digest, fitting)
        pool = None if self._closing else self._table.find(kind)
        if pool is not None:
            for _ in range(MOST_CLAIMS):
                if (slot := self._take(pool)) is None:
                    break
                if (handle := await self._claim(provider, slot, launch)) is not None:
                    return handle
            pool.cold_starts += 1
        if self._capacity.free < self._table.present:
            self._turn()  # the sandbox needs the room of a slot
        # From here on the only await is the start: a handle that is not returned would be lost.
        handle = await self._start_cold(provider, launch)
        if pool is None and lasting and not self._closing:
            self._learn(kind)
        else:
            self._turn()
        return handle

    @staticmethod
    async def _start_cold(provider: Provider, launch: Launch) -> Handle:
        with span("start", provider=provider.name):
            return await provider.start(launch)

    def _take(self, pool: SlotPool) -> Slot | None:
        was_dry = pool.dry
        slot = self._table.take(pool, time.monotonic())
        self._measure()
        if slot is None and pool.counts.size:
            self._metrics.pool_claimed(pool.kind.provider, "dry")
            log.info("no slot of %s is ready: a sandbox starts cold", _name(pool.kind))
        if pool.dry and not was_dry:
            self._events.tell([self._events.draft(EventKind.POOL_DRY, None, None, _told(pool))])
        return slot

    async def _claim(self, provider: Provider, slot: Slot, launch: Launch) -> Handle | None:
        """Claim a slot, which is this start's alone. None: it has died, or could not be claimed, and is removed."""
        assert slot.handle is not None
        pool, claimed = slot.pool, None
        try:
            if not await provider.alive(slot.handle):
                raise PlatformError("the slot has ended by itself")
            with span("claim", provider=provider.name):
                claimed = await provider.claim(slot.handle, launch)
        except BaseException as error:
            await self._remove_to_end(provider, slot.handle)
            if not isinstance(error, PlatformError):
                raise
            self._lost(pool, f"a slot could not be claimed: {error.detail}")
            return None
        finally:
            asyncio.get_running_loop().call_later(REFILL_AFTER_S, self._turn)
        pool.claimed += 1
        self._table.worked(pool)
        self._metrics.pool_claimed(provider.name, "claimed")
        return claimed

    async def _remove_to_end(self, provider: Provider, handle: Handle) -> None:
        """Remove a slot, also when the caller is cancelled meanwhile: nobody else knows it any more."""

        async def remove() -> None:
            try:
                await provider.remove(handle)
            except Exception:
                log.exception("slot %s could not be removed", handle["id"])

        removal = asyncio.ensure_future(remove())
        cancelled = False
        while not removal.done():
            try:
                await asyncio.shield(removal)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    def _lost(self, pool: SlotPool, why: str) -> None:
        self._metrics.pool_claimed(pool.kind.provider, "died")
        self._failed(pool, why)

    def _failed(self, pool: SlotPool, why: str) -> None:
        log.warning("%s: %s", _name(pool.kind), why[:_LONGEST_REASON])
        self._table.failed(pool, why[:_LONGEST_REASON], time.monotonic())

    # pools become known

    def _learn(self, kind: SlotKind) -> None:
        task = asyncio.ensure_future(self._add(kind))
        self._learning.add(task)
        task.add_done_callback(self._learning.discard)

    async def _add(self, kind: SlotKind) -> None:
        """Make a pool, which keeps its image on the disk."""
        try:
            counts = await self._sizes.of(kind.provider, kind.template)
            hold = None
            if kind.image is not None and kind.digest is not None:
                image, digest = kind.image, kind.digest
                if not await asyncio.to_thread(self._still_means, image, digest):
                    return  # new sandboxes have another image
                hold = await run_to_end(lambda: self._storage.hold(digest), RootHold.release)
        except CarrelError as error:  # the template or the image is gone already
            log.info("there is no pool for %s: %s", _name(kind), error)
            return
        if self._closing or self._table.find(kind) is not None:
            if hold is not None:
                hold.release()
            return
        pool = self._table.add(kind, counts, time.monotonic())
        if hold is not None:
            self._holds[pool] = hold
        self._turn()

    # slots start and end

    def _turn(self) -> None:
        """Carry out the moves of the table."""
        if self._closing:
            return
        moves = self._table.moves(time.monotonic(), self._capacity.free)
        for slot in moves.start:
            self._do(slot, self._start(slot))
        for slot in moves.end:
            self._end(slot)
        self._measure()

    def _do(self, slot: Slot, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[slot] = asyncio.ensure_future(work)

        def done(_task: asyncio.Task[None]) -> None:
            if self._tasks.get(slot) is task:
                del self._tasks[slot]
            self._turn()

        task.add_done_callback(done)

    async def _start(self, slot: Slot) -> None:
        pool = slot.pool
        provider = self._providers[pool.kind.provider]
        try:
            began = time.monotonic()
            handle = await provider.start_slot(replace(pool.kind.launch, id=slot.id))
            self._table.started(slot, handle, began)
            self._measure()
        except asyncio.CancelledError:
            self._table.gone(slot)
            raise
        except Exception as error:
            if not isinstance(error, CarrelError):
                log.exception("a slot could not be started")
            self._table.gone(slot)
            self._failed(pool, error.detail if isinstance(error, CarrelError) else type(error).__name__)

    def _end(self, slot: Slot) -> None:
        """End a slot that the table lets end. One that starts is cancelled, and then leaves nothing behind."""
        if slot.handle is None:
            if (task := self._tasks.get(slot)) is not None:
                task.cancel()
        elif slot not in self._tasks:
            self._do(slot, self._remove(slot, slot.handle))

    async def _remove(self, slot: Slot, handle: Handle) -> None:
        try:
            await self._providers[slot.pool.kind.provider].remove(handle)
        except Exception:
            log.exception("slot %s could not be removed; it is tried again", slot.id)
        else:
            self._table.gone(slot)

    # upkeep

    async def check(self) -> None:
        """Look for slots that have died and for pools that are stale, and follow the sizes in settings and templates.
        Called every few seconds.
        """
        self._table.age(time.monotonic())
        for pool in self.pools:
            if pool.drained:
                continue
            if (why := await self._stale(pool)) is not None:
                log.info("%s is drained: %s", _name(pool.kind), why)
                pool.drained = True
            await self._check_slots(pool)
        for pool in self.pools:
            for slot in pool.in_state("ending"):  # a removal may have failed
                self._end(slot)
        for pool in self._table.forget():
            self._release(pool)
        self._turn()

    async def _stale(self, pool: SlotPool) -> str | None:
        """Return why a pool's sandboxes are not made any more; None if they are. Its sizes may have changed too."""
        kind = pool.kind
        try:
            counts = await self._sizes.of(kind.provider, kind.template)
            rebuilt = await self._sizes.rebuilt(kind.template, kind.image)
        except InvalidRequest as error:
            return f"its template cannot be used any more: {error.detail}"
        except CarrelError as error:
            log.warning("%s keeps its size: %s", _name(kind), error)
            return None
        self._table.resize(pool, counts)
        if rebuilt:
            return "the image of its template was built anew"
        if kind.image is None or kind.digest is None:
            return None
        image, digest = kind.image, kind.digest
        means = await asyncio.to_thread(self._still_means, image, digest)
        return None if means else "its image has changed or is gone"

    async def _check_slots(self, pool: SlotPool) -> None:
        provider = self._providers[pool.kind.provider]
        for slot in self._table.too_old(pool, provider.slot_lifetime_s, time.monotonic()):
            log.info("%s: a slot has waited for as long as it may, and is replaced", _name(pool.kind))
            self._table.end(slot)
            self._end(slot)
        for slot in pool.in_state("ready"):
            handle = slot.handle
            assert handle is not None
            try:
                alive = await provider.alive(handle)
            except Exception:
                log.exception("slot %s cannot be checked", slot.id)
                continue
            if slot.state != "ready" or slot not in pool.slots:  # it was claimed meanwhile
                continue
            if alive:
                self._table.worked(pool)
            else:
                self._lost(pool, "a slot has ended by itself")
                self._table.end(slot)
                self._end(slot)

    async def resized(self) -> None:
        """Follow sizes that were changed just now."""
        for pool in self.pools:
            self._table.resize(pool, await self._sizes.of(pool.kind.provider, pool.kind.template))
        self._turn()

    async def leave_image(self, digest: str) -> None:
        """End all slots from an image, so that it can be removed."""
        left = [pool for pool in self.pools if pool.kind.digest == digest]
        for pool in left:
            pool.drained = True
        self._turn()
        ending = [self._tasks[slot] for pool in left for slot in pool.slots if slot in self._tasks]
        await asyncio.gather(*ending, return_exceptions=True)
        for pool in self._table.forget():
            self._release(pool)

    def _release(self, pool: SlotPool) -> None:
        if (hold := self._holds.pop(pool, None)) is not None:
            hold.release()

    def _measure(self) -> None:
        counts = Counter((slot.pool.kind.provider, slot.state) for pool in self._table.pools for slot in pool.slots)
        states: tuple[SlotState, ...] = ("starting", "ready")
        self._metrics.pool_slots({(name, state): counts[name, state] for name in self._measured for state in states})

    async def close(self) -> None:
        """End every slot that has no owner. Starts of sandboxes go on, without slots."""
        self._closing = True
        await tasks.cancel(self._learning)
        await tasks.cancel(list(self._tasks.values()))
        gate = asyncio.Semaphore(_CLOSE_AT_ONCE)

        async def end(slot: Slot) -> None:
            async with gate:
                if slot.handle is not None:
                    await self._remove(slot, slot.handle)

        await asyncio.gather(*(end(slot) for pool in self.pools for slot in list(pool.slots)))
        for pool in self.pools:
            self._release(pool)


def slot_prefix(worker: Worker) -> str:
    """Return how the ids of the slots of a worker begin."""
    return SLOT if worker.count == 1 else f"{SLOT}{worker.index}-"


def has_slots(provider: Provider) -> bool:
    """Whether a provider starts slots at all."""
    return type(provider).start_slot is not Provider.start_slot


def _told(pool: SlotPool) -> dict[str, object]:
    """Return what the event of a dry pool says."""
    return {
        "provider": pool.kind.provider,
        "template": pool.kind.template,
        "image": pool.kind.image,
        "size": pool.counts.size,
        "most": pool.counts.most,
        "starting": len(pool.in_state("starting")),
        "last_failure": pool.last_failure,
    }


def _name(kind: SlotKind) -> str:
    words = [f"the pool of provider {kind.provider}"]
    if kind.template is not None:
        words.append(f"template {kind.template}")
    if kind.image is not None:
        words.append(f"image {kind.image}")
    return ", ".join(words)
