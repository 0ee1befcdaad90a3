from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from carrel.primitives.cache import Cache

KEYS = st.integers(0, 5)


class CacheMachine(RuleBasedStateMachine):
    """Compares the cache with a list of entries, the least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.cache: Cache[int, int] = Cache(3, 10.0, clock=lambda: self.now)
        self.model: list[tuple[int, int, float]] = []

    def _take(self, key: int) -> tuple[int, int, float] | None:
        found = next((entry for entry in self.model if entry[0] == key), None)
        if found is not None:
            self.model.remove(found)
        return found

    @rule(key=KEYS, value=st.integers())
    def put(self, key: int, value: int) -> None:
        self.cache.put(key, value)
        self._take(key)
        self.model.append((key, value, self.now))
        del self.model[:-3]

    @rule(key=KEYS)
    def get(self, key: int) -> None:
        found = self._take(key)
        if found is not None and self.now - found[2] < 10.0:
            self.model.append(found)
            assert self.cache.get(key) == found[1]
        else:
            assert self.cache.get(key) is None

    @rule(key=KEYS)
    def pop(self, key: int) -> None:
        found = self._take(key)
        assert self.cache.pop(key) == (None if found is None else found[1])

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def compare_keys(self) -> None:
        assert self.cache.keys() == [entry[0] for entry in self.model]
        assert len(self.cache) == len(self.model) <= 3


TestCache = CacheMachine.TestCase


def test_entries_without_a_time_to_live_stay() -> None:
    cache: Cache[str, int] = Cache(2)
    cache.put("a", 1)
    assert cache.get("a") == 1
    cache.clear()
    assert cache.get("a") is None and len(cache) == 0


def test_an_entry_from_the_future_has_expired() -> None:
    now = [100.0]
    cache: Cache[str, int] = Cache(3, 10.0, clock=lambda: now[0])
    cache.put("key", 1)
    now[0] = 50.0
    assert cache.get("key") is None
