"""Permits of a fair limit: none is lost, nobody has them all, and who has none is not kept waiting by who has many."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.index.client import FairLimit, SharedPermit

MOST = 8


class Crowd:
    """Tasks that want permits, each until it is told that it has had it long enough."""

    def __init__(self) -> None:
        self.permits = FairLimit(MOST)
        self.tasks: dict[asyncio.Task[None], tuple[SharedPermit, set[str], asyncio.Event]] = {}

    def want(self, *who: str) -> SharedPermit:
        permit, enough = self.permits.permit(), asyncio.Event()

        async def use() -> None:
            async with permit:
                await enough.wait()

        for each in who:
            permit.join(each)
        self.tasks[asyncio.get_running_loop().create_task(use())] = permit, set(who), enough
        return permit

    async def end(self, task: asyncio.Task[None], *, cancel: bool) -> None:
        task.cancel() if cancel else self.tasks[task][2].set()
        if not cancel and not self.tasks[task][0].charged:
            return  # it ends as soon as it has had its permit
        await asyncio.gather(task, return_exceptions=True)
        del self.tasks[task]

    async def settle(self) -> Counter[object]:
        """Who has how many permits, once nothing moves."""
        before: tuple[object, ...] | None = None
        while (now := tuple(permit.charged for permit, *_ in self.tasks.values())) != before:
            before = now
            for _ in range(3):
                await asyncio.sleep(0)
            for task in [task for task in self.tasks if task.done()]:
                del self.tasks[task]
        return Counter(who for permit, *_ in self.tasks.values() for who in permit.charged)


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("want"), st.sets(st.sampled_from("abcd"), min_size=1, max_size=3)),
        st.tuples(st.sampled_from(["end", "cancel"]), st.integers(0, 50)),
        st.tuples(st.just("join"), st.integers(0, 50)),
    ),
    max_size=40,
)


@given(ACTS)
def test_turns_are_given_to_who_has_fewer_than_are_free(acts: list[tuple[str, object]]) -> None:
    async def play() -> None:
        crowd = Crowd()
        for act, value in acts:
            if act == "want":
                assert isinstance(value, set)
                crowd.want(*value)
            elif crowd.tasks:
                assert isinstance(value, int)
                task = list(crowd.tasks)[value % len(crowd.tasks)]
                if act == "join":
                    crowd.tasks[task][0].join("late")
                    crowd.tasks[task][1].add("late")
                else:
                    await crowd.end(task, cancel=act == "cancel")
            taken = await crowd.settle()
            free = MOST - taken.total()
            assert free >= 0
            for permit, who, _ in crowd.tasks.values():
                assert set(permit.charged) <= who
                assert permit.charged or all(taken[each] >= free for each in who), "it could have had its permit"
        for task in list(crowd.tasks):
            task.cancel()
        await asyncio.gather(*crowd.tasks, return_exceptions=True)
        crowd.tasks.clear()
        for _ in range(MOST):
            crowd.want("last")
        assert (await crowd.settle())["last"] == MOST // 2, "all permits have come back"
        for task in list(crowd.tasks):
            await crowd.end(task, cancel=True)

    asyncio.run(play())


async def test_one_alone_gets_half_and_the_next_finds_some() -> None:
    crowd = Crowd()
    for _ in range(2 * MOST):
        crowd.want("greedy")
    assert await crowd.settle() == {"greedy": 4}
    for _ in range(2 * MOST):
        crowd.want("other")
    assert await crowd.settle() == {"greedy": 4, "other": 2}
    crowd.want("third")
    assert (await crowd.settle())["third"] == 1
    for task in list(crowd.tasks):
        await crowd.end(task, cancel=False)
    await crowd.settle()
    assert not crowd.tasks


async def test_who_joins_what_another_waits_for_brings_his_own_share() -> None:
    crowd = Crowd()
    for _ in range(MOST):
        crowd.want("greedy")
    last = crowd.want("greedy")
    await crowd.settle()
    assert not last.charged
    last.join("other")
    assert await crowd.settle() == {"greedy": 4, "other": 1}
    assert last.charged == ("other",)
    for task in list(crowd.tasks):
        await crowd.end(task, cancel=True)


async def test_a_turn_that_fails_is_over() -> None:
    permits = FairLimit(1)
    for _ in range(3):
        permit = permits.permit()
        permit.join("one")
        with pytest.raises(ValueError, match="no"):
            async with permit:
                raise ValueError("no")
