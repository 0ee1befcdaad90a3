"""How much one sandbox may take of the way out: connections at once, new ones in a minute, bytes each way.

Counts for as long as the proxy runs for the sandbox; a new policy changes the limits, not what was taken.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from carrel.egress.access import Access, Refused
from carrel.egress.outbound.rules import Limits

CONNECTIONS = 256
PER_MINUTE = 6000
"""What holds where no policy says anything."""
REFUSALS = 600
"""How many refusals within a minute are written down one by one: who is refused can try again at once, and the log
would be as long as a sandbox likes.
"""

_MINUTE_S = 60.0


class Budget:
    """What one sandbox has taken."""

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic):
        self._limits = limits
        self._clock = clock
        self._recent: deque[float] = deque()
        self._refusals: deque[float] = deque()
        self._unwritten = 0
        self.open = 0
        """Connections that are open now."""
        self.sent = 0
        self.received = 0

    @property
    def connections(self) -> int:
        """The most connections at once."""
        return CONNECTIONS if self._limits.connections is None else self._limits.connections

    @property
    def per_minute(self) -> int:
        """The most new connections, and requests over those that are open, within any minute."""
        return PER_MINUTE if self._limits.per_minute is None else self._limits.per_minute

    def change(self, limits: Limits) -> None:
        """Other limits hold from now on."""
        self._limits = limits

    def enter(self) -> None:
        """One more connection. Raises `Refused` when that is one too many, and then takes nothing."""
        if self.open >= self.connections:
            raise _exceeded(
                f"{self.connections} connections are open, and more are not allowed at once",
                hint="close some, then try again",
                retry=True,
            )
        self.count()
        self.open += 1

    def count(self) -> None:
        """One more connection or request. Raises `Refused` when that is one too many."""
        self._check_bytes()
        now = self._clock()
        _forget(self._recent, now)
        if len(self._recent) >= self.per_minute:
            raise _exceeded(
                f"{self.per_minute} connections and requests were made within a minute, and more are not allowed",
                hint="wait a moment, then try again",
                retry=True,
            )
        self._recent.append(now)

    def write_refusal(self) -> int | None:
        """Whether one more refusal is to be written down: how many before it were not, or None."""
        now = self._clock()
        _forget(self._refusals, now)
        if len(self._refusals) >= REFUSALS:
            self._unwritten += 1
            return None
        self._refusals.append(now)
        unwritten, self._unwritten = self._unwritten, 0
        return unwritten

    def leave(self) -> None:
        """A connection that entered has ended."""
        self.open -= 1

    def take(self, sent: int, received: int) -> None:
        """Bytes went through. Raises `Refused` once they are too many."""
        self.sent += sent
        self.received += received
        self._check_bytes()

    def _check_bytes(self) -> None:
        limits = self._limits
        if limits.download_bytes is not None and self.received > limits.download_bytes:
            raise _exceeded(f"the sandbox has received its {_megabytes(limits.download_bytes)}")
        if limits.upload_bytes is not None and self.sent > limits.upload_bytes:
            raise _exceeded(f"the sandbox has sent its {_megabytes(limits.upload_bytes)}")


class Meter:
    """Counts the bytes of one access, and ends it where it, or the sandbox, has had enough."""

    __slots__ = ("_access", "_budget", "_most")

    def __init__(self, access: Access, budget: Budget, most_received: int | None = None):
        self._access = access
        self._budget = budget
        self._most = most_received

    def sent(self, size: int) -> None:
        """So many bytes came from the sandbox. Raises `Refused`: they must not go on."""
        self._access.sent += size
        self._budget.take(size, 0)

    def received(self, size: int) -> None:
        """So many bytes came for the sandbox. Raises `Refused`: they must not go on."""
        self._access.received += size
        self._budget.take(0, size)
        if self._most is not None and self._access.received > self._most:
            raise _exceeded(f"one connection to {self._access.target} may bring {_megabytes(self._most)}")


def _forget(moments: deque[float], now: float) -> None:
    while moments and moments[0] <= now - _MINUTE_S:
        moments.popleft()


def _exceeded(reason: str, *, hint: str | None = None, retry: bool = False) -> Refused:
    return Refused(reason, code="limit_exceeded", status=429, hint=hint, retry=retry)


def _megabytes(size: int) -> str:
    return f"{size / (1 << 20):.0f} MB at most" if size >= 1 << 20 else f"{size} bytes at most"
