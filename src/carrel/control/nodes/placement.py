"""Decides on which server a request is answered. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from carrel.store.nodes import Holding


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
    """Return where requests for a session are answered. `alive` are the other servers that answer.

    The owner of the lease answers. Without one the server with the files does, and without that any: this one.
    """
    if holding is None:
        return HERE
    if holding.owner is not None:
        if holding.owner == me:
            return HERE
        return There(holding.owner) if holding.owner in alive else Silent(holding.owner, holding.lease_left_s)
    if holding.node is None or holding.node == me or holding.node not in alive:
        return HERE
    return There(holding.node)


def choose(
    candidates: Mapping[str, Candidate], me: str, *, files: str | None, movable: bool, provider: str | None
) -> str:
    """Return the server that starts the sandbox of a context that nobody owns.

    It is the one with the files, while it has room or they cannot be `movable`. Else it is the one with the lowest load
    among those with room and the provider; of equals, this one, then by name. `me` if there is none: it refuses.
    """
    holder = candidates.get(files or "")
    if holder is not None and (holder.has_room or not movable):
        return holder.name
    fitting = [
        each for each in candidates.values() if each.has_room and (provider is None or provider in each.providers)
    ]
    if not fitting:
        return me if holder is None else holder.name
    return min(fitting, key=lambda each: (each.load, each.name != me, each.name)).name
