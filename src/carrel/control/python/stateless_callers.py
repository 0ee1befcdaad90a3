"""The routing table of calls without a context: which sandbox a call gets, which calls wait, and in which order.

Pure: no I/O, no clock, no tasks. Its owner reports events and carries out the moves that it returns.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

from carrel.config import RouterSettings

Owner = tuple[str, str | None]
"""The caller whose calls a sandbox runs: the subject of a token, and its namespace."""
State = Literal["starting", "idle", "busy", "emptying", "ending"]
_MEMORY_STEP = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory that a sandbox uses, by its last answer."""

    memory_bytes: int = 0


@dataclass(eq=False, slots=True)
class PooledSandbox:
    """A sandbox in the table. One without an owner is a spare that nobody used."""

    template: str | None
    owner: Owner | None
    state: State
    id: str = ""
    reusable: bool = False
    """Whether it can be emptied; else it runs only one call."""
    entered: bool = False
    """Whether its owner's use of it was admitted."""
    slow: bool = False
    """Whether emptying takes long: then no call waits for it."""
    envs: set[str] = field(default_factory=set)
    used_at: float = 0.0
    load: MemoryUse = MemoryUse()


@dataclass(eq=False, slots=True)
class WaitingCall:
    """A call that waits for a sandbox."""

    owner: Owner
    template: str | None
    env: str | None


@dataclass(slots=True)
class Moves:
    """The actions to carry out now."""

    given: list[tuple[WaitingCall, PooledSandbox]] = field(default_factory=list)
    """Which call gets which sandbox. One in state `starting` has to be started first."""
    to_end: list[PooledSandbox] = field(default_factory=list)
    """Sandboxes to end, to make room."""
    refused: list[WaitingCall] = field(default_factory=list)
    """Calls that are refused because too many wait."""


class RoutingTable:
    """The sandboxes, and the calls that wait."""

    def __init__(self, settings: RouterSettings):
        self.settings = settings
        self.places: dict[PooledSandbox, None] = {}
        self._lines: OrderedDict[Owner, deque[WaitingCall]] = OrderedDict()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def memory_bytes(self) -> int:
        """The memory of all sandboxes, by their last answers."""
        return sum(each.load.memory_bytes for each in self.places)

    @property
    def idle(self) -> int:
        return sum(each.state == "idle" for each in self.places)

    def ask(self, owner: Owner, template: str | None, env: str | None) -> WaitingCall:
        """Add a call; `match` decides which sandbox it gets."""
        wish = WaitingCall(owner, template, env)
        self._lines.setdefault(owner, deque()).append(wish)
        return wish

    def leave(self, wish: WaitingCall) -> None:
        """Remove a call that waits no longer."""
        line = self._lines.get(wish.owner)
        if line is not None and wish in line:
            line.remove(wish)
            if not line:
                del self._lines[wish.owner]

    def forget(self, place: PooledSandbox) -> None:
        """Remove a sandbox that has ended."""
        self.places.pop(place, None)

    def match(self) -> Moves:
        """Give free sandboxes to waiting calls, to each caller in turn. If no free sandbox fits the caller whose turn
        it is, room is made for it before another caller gets one. Calls beyond the limit of the queue are refused, the
        last of the longest queue first.
        """
        moves = Moves()
        while self._serve(moves):
            pass
        counted_on: set[PooledSandbox] = set()
        waiting = [wish for line in self._lines.values() for wish in line]
        hopeful = sum(self._count_on(wish, counted_on, "emptying", "idle") for wish in waiting)
        self._make_room(len(waiting) - hopeful, moves, counted_on)
        while self.waiting - hopeful > self.settings.queue:
            last = max(reversed(self._lines.values()), key=len)[-1]
            self.leave(last)
            moves.refused.append(last)
        return moves

    def _serve(self, moves: Moves) -> bool:
        """Serve each caller once; return whether any call got a sandbox."""
        served, missing = False, 0
        counted_on: set[PooledSandbox] = set()
        for owner in list(self._lines):
            wish = self._lines[owner][0]
            if self._wait(wish, counted_on):
                continue
            place = self._take(wish)
            if place is None:
                missing += 1
                self._make_room(missing, moves, ())
                continue
            moves.given.append((wish, place))
            self.leave(wish)
            if owner in self._lines:
                self._lines.move_to_end(owner)
            served = True
        return served

    def spare(self, template: str | None) -> PooledSandbox | None:
        """Return a spare to start, if one is missing and no call needs the room."""
        spares = sum(each.owner is None and each.template == template for each in self.places)
        if self._lines or spares >= self.settings.spares or len(self.places) >= self.settings.max_sandboxes:
            return None
        return self._new(template, None)

    def _wait(self, wish: WaitingCall, counted_on: set[PooledSandbox]) -> bool:
        """Whether a call should wait for a sandbox of its caller that is being emptied, because no other is free."""
        own = any(each.state == "idle" and each.owner is not None for each in self._fitting(wish))
        return not own and self._count_on(wish, counted_on, "emptying")

    def _take(self, wish: WaitingCall) -> PooledSandbox | None:
        """Take a sandbox of the template, in this order: one of the caller with the environment, one of the caller, a
        spare, a new one.
        """
        idle = [each for each in self._fitting(wish) if each.state == "idle"]
        if idle:
            place = max(idle, key=lambda each: _merit(each, wish))
            place.state, place.owner = "busy", wish.owner
            return place
        if len(self.places) >= self.settings.max_sandboxes:
            return None
        return self._new(wish.template, wish.owner)

    def _fitting(self, wish: WaitingCall) -> Iterator[PooledSandbox]:
        return (each for each in self.places if each.template == wish.template and each.owner in {wish.owner, None})

    def _count_on(self, wish: WaitingCall, counted_on: set[PooledSandbox], *states: State) -> bool:
        """Whether a sandbox in one of these states is left that no earlier call waits for."""
        for each in self._fitting(wish):
            if each.state in states and not each.slow and each not in counted_on:
                counted_on.add(each)
                return True
        return False

    def _make_room(self, wanted: int, moves: Moves, kept: Collection[PooledSandbox]) -> None:
        """End as many idle sandboxes as wanted, except those that calls wait for, the longest unused first."""
        room = self.settings.max_sandboxes - len(self.places)
        missing = wanted - room - sum(each.state == "ending" for each in self.places)
        if missing > 0:
            idle = [each for each in self.places if each.state == "idle" and each not in kept]
            for place in sorted(idle, key=lambda each: each.used_at)[:missing]:
                place.state = "ending"
                moves.to_end.append(place)

    def _new(self, template: str | None, owner: Owner | None) -> PooledSandbox:
        place = PooledSandbox(template, owner, "starting")
        self.places[place] = None
        return place


def _merit(place: PooledSandbox, wish: WaitingCall) -> tuple[bool, bool, int, float]:
    """Rank a sandbox for a call: it has the environment, it is the caller's already, it uses little memory, it was used
    recently.
    """
    held = place.load.memory_bytes // _MEMORY_STEP
    return wish.env in place.envs, place.owner is not None, -held, place.used_at
