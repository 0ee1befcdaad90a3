from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.channel import MAX_MESSAGE
from carrel.egress.ledger import BATCH, Item, Ledger, item_of
from carrel.egress.terms import Access, Refused, Said, Target


def access(host: str = "a.example") -> Access:
    return Access("s", "connect", Target(host, 443), said=Said("allow", "it is allowed", "r", "sources.json"))


class Taken:
    def __init__(self) -> None:
        self.batches: list[tuple[int, list[Item]]] = []
        self.works = True

    def __call__(self, place: int, items: list[Item]) -> bool:
        self.batches.append((place, items))
        return self.works


async def test_what_opens_is_told_at_once_and_what_closes_soon() -> None:
    ledger, taken = Ledger(flush_s=0), Taken()
    ledger.listen(taken)
    one, other = access(), access("b.example")
    ledger.opened(one)
    ledger.opened(other)
    assert [[item["number"] for item in items] for _, items in taken.batches] == [[1], [2]]
    other.ended = 2.0
    ledger.closed(other)
    one.received, one.ended = 5, 3.0
    ledger.closed(one)
    while len(taken.batches) < 3:
        await asyncio.sleep(0)
    told = [(item["number"], item["ended"], item["received"]) for _, items in taken.batches for item in items]
    assert told == [(1, None, 0), (2, None, 0), (2, 2.0, 0), (1, 3.0, 5)]


async def test_what_opened_and_closed_while_nobody_listened_is_told_once() -> None:
    ledger, taken = Ledger(), Taken()
    only = access()
    ledger.opened(only)
    only.ended = 2.0
    ledger.closed(only)
    ledger.listen(taken)
    assert [(item["number"], item["ended"]) for _, items in taken.batches for item in items] == [(1, 2.0)]


@pytest.mark.parametrize("before", [0, BATCH - 1])
async def test_what_is_refused_is_told_once(before: int) -> None:
    ledger, taken = Ledger(), Taken()
    for each in [access() for _ in range(before)]:
        ledger.opened(each)
        ledger.closed(each)
    refused = access()
    refused.ended = refused.began
    ledger.listen(taken)
    ledger.opened(refused)
    ledger.closed(refused)
    ledger.flush()
    assert [item["number"] for _, items in taken.batches for item in items].count(refused.number) == 1


async def test_what_was_not_acknowledged_is_told_again() -> None:
    ledger, first = Ledger(), Taken()
    for _ in range(BATCH + 1):
        ledger.opened(access())
    ledger.listen(first)
    assert [len(items) for _, items in first.batches] == [BATCH, 1]
    ledger.acknowledged(first.batches[0][0])
    second = Taken()
    ledger.listen(second)
    assert second.batches == first.batches[1:]
    ledger.acknowledged(second.batches[0][0])
    assert len(ledger) == 0


async def test_nothing_goes_out_unrecorded() -> None:
    ledger = Ledger(most=2 * BATCH)
    with pytest.raises(Refused) as refused:
        for _ in range(2 * BATCH + 1):
            ledger.opened(access())
    assert refused.value.status == 503
    assert len(ledger) == 2 * BATCH
    ledger.flush()
    taken = Taken()
    ledger.listen(taken)
    ledger.acknowledged(taken.batches[-1][0])
    ledger.opened(access())
    ledger.flush()


async def test_a_listener_that_fails_is_not_told_more() -> None:
    ledger, taken = Ledger(), Taken()
    taken.works = False
    ledger.listen(taken)
    ledger.opened(access())
    ledger.flush()
    ledger.opened(access())
    ledger.flush()
    assert len(taken.batches) == 1
    assert len(ledger) == 2


@given(st.text(max_size=2000), st.text(max_size=2000))
def test_a_batch_of_the_longest_items_fits_into_a_message(one: str, two: str) -> None:
    given = access(one)
    given.method, given.path, given.result = two, one * 10, two * 10
    given.said = Said("deny", one * 10, two * 10, one * 10, two)
    message = json.dumps({"op": "log", "upto": 1, "items": [item_of(given)] * BATCH}).encode()
    assert len(message) < MAX_MESSAGE
