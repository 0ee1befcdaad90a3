"""Decides on which server a request is answered. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from carrel.control.nodes.workers import server_of, worker_name
from carrel.store.nodes import Holding

CLEARLY, CLEARLY_SHARE = 2, 0.25
"""How many more sandboxes than another a worker has, at least and as a share, until a new one goes to the other."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server that answers and that requests can be forwarded to; or this one."""

    name: str
    sandboxes: int
    capacity: int
    providers: Collection[str]

    @property
    def has_room(self) -> bool:
        return self.sandboxes < self.capacity

    @property
    def load(self) -> float:
        """The share of its sandboxes that is in use; 1 and more: it is full."""
        return self.sandboxes / self.capacity if self.capacity > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Here:
    """This server answers."""


@dataclass(frozen=True, slots=True)
class There:
    """The server `node` answers."""

    node: str


@dataclass(frozen=True, slots=True)
class Silent:
    """The session belongs to the server `node`, which does not answer, for `seconds` more."""

    node: str
    seconds: float


Place = Here | There | Silent
HERE = Here()


def place_of(holding: Holding | None, me: str, alive: Collection[str]) -> Place:
    """Return where requests for a session are answered. `alive` are the other servers and workers that answer.

    The owner of the lease answers. Without one the server with the files does, and without that any: this one. Of the
    workers of a server each can, but folders of the host are for the first: what guards them is in one process.
    """
    if holding is None:
        return HERE
    if holding.owner is not None:
        if holding.owner == me:
            return HERE
        return There(holding.owner) if holding.owner in alive else Silent(holding.owner, holding.lease_left_s)
    if holding.node is not None and (holding.folder or holding.node != server_of(me)):
        workers = sorted(name for name in alive if server_of(name) == holding.node)
        first = worker_name(holding.node, 0)
        if holding.folder and (me == first or first in workers):
            return HERE if me == first else There(first)
        if workers and holding.node != server_of(me):
            return There(workers[0])
    return HERE


def choose(
    candidates: Mapping[str, Candidate], me: str, *, files: str | None, movable: bool, provider: str | None
) -> str:
    """Return the server that starts the sandbox of a context that nobody owns.

    It is the one with the files, while it has room or they cannot be `movable`. Else it is the one with the lowest load
    among those with room and the provider; of equals, this one, then by name. `me` if there is none: it refuses.
    """
    holders = [each for each in candidates.values() if server_of(each.name) == files]
    roomy = [each for each in holders if each.has_room]
    if holders and (roomy or not movable):
        return _least(roomy or holders, me)
    fitting = [
        each for each in candidates.values() if each.has_room and (provider is None or provider in each.providers)
    ]
    if not fitting:
        return _least(holders, me) if holders else me
    return _least(fitting, me)


def _least(fitting: Sequence[Candidate], me: str) -> str:
    """Return the one with the lowest load; a worker takes what it got itself, unless another is clearly emptier."""
    least = min(fitting, key=lambda each: (each.load, each.name != me, each.name))
    mine = next((each for each in fitting if each.name == me), None)
    if mine is None or server_of(least.name) != server_of(me):
        return least.name
    return me if mine.sandboxes - least.sandboxes <= max(CLEARLY, least.sandboxes * CLEARLY_SHARE) else least.name
