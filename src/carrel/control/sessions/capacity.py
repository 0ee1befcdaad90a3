"""How many sandboxes this server may have, and how many it has or starts."""

from __future__ import annotations

from carrel.control.nodes.workers import Worker
from carrel.control.sessions.live import LiveSandboxes
from carrel.errors import LimitExceeded


class Capacity:
    """The limit on the sandboxes of one server. A sandbox that starts has its place already."""

    def __init__(self, most: int, live: LiveSandboxes, worker: Worker):
        """`most` is for all workers of the server together."""
        self._most = most
        self._worker = worker
        live.on_change.append(self._tell)
        self._live = live
        self._under_way = 0

    @property
    def free(self) -> int:
        """How many more sandboxes there may be."""
        return self._most - self._worker.places_of_others() - self._here

    @property
    def _here(self) -> int:
        return len(self._live) + self._under_way

    def check(self) -> None:
        """Raise `LimitExceeded` when no place is free."""
        if self.free <= 0:
            raise self._full()

    def begin(self) -> None:
        """Take a place for a start. Raises `LimitExceeded` when another worker was quicker."""
        self._under_way += 1
        self._tell()  # before the look: of two workers that take the last place at once, none sees room
        if self._worker.count > 1 and self.free < 0:
            self.end()
            raise self._full()

    def _full(self) -> LimitExceeded:
        return LimitExceeded(
            f"{self._most} sandboxes run already", hint="terminate some, or raise CARREL_MAX_SANDBOXES"
        )

    def _tell(self) -> None:
        self._worker.tell_places(self._here)

    def end(self) -> None:
        """Give the place of a start back: the sandbox runs, or there is none."""
        self._under_way -= 1
        self._tell()
