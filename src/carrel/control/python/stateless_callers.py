"""The routing table of calls without a context: which sandbox a call gets, who waits, and whose turn it is.

Pure: no I/O, no clock, no tasks. Whoever has the table tells it what happened, and does what it says.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

from carrel.config import RouterSettings

Owner = tuple[str, str | None]
"""Whose calls a sandbox runs: the name of a token, and its namespace."""
State = Literal["starting", "idle", "busy", "emptying", "ending"]
_MEMORY_STEP = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Load:
    """How much is held in a sandbox, as its last answer told."""

    memory_bytes: int = 0


@dataclass(eq=False, slots=True)
class Place:
    """A sandbox in the table. One without an owner is a spare: nothing has run in it."""

    template: str | None
    owner: Owner | None
    state: State
    id: str = ""
    reusable: bool = False
    """Whether it can be emptied; else it runs one call only."""
    entered: bool = False
    """Whether its owner was admitted to it."""
    slow: bool = False
    """Whether it takes long to be emptied: nobody counts on it then."""
    envs: set[str] = field(default_factory=set)
    used_at: float = 0.0
    load: Load = Load()


@dataclass(eq=False, slots=True)
class Wish:
    """A call that waits for a sandbox."""

    owner: Owner
    template: str | None
    env: str | None


@dataclass(slots=True)
class Moves:
    """What is to be done now."""

    given: list[tuple[Wish, Place]] = field(default_factory=list)
    """Who gets which sandbox. One that is `starting` has to be started first."""
    to_end: list[Place] = field(default_factory=list)
    """Those that are to make room."""
    refused: list[Wish] = field(default_factory=list)
    """Those that are too many to wait."""


class RoutingTable:
    """The sandboxes there are, and the calls that wait."""

    def __init__(self, settings: RouterSettings):
        self.settings = settings
        self.places: dict[Place, None] = {}
        self._lines: OrderedDict[Owner, deque[Wish]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return sum(map(len, self._lines.values()))

    @property
    def memory_bytes(self) -> int:
        """How much all the sandboxes held when they last answered."""
        return sum(each.load.memory_bytes for each in self.places)

    @property
    def idle(self) -> int:
        """How many sandboxes nobody uses."""
        return sum(each.state == "idle" for each in self.places)

    def ask(self, owner: Owner, template: str | None, env: str | None) -> Wish:
        """A call comes; `match` says what it gets."""
        wish = Wish(owner, template, env)
        self._lines.setdefault(owner, deque()).append(wish)
        return wish

    def leave(self, wish: Wish) -> None:
        """A call waits no longer."""
        line = self._lines.get(wish.owner)
        if line is not None and wish in line:
            line.remove(wish)
            if not line:
                del self._lines[wish.owner]

    def forget(self, place: Place) -> None:
        """A sandbox is gone."""
        self.places.pop(place, None)

    def match(self) -> Moves:
        """Give what is free to those who wait, to each caller in turn. One whose turn it is and for whom nothing fits
        gets room made before another gets what is free. Those that are too many to wait are refused, the last of the
        longest line first.
        """
        moves = Moves()
        while self._serve(moves):
            pass
        counted_on: set[Place] = set()
        waiting = [wish for line in self._lines.values() for wish in line]
        hopeful = sum(self._count_on(wish, counted_on, "emptying", "idle") for wish in waiting)
        self._make_room(len(waiting) - hopeful, moves, counted_on)
        while self.waiting - hopeful > self.settings.queue:
            last = max(reversed(self._lines.values()), key=len)[-1]
            self.leave(last)
            moves.refused.append(last)
        return moves

    def _serve(self, moves: Moves) -> bool:
        """One turn for each caller; whether somebody got something."""
        served, missing = False, 0
        counted_on: set[Place] = set()
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

    def spare(self, template: str | None) -> Place | None:
        """One to be started ahead, where one is missing and nobody needs the room."""
        spares = sum(each.owner is None and each.template == template for each in self.places)
        if self._lines or spares >= self.settings.spares or len(self.places) >= self.settings.max_sandboxes:
            return None
        return self._new(template, None)

    def _wait(self, wish: Wish, counted_on: set[Place]) -> bool:
        """Whether a call gets one of the caller's that is about to be ready, as no other of the caller's is free."""
        own = any(each.state == "idle" and each.owner is not None for each in self._fitting(wish))
        return not own and self._count_on(wish, counted_on, "emptying")

    def _take(self, wish: Wish) -> Place | None:
        """Of the template: one of the caller's with the environment, one of the caller's, a spare, a new one."""
        idle = [each for each in self._fitting(wish) if each.state == "idle"]
        if idle:
            place = max(idle, key=lambda each: _merit(each, wish))
            place.state, place.owner = "busy", wish.owner
            return place
        if len(self.places) >= self.settings.max_sandboxes:
            return None
        return self._new(wish.template, wish.owner)

    def _fitting(self, wish: Wish) -> Iterator[Place]:
        return (each for each in self.places if each.template == wish.template and each.owner in {wish.owner, None})

    def _count_on(self, wish: Wish, counted_on: set[Place], *states: State) -> bool:
        """Whether there is a sandbox in such a state that nobody before this one counts on."""
        for each in self._fitting(wish):
            if each.state in states and not each.slow and each not in counted_on:
                counted_on.add(each)
                return True
        return False

    def _make_room(self, wanted: int, moves: Moves, kept: Collection[Place]) -> None:
        """End those that nobody uses nor counts on, as many as are wanted, the longest unused first."""
        room = self.settings.max_sandboxes - len(self.places)
        missing = wanted - room - sum(each.state == "ending" for each in self.places)
        if missing > 0:
            idle = [each for each in self.places if each.state == "idle" and each not in kept]
            for place in sorted(idle, key=lambda each: each.used_at)[:missing]:
                place.state = "ending"
                moves.to_end.append(place)

    def _new(self, template: str | None, owner: Owner | None) -> Place:
        place = Place(template, owner, "starting")
        self.places[place] = None
        return place


def _merit(place: Place, wish: Wish) -> tuple[bool, bool, int, float]:
    """What speaks for a sandbox: it has the environment, it is the caller's already, little is held in it, it was used
    not long ago.
    """
    held = place.load.memory_bytes // _MEMORY_STEP
    return wish.env in place.envs, place.owner is not None, -held, place.used_at
