"""The limits of one sandbox: open connections, new connections in a minute, bytes each way.

Counts as long as the proxy serves the sandbox; a new policy changes the limits, not the counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from carrel.egress.access import Access, AccessRefused
from carrel.egress.outbound.rules import EgressLimits

CONNECTIONS = 256
PER_MINUTE = 6000
"""The limits if no policy sets any."""
REFUSALS = 600
"""How many refusals in a minute are logged one by one: a refused program can try again at once, and the log would grow
as fast as it likes.
"""

_MINUTE_S = 60.0


class Budget:
    """The connections and bytes of one sandbox."""

    def __init__(self, limits: EgressLimits, *, clock: Callable[[], float] = time.monotonic):
        self._limits = limits
        self._clock = clock
        self._recent: deque[float] = deque()
        self._refusals: deque[float] = deque()
        self._unlogged = 0
        self.open = 0
        self.sent = 0
        self.received = 0

    @property
    def connections(self) -> int:
        """The limit on open connections."""
        return CONNECTIONS if self._limits.connections is None else self._limits.connections

    @property
    def per_minute(self) -> int:
        """The limit on new connections, and requests over open ones, in any minute."""
        return PER_MINUTE if self._limits.per_minute is None else self._limits.per_minute

    def change(self, limits: EgressLimits) -> None:
        """Replace the limits."""
        self._limits = limits

    def enter(self) -> None:
        """Count a connection that opens. Raises `AccessRefused`, and counts nothing, when it is over a limit."""
        if self.open >= self.connections:
            raise _exceeded(
                f"{self.connections} connections are open, and more are not allowed at once",
                hint="close some, then try again",
                retry=True,
            )
        self.count()
        self.open += 1

    def count(self) -> None:
        """Count a connection or request. Raises `AccessRefused` when it is over a limit."""
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

    def log_refusal(self) -> int | None:
        """Return how many refusals before this one were not logged, or None when this one is not logged either."""
        now = self._clock()
        _forget(self._refusals, now)
        if len(self._refusals) >= REFUSALS:
            self._unlogged += 1
            return None
        self._refusals.append(now)
        unlogged, self._unlogged = self._unlogged, 0
        return unlogged

    def leave(self) -> None:
        """Count a connection that ends."""
        self.open -= 1

    def take(self, sent: int, received: int) -> None:
        """Count bytes. Raises `AccessRefused` when they are over a limit."""
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
    """Counts the bytes of one access, and refuses more when it or the sandbox is over its limit."""

    __slots__ = ("_access", "_budget", "_most")

    def __init__(self, access: Access, budget: Budget, most_received: int | None = None):
        self._access = access
        self._budget = budget
        self._most = most_received

    def sent(self, size: int) -> None:
        """Count bytes from the sandbox. Raises `AccessRefused`: they must not be forwarded."""
        self._access.sent += size
        self._budget.take(size, 0)

    def received(self, size: int) -> None:
        """Count bytes for the sandbox. Raises `AccessRefused`: they must not be forwarded."""
        self._access.received += size
        self._budget.take(0, size)
        if self._most is not None and self._access.received > self._most:
            raise _exceeded(f"one connection to {self._access.target} may bring {_megabytes(self._most)}")


def _forget(moments: deque[float], now: float) -> None:
    while moments and moments[0] <= now - _MINUTE_S:
        moments.popleft()


def _exceeded(reason: str, *, hint: str | None = None, retry: bool = False) -> AccessRefused:
    return AccessRefused(reason, code="limit_exceeded", status=429, hint=hint, retry=retry)


def _megabytes(size: int) -> str:
    return f"{size / (1 << 20):.0f} MB at most" if size >= 1 << 20 else f"{size} bytes at most"
