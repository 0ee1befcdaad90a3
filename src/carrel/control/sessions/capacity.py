"""How many sandboxes this server may have, and how many it has or starts."""

from __future__ import annotations

from carrel.control.sessions.live import LiveSandboxes
from carrel.errors import LimitExceeded


class Capacity:
    """The limit on the sandboxes of one server. A sandbox that starts has its place already."""

    def __init__(self, most: int, live: LiveSandboxes, *, of_server: int):
        """`most` is the part of this worker, `of_server` that of all workers together."""
        self._most = most
        self._of_server = of_server
        self._live = live
        self._under_way = 0

    @property
    def free(self) -> int:
        """How many more sandboxes there may be."""
        return self._most - len(self._live) - self._under_way

    def check(self) -> None:
        """Raise `LimitExceeded` when no place is free."""
        if self.free <= 0:
            raise LimitExceeded(
                f"{self._of_server} sandboxes run already", hint="terminate some, or raise CARREL_MAX_SANDBOXES"
            )

    def begin(self) -> None:
        """Take a place for a start."""
        self._under_way += 1

    def end(self) -> None:
        """Give the place of a start back: the sandbox runs, or there is none."""
        self._under_way -= 1
