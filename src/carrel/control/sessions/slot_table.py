"""The bookkeeping of slots: which pools there are, how many slots each wants, and which slot a sandbox gets.

Pure: no I/O and no clock. `slots` starts, checks and ends the slots as this table says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from carrel.primitives.backoff import Backoff
from carrel.providers.base import Handle, Launch

GROWN_S = 60.0
"""How long a pool that has run dry stays larger than its usual size."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""The pause after slots of a pool could not be started, or ended by themselves."""

SlotState = Literal["starting", "ready", "ending"]


class SlotCounts(NamedTuple):
    """The usual size of a pool, and the size to which it may grow when it runs dry."""

    size: int
    most: int


@dataclass(frozen=True, slots=True)
class SlotKind:
    """The sandboxes that a pool is for: they have equal kinds. `launch` is that of their slots."""

    provider: str
    template: str | None
    image: str | None
    digest: str | None
    launch: Launch


@dataclass(eq=False, slots=True)
class Slot:
    """One slot of a pool. It has a handle once it has started."""

    id: str
    pool: SlotPool
    state: SlotState = "starting"
    handle: Handle | None = None
    since: float = 0.0
    """When it had started."""


@dataclass(eq=False, slots=True)
class SlotPool:
    """The slots of one kind, in the order in which they were begun."""

    kind: SlotKind
    counts: SlotCounts
    asked_at: float
    """When a sandbox of this kind was last asked for."""
    wanted: int
    slots: list[Slot] = field(default_factory=list)
    drained: bool = False
    """Whether it shall have no slots until a sandbox of its kind is asked for again."""
    dry_at: float = 0.0
    dry: bool = False
    """Whether it has run dry, and has not been full since."""
    claimed: int = 0
    cold_starts: int = 0
    last_failure: str | None = None
    """Why the newest slot could not be started; None once a slot has proved to work since."""
    retry_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S))

    def in_state(self, state: SlotState) -> list[Slot]:
        """Return the slots in a state, the oldest first."""
        return [slot for slot in self.slots if slot.state == state]

    @property
    def target(self) -> int:
        """The number of slots that it should have, as far as there is room."""
        return 0 if self.drained else self.wanted


class SlotMoves(NamedTuple):
    """Slots to start and slots to end. They are in these states already."""

    start: list[Slot]
    end: list[Slot]


