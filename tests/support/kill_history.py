"""What one file may have held at every moment, in a workspace and in its filespace. Pure: no clock, no client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

Content = bytes | None
"""What a file holds; None where there is none."""

Contents = frozenset[Content]
NOTHING: Contents = frozenset({None})


class Broken(AssertionError):
    """The server broke a promise."""


class FileHistory:
    """What one file of a workspace may have held, at every moment."""

    def __init__(self) -> None:
        self._moments: list[tuple[float, Contents]] = [(-math.inf, NOTHING)]

    @property
    def now(self) -> Contents:
        """What it may hold now."""
        return self._moments[-1][1]

    def may_become(self, contents: Contents, when: float) -> None:
        """Something was asked that has not been answered."""
        self._moments.append((when, self.now | contents))

    def becomes(self, contents: Contents, when: float) -> None:
        """It holds one of these from now on: something was answered."""
        self._moments.append((when, contents))

    def seen(self, content: Content, when: float) -> None:
        """Somebody looked, and it can be."""
        self._moments.append((when, frozenset({content})))

    def between(self, start: float, end: float) -> Contents:
        """What somebody may have seen who looked once, somewhere between."""
        seen: Contents = frozenset()
        for index, (when, contents) in enumerate(self._moments):
            until = self._moments[index + 1][0] if index + 1 < len(self._moments) else math.inf
            if when <= end and until >= start:
                seen |= contents
        return seen


class Sides(NamedTuple):
    """A file in its workspace (here), in its filespace (there), and as both last had it in common (base).

    `gone` is what was deleted there; `sent` is what a push has read here and not stored there yet.
    """

    base: Content = None
    here: Content = None
    there: Content = None
    gone: Content = None
    sent: Content = None


Step = Callable[[Sides], Iterable[Sides]]
"""What the server may do with both sides: each thing that it may come to."""


def _commons(sides: Sides) -> set[Content]:
    """What may count as common: also what is here, when the filespace says that this very content was deleted."""
    deleted_there = sides.here is not None and sides.there is None and sides.gone == sides.here
    return {sides.base, sides.here} if deleted_there else {sides.base}


def written(sides: Sides, content: Content) -> Sides:
    """The filespace gets another content, or loses the file."""
    if content is not None:
        return sides._replace(there=content, gone=None)
    return sides if sides.there is None else sides._replace(there=None, gone=sides.there)


def _alike(sides: Sides) -> Sides:
    return written(sides, sides.here)._replace(base=sides.here)


def _taken(sides: Sides) -> Sides:
    return sides._replace(base=sides.there, here=sides.there)


def pushed(sides: Sides) -> Iterator[Sides]:
    """The workspace's changes reach the filespace; of two writes the workspace's wins."""
    for base in _commons(sides):
        _, here, there, _, _ = sides
        if here == there:
            yield sides._replace(base=here)
        elif here == base or (here is None and there != base):
            yield sides._replace(base=base)
        else:
            yield _alike(sides)


def pulled(sides: Sides) -> Iterator[Sides]:
    """The filespace's changes reach the workspace; of two writes the filespace's wins."""
    for base in _commons(sides):
        _, here, there, _, _ = sides
        if here in {base, there} or (there is not None and there != base):
            yield _taken(sides)
        elif there == base:
            yield sides._replace(base=base)
        else:  # a write here beats a deletion there
            yield sides._replace(base=None)


def met(sides: Sides) -> Iterator[Sides]:
    """A pull, then a push of what is left: both are the same afterwards."""
    for base in _commons(sides):
        if sides.here == base or (sides.there is not None and sides.there != base):
            yield _taken(sides)
        else:
            yield _alike(sides)


def emptied(sides: Sides) -> Iterator[Sides]:
    """The workspace is deleted, and what it had in common with its filespace is forgotten."""
    yield sides._replace(base=None, here=None)


@dataclass
class Scene:
    """What the server may do at any moment now: push by itself, and what it was asked and has not answered."""

    pushes: bool = False
    steps: list[Step] = field(default_factory=list)


class SyncedHistory(FileHistory):
    """A file that is synced: every combination of both sides that may be, given what the scene may do meanwhile.

    A push that takes something else than what is there when it stores it matters only where both sides are written by
    clients: such a file is `contested`.
    """

    def __init__(self, scene: Scene, *, contested: bool = False, states: Iterable[Sides] = (Sides(),)):
        super().__init__()
        self._scene = scene
        self._contested = contested
        self._here: Contents = frozenset()
        self._there: Contents = frozenset()
        self._states = set(states)
        self.events = 0
        """How many things clients have done with it."""

    @property
    def there(self) -> Contents:
        """What the filespace may hold now."""
        return frozenset(sides.there for sides in self._states)

    def may_become(self, contents: Contents, when: float) -> None:
        """A write to the workspace was asked."""
        self._here |= contents
        self._event(when)

    def becomes(self, contents: Contents, when: float) -> None:
        """A write to the workspace was answered."""
        self._here = frozenset()
        self._states = {sides._replace(here=content) for sides in self._states for content in contents}
        self._event(when)

    def may_be_stored(self, content: Content, when: float) -> None:
        """A write to the filespace was asked."""
        self._there |= {content}
        self._event(when)

    def is_stored(self, content: Content, when: float) -> None:
        """A write to the filespace was answered."""
        self._there = frozenset()
        self._states = {written(sides, content) for sides in self._states}
        self._event(when)

    def seen(self, content: Content, when: float) -> None:
        """Somebody looked at the workspace."""
        self._states = {sides for sides in self._states if sides.here == content}
        self.look_again(when)

    def seen_there(self, content: Content, when: float) -> None:
        """Somebody looked at the filespace."""
        self._there = frozenset()
        self._states = {sides for sides in self._states if sides.there == content}
        self.look_again(when)

    def does(self, step: Step, when: float) -> None:
        """The server has done something, whatever else it did before."""
        self._states = {after for sides in self._states if sides.sent is None for after in step(sides)}
        self.look_again(when)

    def settle(self, when: float) -> None:
        """The server was killed: what was asked and is not done will not be."""
        self._states = {sides for sides in self._states if sides.sent is None}
        self._here = self._there = frozenset()
        self._moments.append((when, frozenset(sides.here for sides in self._states)))

    def emptied(self, scene: Scene) -> SyncedHistory:
        """The file of a new workspace with the same filespace."""
        left = {after for sides in self._states if sides.sent is None for after in emptied(sides)}
        return SyncedHistory(scene, contested=self._contested, states=left)

    def look_again(self, when: float) -> None:
        """Add everything that may happen from here on without a client knowing."""
        todo = list(self._states)
        while todo:
            for after in self._next(todo.pop()):
                if after not in self._states:
                    self._states.add(after)
                    todo.append(after)
        heres = frozenset(sides.here for sides in self._states)
        if heres != self.now:
            self._moments.append((when, heres))

    def _event(self, when: float) -> None:
        self.events += 1
        self.look_again(when)

    def _next(self, sides: Sides) -> Iterator[Sides]:
        if sides.sent is not None:
            yield sides._replace(base=sides.sent, there=sides.sent, gone=None, sent=None)
        else:
            for step in (*((pushed,) if self._scene.pushes else ()), *self._scene.steps):
                yield from step(sides)
        if (
            self._contested
            and self._scene.pushes
            and sides.sent is None
            and any(after.there != sides.there for after in pushed(sides))
        ):
            yield sides._replace(sent=sides.here)
        for content in self._here:
            yield sides._replace(here=content)
        for content in self._there:
            yield written(sides, content)
