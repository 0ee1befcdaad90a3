"""The growing pause between attempts at something that keeps failing."""

from __future__ import annotations


class Backoff:
    """A pause that doubles with every failure, up to a longest one. It does not sleep and reads no clock."""

    def __init__(self, first_s: float, longest_s: float):
        self._first_s = first_s
        self._longest_s = longest_s
        self._failures = 0

    def next_pause(self) -> float:
        """Count a failure and return the seconds to wait before the next attempt."""
        pause = min(self._longest_s, self._first_s * 2.0 ** min(self._failures, 64))
        self._failures += 1
        return pause

    def reset(self) -> None:
        """Start again with the first pause: an attempt succeeded."""
        self._failures = 0