class SlotTable:
    """The pools of a server. `most` is the number of slots that it may have, `at_once` how many may be starting,
    `most_pools` how many pools are remembered, `idle_s` how long a pool is filled that nobody asks for.
    """

    def __init__(self, new_id: Callable[[], str], *, most: int, at_once: int, most_pools: int, idle_s: float):
        self._new_id = new_id
        self._most = most
        self._at_once = at_once
        self._most_pools = most_pools
        self._idle_s = idle_s
        self.pools: list[SlotPool] = []

    @property
    def present(self) -> int:
        """The number of slots. One that ends needs its room until it has ended."""
        return sum(len(pool.slots) for pool in self.pools)

    def find(self, kind: SlotKind) -> SlotPool | None:
        """Return the pool of a kind. Launches hold mappings, so kinds have no hash."""
        return next((pool for pool in self.pools if pool.kind == kind), None)

    def add(self, kind: SlotKind, counts: SlotCounts, now: float) -> SlotPool:
        """Return the pool of a kind, which is made if there is none."""
        pool = self.find(kind)
        if pool is None:
            pool = SlotPool(kind, counts, now, counts.size, cold_starts=1)
            self.pools.append(pool)
        return pool

    def resize(self, pool: SlotPool, counts: SlotCounts) -> None:
        """Give a pool another size. It keeps what it has grown by, as far as it may."""
        if counts != pool.counts:
            grown = pool.wanted > pool.counts.size
            pool.wanted = min(max(pool.wanted, counts.size), counts.most) if grown else counts.size
            pool.counts = counts

    # claiming

    def take(self, pool: SlotPool, now: float) -> Slot | None:
        """Return the oldest ready slot, which is now the caller's and nobody else's. None: it is dry and grows."""
        pool.asked_at, pool.drained = now, False
        slot = next((slot for slot in pool.slots if slot.state == "ready"), None)
        if slot is not None:
            pool.slots.remove(slot)
        elif pool.wanted:
            pool.wanted = min(pool.counts.most, 2 * pool.wanted)
            pool.dry_at, pool.dry = now, True
        return slot

    def worked(self, pool: SlotPool) -> None:
        """Note that a slot of a pool still runs, or was claimed."""
        pool.backoff.reset()
        pool.last_failure, pool.retry_at = None, 0.0

    # the life of a slot

    def started(self, slot: Slot, handle: Handle, now: float) -> None:
        """Note that a slot waits for its owner, unless it shall end."""
        slot.handle, slot.since = handle, now
        if slot.state == "starting":
            slot.state = "ready"
        if len(slot.pool.in_state("ready")) >= slot.pool.counts.size:
            slot.pool.dry = False

    def failed(self, pool: SlotPool, why: str, now: float) -> None:
        """Note that a slot of a pool could not be started or has ended by itself: the next one waits a while."""
        pool.last_failure = why
        pool.retry_at = now + pool.backoff.next_pause()

    def too_old(self, pool: SlotPool, lifetime_s: float, now: float) -> list[Slot]:
        """Return the slots of a pool that wait longer than they may."""
        return [slot for slot in pool.in_state("ready") if now - slot.since > lifetime_s]

    def gone(self, slot: Slot) -> None:
        """Forget a slot that has ended, or whose start failed."""
        if slot in slot.pool.slots:
            slot.pool.slots.remove(slot)

    def end(self, slot: Slot) -> None:
        """Let a slot end that is not wanted or does not run any more."""
        slot.state = "ending"

    # deciding

    def age(self, now: float) -> None:
        """Drain pools that nobody asks for, and shrink those that have not run dry for a while."""
        for pool in self.pools:
            if now - pool.asked_at > self._idle_s:
                pool.drained = True
            if now - pool.dry_at > GROWN_S:
                pool.dry = False
                pool.wanted = min(pool.wanted, pool.counts.size)
        for pool in self._latest_first()[self._most_pools :]:
            pool.drained = True

    def forget(self) -> list[SlotPool]:
        """Remove drained pools without a slot, and return them."""
        left = [pool for pool in self.pools if pool.drained and not pool.slots]
        self.pools = [pool for pool in self.pools if pool not in left]
        return left

    def moves(self, now: float, room: int) -> SlotMoves:
        """Return the slots to start and to end now. `room` is how many slots fit beside the sandboxes of the server."""
        most = max(0, min(self._most, room))
        shares = self._shares(most)
        end: list[Slot] = []
        for pool, share in shares:
            # What is not ready yet is no loss, and of ready slots the oldest is.
            living = [*reversed(pool.in_state("starting")), *pool.in_state("ready")]
            end += living[: max(0, len(living) - share)]
        for slot in end:
            self.end(slot)
        present = self.present
        starting = sum(len(pool.in_state("starting")) for pool in self.pools)
        start: list[Slot] = []
        for pool, share in shares:
            missing = share - len(pool.in_state("starting")) - len(pool.in_state("ready"))
            if now < pool.retry_at:
                missing = 0
            elif pool.last_failure is not None:
                missing = min(missing, 1 - len(pool.in_state("starting")))  # one that shows whether it works again
            for _ in range(max(0, min(missing, most - present, self._at_once - starting))):
                slot = Slot(self._new_id(), pool)
                pool.slots.append(slot)
                start.append(slot)
                present, starting = present + 1, starting + 1
        return SlotMoves(start, end)

    def _latest_first(self) -> list[SlotPool]:
        return sorted(self.pools, key=lambda pool: -pool.asked_at)

    def _shares(self, most: int) -> list[tuple[SlotPool, int]]:
        """Divide the slots among the pools: first each gets its usual size, those that were asked for last before
        others; then each keeps what it has; then they grow. So growth never takes a slot from another pool.
        """
        order = self._latest_first()
        shares = [0] * len(order)
        left = most
        limits: list[Callable[[SlotPool], int]] = [
            lambda pool: pool.counts.size,
            lambda pool: len(pool.in_state("starting")) + len(pool.in_state("ready")),
            lambda pool: pool.target,
        ]
        for limit in limits:
            for at, pool in enumerate(order):
                more = min(left, max(0, min(pool.target, limit(pool)) - shares[at]))
                shares[at] += more
                left -= more
        return list(zip(order, shares, strict=True))
