"""A bounded cache whose entries can expire."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Cache(Generic[K, V]):
    """At most `max_entries` values by key. A full cache drops the entry that was used least recently.

    With `ttl_s`, an entry expires that many seconds after it was put in, or when the clock was set back to before that.
    For one thread or one event loop.
    """

    def __init__(self, max_entries: int, ttl_s: float | None = None, *, clock: Callable[[], float] = time.monotonic):
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[K, tuple[V, float]] = OrderedDict()

    def __len__(self) -> int:
        """Count the entries, expired ones that nobody asked for included."""
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None if it is unknown or has expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if self._ttl_s is not None and not 0 <= self._clock() - entry[1] < self._ttl_s:
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V) -> None:
        """Remember a value from now on."""
        self._entries[key] = value, 0.0 if self._ttl_s is None else self._clock()
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def pop(self, key: K) -> V | None:
        """Forget a key and return its value, expired or not; None if it is unknown."""
        entry = self._entries.pop(key, None)
        return None if entry is None else entry[0]

    def keys(self) -> list[K]:
        """List the keys, the least recently used first."""
        return list(self._entries)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
