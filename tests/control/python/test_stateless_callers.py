"""The routing table: what a call gets, whose turn it is, who is refused; and what holds whatever happens."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import settings as given_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from carrel.config import RouterSettings
from carrel.control.python.stateless_callers import (
    MemoryUse,
    Moves,
    Owner,
    PooledSandbox,
    RoutingTable,
    State,
    WaitingCall,
)

A, B, C = (("agent:a", None), ("agent:b", None), ("agent:a", "team"))
MB = 1 << 20


def table(places: int = 4, queue: int = 100, spares: int = 0) -> RoutingTable:
    return RoutingTable(RouterSettings(max_sandboxes=places, queue=queue, spares=spares))


def place(
    of: RoutingTable,
    owner: Owner | None,
    state: State = "idle",
    template: str | None = None,
    *envs: str,
    used_at: float = 0.0,
    memory: int = 0,
) -> PooledSandbox:
    made = PooledSandbox(template, owner, state, id="s", envs=set(envs), used_at=used_at, load=MemoryUse(memory))
    of.places[made] = None
    return made


def one(of: RoutingTable, owner: Owner, template: str | None = None, env: str | None = None) -> PooledSandbox | None:
    """What a call gets at once."""
    of.ask(owner, template, env)
    moves = of.match()
    return moves.given[0][1] if moves.given else None


def test_the_order_of_the_match() -> None:
    of = table(9)
    spare = place(of, None, used_at=9)
    old = place(of, A, "idle", None, "numbers", used_at=1)
    new = place(of, A, used_at=2)
    other = place(of, B, "idle", None, "numbers", used_at=3)
    elsewhere = place(of, C, "idle", None, "numbers", used_at=3)
    recipe = place(of, A, "idle", "recipe", "numbers", used_at=4)
    assert one(of, A, None, "numbers") is old, "the environment first"
    assert one(of, A, None, "numbers") is new, "then what is the caller's"
    assert one(of, A) is spare and spare.owner == A, "then a spare"
    made = one(of, A)
    assert made is not None and made.state == "starting" and made.owner == A, "then a new one"
    assert other.state == elsewhere.state == recipe.state == "idle", "never another's, nor another template's"
    assert one(of, A, "recipe") is recipe


def test_what_holds_little_comes_first() -> None:
    of = table()
    place(of, A, used_at=2, memory=900 * MB)
    light = place(of, A, used_at=1, memory=100 * MB)
    assert of.memory_bytes == 1000 * MB
    assert one(of, A) is light


def test_one_that_is_being_emptied_is_waited_for() -> None:
    of = table(9)
    emptying, spare = place(of, A, "emptying"), place(of, None)
    first, second = of.ask(A, None, None), of.ask(A, None, None)
    moves = of.match()
    assert not moves.given and of.waiting == 2, "a caller's first waits, and so does what comes after it"
    emptying.state = "idle"
    assert of.match().given == [(first, emptying), (second, spare)]
    slow = place(of, B, "emptying")
    wish = of.ask(B, None, None)
    assert not of.match().given
    slow.slow = True
    [(given, made)] = of.match().given
    assert given is wish and made.state == "starting", "but not for long"


def test_room_is_made_for_whose_turn_it_is() -> None:
    of = table(2)
    busy, idle = place(of, A, "busy", used_at=1), place(of, A, used_at=2)
    waiting, later = of.ask(B, None, None), of.ask(A, None, None)
    moves = of.match()
    assert moves.to_end == [idle] and not moves.given, "it is not given to who came later"
    assert not of.match().to_end, "once"
    busy.state = "idle"
    assert of.match().given == [(later, busy)]
    of.forget(idle)
    [(given, made)] = of.match().given
    assert given is waiting and made.state == "starting"


def test_callers_take_turns() -> None:
    of = table(1)
    busy = place(of, A, "busy")
    for owner in (A, A, A, B, B, C):
        of.ask(owner, None, None)
    order = []
    while of.waiting:
        busy.state = "idle"
        moves = of.match()
        for each in moves.to_end:
            of.forget(each)
            moves = of.match()
        [(wish, busy)] = moves.given
        order.append(wish.owner)
    assert order == [A, B, C, A, B, A]


def test_back_pressure() -> None:
    of = table(1, queue=2)
    place(of, A, "busy")
    first, second = of.ask(A, None, None), of.ask(A, None, None)
    assert not of.match().refused
    other = of.ask(B, None, None)
    assert of.match().refused == [second], "the last of the longest line, whoever came last"
    assert of.waiting == 2
    of.leave(first)
    of.leave(first)
    assert not of.match().refused
    of.leave(other)
    assert of.waiting == 0 and not of.match().given


def test_who_waits_for_one_that_is_about_to_be_ready_is_not_refused() -> None:
    of = table(1, queue=0)
    place(of, A, "emptying")
    of.ask(A, None, None)
    assert not of.match().refused
    too_many = of.ask(A, None, None)
    assert of.match().refused == [too_many]


@pytest.mark.parametrize(
    ("spares", "there", "room", "expected"), [(0, 0, 4, 0), (1, 0, 4, 1), (2, 1, 4, 1), (1, 1, 4, 0), (1, 0, 0, 0)]
)
def test_spares(spares: int, there: int, room: int, expected: int) -> None:
    of = table(there + room + 1, spares=spares)
    place(of, A, "busy")
    for _ in range(there):
        place(of, None)
    if not room:
        place(of, A, "busy")
    made = 0
    while (spare := of.spare(None)) is not None:
        assert (spare.owner, spare.state) == (None, "starting")
        made += 1
    assert made == expected


def test_no_spare_where_somebody_waits() -> None:
    of = table(2, spares=1)
    place(of, A, "emptying")
    of.ask(A, None, None)
    of.match()
    assert of.waiting and of.spare(None) is None


class Traffic(RuleBasedStateMachine):
    """Calls come, go, end; sandboxes start, are emptied, fail, die: in any order."""

    OWNERS = st.sampled_from([A, B, C])
    TEMPLATES = st.sampled_from([None, "recipe"])
    ENVS = st.sampled_from([None, "numbers", "texts"])

    @initialize(places=st.integers(1, 4), queue=st.integers(0, 5), spares=st.integers(0, 2))
    def begin(self, places: int, queue: int, spares: int) -> None:
        self.of = table(places, queue, spares)
        self.lines: dict[Owner, deque[WaitingCall]] = {}
        self.held: dict[PooledSandbox, WaitingCall] = {}
        self.now = 0.0

    def waiting(self) -> list[WaitingCall]:
        return [wish for line in self.lines.values() for wish in line]

    def turn(self) -> None:
        before = {each: each.owner for each in self.of.places}
        moves = self.of.match()
        self.check(moves, before)

    def check(self, moves: Moves, before: dict[PooledSandbox, Owner | None]) -> None:
        for wish, given in moves.given:
            line = self.lines[wish.owner]
            assert line.popleft() is wish, "a caller's calls are served in their order"
            assert given in self.of.places and given not in self.held, "a sandbox has one call"
            assert given.template == wish.template and given.owner == wish.owner
            assert before.get(given) in {None, wish.owner}, "nobody gets another's"
            assert given.state == ("busy" if given in before else "starting")
            self.held[given] = wish
        for each in moves.to_end:
            assert each.state == "ending" and each not in self.held
        for wish in moves.refused:
            assert self.lines[wish.owner][-1] is wish, "the last of a line"
            self.lines[wish.owner].pop()
        for owner in [owner for owner, line in self.lines.items() if not line]:
            del self.lines[owner]

    def some(self, *states: str) -> list[PooledSandbox]:
        return sorted((each for each in self.of.places if each.state in states), key=lambda each: each.used_at)

    @rule(owner=OWNERS, template=TEMPLATES, env=ENVS)
    def come(self, owner: Owner, template: str | None, env: str | None) -> None:
        self.lines.setdefault(owner, deque()).append(self.of.ask(owner, template, env))
        self.turn()

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        wish = data.draw(st.sampled_from(self.waiting()))
        self.of.leave(wish)
        self.lines[wish.owner].remove(wish)
        if not self.lines[wish.owner]:
            del self.lines[wish.owner]
        self.turn()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), reusable=st.booleans(), memory=st.integers(0, 1 << 30))
    def end_call(self, data: st.DataObject, reusable: bool, memory: int) -> None:
        done = data.draw(st.sampled_from(sorted(self.held, key=lambda each: each.used_at)))
        wish = self.held.pop(done)
        self.now += 1
        done.used_at, done.load = self.now, MemoryUse(memory)
        if wish.env is not None:
            done.envs.add(wish.env)
        done.state = "emptying" if reusable else "ending"
        self.turn()

    @precondition(lambda self: self.some("emptying"))
    @rule(data=st.data(), how=st.sampled_from(["idle", "ending", "slow"]))
    def emptied(self, data: st.DataObject, how: str) -> None:
        each = data.draw(st.sampled_from(self.some("emptying")))
        if how == "slow":
            each.slow = True
        else:
            each.state, each.slow = ("idle" if how == "idle" else "ending"), False
        self.turn()
        self.of.spare(each.template)

    @precondition(lambda self: [each for each in self.some("starting") if each not in self.held])
    @rule(data=st.data(), works=st.booleans())
    def spare_started(self, data: st.DataObject, works: bool) -> None:
        each = data.draw(st.sampled_from([each for each in self.some("starting") if each not in self.held]))
        if works:
            self.now += 1
            each.state, each.used_at = "idle", self.now
        else:
            self.of.forget(each)
        self.turn()

    @precondition(lambda self: self.some("ending"))
    @rule(data=st.data())
    def ended(self, data: st.DataObject) -> None:
        self.of.forget(data.draw(st.sampled_from(self.some("ending"))))
        self.turn()

    @precondition(lambda self: self.of.places)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(sorted(self.of.places, key=lambda each: each.used_at)))
        self.held.pop(each, None)
        self.of.forget(each)
        self.turn()

    def counted_on(self) -> int:
        return len([each for each in self.some("emptying") if not each.slow])

    @invariant()
    def bounds(self) -> None:
        assert len(self.of.places) <= self.of.settings.max_sandboxes
        assert self.of.waiting == len(self.waiting())
        hopes = self.counted_on() + len(self.some("idle"))
        assert self.of.waiting <= self.of.settings.queue + hopes, "no queue without end"
        spares = Counter(each.template for each in self.of.places if each.owner is None)
        assert all(count <= self.of.settings.spares for count in spares.values())

    @invariant()
    def nothing_lies_idle_that_somebody_could_have(self) -> None:
        if len(self.lines) > self.counted_on():
            assert len(self.of.places) == self.of.settings.max_sandboxes, "there is room"
            heads = [line[0] for line in self.lines.values()]
            if len(heads) - self.counted_on() > len(self.some("ending")):
                assert not self.some("idle"), "room could be made"


Traffic.TestCase.settings = given_settings(max_examples=150, stateful_step_count=40, deadline=None)
test_whatever_happens = Traffic.TestCase
