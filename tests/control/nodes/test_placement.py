from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.control.nodes.placement import HERE, Candidate, Silent, There, choose, place_of
from carrel.models import State
from carrel.store.nodes import Holding

NAMES = st.sampled_from(["a", "b", "c", "d"])
PROVIDERS = st.sets(st.sampled_from(["namespace", "docker"]))
CANDIDATE = st.builds(
    Candidate, NAMES, st.integers(0, 12), st.integers(0, 10), PROVIDERS.map(lambda found: tuple(sorted(found)))
)


@st.composite
def fleets(draw: st.DrawFn) -> dict[str, Candidate]:
    """Servers by name; `a`, which decides, is always one of them."""
    found = {each.name: each for each in draw(st.lists(CANDIDATE, max_size=6))}
    return {**found, "a": Candidate("a", draw(st.integers(0, 12)), draw(st.integers(0, 10)), draw(PROVIDERS))}


@given(fleets(), NAMES | st.none(), st.booleans(), st.sampled_from([None, "namespace", "docker"]))
def test_a_sandbox_starts_where_there_is_room(
    fleet: dict[str, Candidate], files: str | None, movable: bool, provider: str | None
) -> None:
    chosen = choose(fleet, "a", files=files, movable=movable, provider=provider)
    assert chosen in fleet
    holder = fleet.get(files or "")
    if holder is not None and (holder.has_room or not movable):
        assert chosen == files, "files stay where they are"
        return
    fitting = [each for each in fleet.values() if each.has_room and (provider is None or provider in each.providers)]
    if not fitting:
        assert chosen == ("a" if holder is None else files), "the one that refuses knows why"
        return
    assert fleet[chosen] in fitting
    least = min(each.load for each in fitting)
    assert fleet[chosen].load == least
    if "a" in fleet and fleet["a"] in fitting and fleet["a"].load == least:
        assert chosen == "a", "no hop without a reason"


@given(fleets(), st.integers(1, 30))
def test_starts_are_spread(fleet: dict[str, Candidate], count: int) -> None:
    """However many start, no server with room has more than one start's worth of load less than a chosen one."""
    for _ in range(count):
        name = choose(fleet, "a", files=None, movable=True, provider=None)
        each = fleet[name]
        if not each.has_room:
            assert not any(other.has_room for other in fleet.values())
            return
        assert all(each.load <= other.load for other in fleet.values() if other.has_room)
        fleet = {**fleet, name: Candidate(name, each.sandboxes + 1, each.capacity, each.providers)}


HOLDINGS = st.none() | st.builds(
    Holding, NAMES | st.none(), st.floats(0.001, 60), NAMES | st.none(), st.sampled_from(list(State))
)


@given(HOLDINGS, st.sets(NAMES))
def test_the_owner_answers_then_the_one_with_the_files(holding: Holding | None, alive: set[str]) -> None:
    place = place_of(holding, "a", alive - {"a"})
    if holding is None:
        assert place == HERE
    elif holding.owner is not None:
        if holding.owner == "a":
            assert place == HERE
        elif holding.owner in alive:
            assert place == There(holding.owner)
        else:
            assert place == Silent(holding.owner, holding.lease_left_s), "nobody else may act while its lease runs"
    else:
        assert place == (There(holding.node) if holding.node in alive - {"a"} else HERE)


@pytest.mark.parametrize(("sandboxes", "capacity"), [(0, 0), (3, 3), (5, 3)])
def test_a_full_server_has_no_room(sandboxes: int, capacity: int) -> None:
    assert not Candidate("a", sandboxes, capacity, ()).has_room


def workers(*sandboxes: int, capacity: int = 100) -> dict[str, Candidate]:
    """The workers of a server, and another server that is nearly empty."""
    made = {
        f"s:{index}": Candidate(f"s:{index}", count, capacity, ("namespace",)) for index, count in enumerate(sandboxes)
    }
    return {**made, "t": Candidate("t", 1, capacity, ("namespace",))}


@pytest.mark.parametrize(
    ("sandboxes", "chosen"), [((3, 2), "s:0"), ((4, 2), "s:0"), ((5, 2), "s:1"), ((50, 41), "s:0"), ((53, 41), "s:1")]
)
def test_a_worker_takes_what_it_got_unless_another_is_clearly_emptier(sandboxes: tuple[int, int], chosen: str) -> None:
    assert choose(workers(*sandboxes), "s:0", files="s", movable=True, provider=None) == chosen


def test_files_of_a_server_are_there_for_each_of_its_workers() -> None:
    assert choose(workers(100, 99), "t", files="s", movable=True, provider=None) == "s:1"
    assert choose(workers(100, 100), "t", files="s", movable=True, provider=None) == "t"
    assert choose(workers(100, 100), "t", files="s", movable=False, provider=None) in {"s:0", "s:1"}
    stopped = Holding(None, 0.0, "s", State.STOPPED, released=True)
    assert place_of(stopped, "s:1", {"s:0", "t"}) == HERE
    assert place_of(stopped, "t", {"s:0", "s:1"}) == There("s:0")
    assert place_of(stopped, "t", set()) == HERE


def test_folders_are_for_the_first_worker() -> None:
    folder = Holding(None, 0.0, "s", State.STOPPED, released=True, folder=True)
    assert place_of(folder, "s:1", {"s:0"}) == There("s:0")
    assert place_of(folder, "s:0", {"s:1"}) == HERE
    assert place_of(folder, "s", set()) == HERE, "one process is first and last"
    assert place_of(folder, "t", {"s:1", "s:0"}) == There("s:0")
    assert place_of(folder, "t", {"s"}) == There("s")
