from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.access import Access, AccessRefused, Target
from carrel.egress.access_log import BATCH, AccessLog, Item, item_of, read
from carrel.policy.verdict import Verdict
from carrel.primitives.channel import MAX_MESSAGE


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


@pytest.fixture
def log(journal: str) -> Iterator[AccessLog]:
    log = AccessLog(journal)
    yield log
    log.flush()
    log.close()


def access(host: str = "a.example") -> Access:
    return Access("s", "connect", Target(host, 443), verdict=Verdict("allow", "it is allowed", "r", "sources.json"))


class Taken:
    def __init__(self) -> None:
        self.batches: list[tuple[int, list[Item]]] = []
        self.works = True

    def __call__(self, position: int, items: list[Item]) -> bool:
        self.batches.append((position, items))
        return self.works

    def items(self) -> list[tuple[object, object, object]]:
        return [(item["number"], item["ended"], item["received"]) for _, items in self.batches for item in items]


async def test_short_access_is_sent_once_and_long_access_twice(journal: str) -> None:
    log, taken = AccessLog(journal, flush_s=0), Taken()
    log.connect(taken)
    quick, long = access(), access("b.example")
    log.opened(long)
    log.opened(quick)
    quick.ended = 2.0
    log.closed(quick)
    while not taken.batches:
        await asyncio.sleep(0)
    long.received, long.ended = 5, 3.0
    log.closed(long)
    log.flush()
    assert taken.items() == [(1, None, 0), (2, 2.0, 0), (1, 3.0, 5)]
    log.close()


async def test_refused_access_is_sent_once_and_needs_no_journal(log: AccessLog, journal: str) -> None:
    taken = Taken()
    log.connect(taken)
    refused = access()
    refused.ended = 2.0
    log.opened(refused)
    log.closed(refused)
    assert read(journal)[0] == {}
    log.flush()
    assert taken.items() == [(1, 2.0, 0)]


async def test_unacknowledged_batches_are_sent_again(log: AccessLog) -> None:
    first = Taken()
    for _ in range(BATCH + 1):
        log.opened(access())
    log.connect(first)
    assert [len(items) for _, items in first.batches] == [BATCH, 1]
    log.acknowledge(first.batches[0][0])
    second = Taken()
    log.connect(second)
    assert second.items() == first.items()[BATCH:]
    log.acknowledge(first.batches[-1][0])  # an acknowledgement for the connection before
    assert len(log) == 1
    log.acknowledge(second.batches[0][0])
    assert len(log) == 0


async def test_access_that_ended_since_it_was_sent_is_sent_again_in_its_newest_state(log: AccessLog) -> None:
    first, second, one = Taken(), Taken(), access()
    log.opened(one)
    log.connect(first)
    one.ended = 2.0
    log.closed(one)
    log.connect(second)
    assert (first.items(), second.items()) == ([(1, None, 0)], [(1, 2.0, 0)])


async def test_acknowledged_beginning_does_not_acknowledge_the_end(log: AccessLog, journal: str) -> None:
    taken, one = Taken(), access()
    log.opened(one)
    log.connect(taken)
    one.ended = 2.0
    log.closed(one)
    log.acknowledge(taken.batches[0][0])
    assert (len(log), read(journal)[0]) == (1, {})
    log.flush()
    log.acknowledge(taken.batches[1][0])
    assert (len(log), taken.items()) == (0, [(1, None, 0), (1, 2.0, 0)])


async def test_successor_of_a_killed_proxy_sends_what_that_had_let_out(journal: str) -> None:
    killed = AccessLog(journal)
    written, unsure = access(), access("b.example")
    killed.opened(written)
    taken = Taken()
    killed.connect(taken)
    killed.acknowledge(taken.batches[-1][0])
    killed.opened(unsure)
    log, taken = AccessLog(journal), Taken()
    log.connect(taken)
    [(_, [item])] = taken.batches
    assert (item["number"], item["host"], item["result"], item["recovered"]) == (2, "b.example", "unknown", True)
    log.opened(new := access())
    assert new.number == 3
    log.acknowledge(taken.batches[0][0])
    assert list(read(journal)[0]) == [3]
    for each in (log, killed):
        each.flush()
        each.close()


async def test_acknowledgement_for_a_killed_proxy_does_not_count_for_its_successor(journal: str) -> None:
    """Batches are acknowledged when they are written, and by then another process may get the acknowledgement."""
    killed, before = AccessLog(journal), Taken()
    for _ in range(3):
        killed.opened(access())
        killed.connect(before)
    log, taken = AccessLog(journal), Taken()
    log.connect(taken)
    log.acknowledge(before.batches[-1][0])
    assert list(read(journal)[0]) == [1, 2, 3], "nobody has written them"
    log.acknowledge(taken.batches[-1][0])
    assert read(journal)[0] == {}
    log.close()
    Path(journal).touch()
    killed.close()


async def test_nothing_goes_out_unrecorded(journal: str) -> None:
    log = AccessLog(journal, most=2 * BATCH)
    with pytest.raises(AccessRefused) as refused:
        for _ in range(2 * BATCH + 1):
            log.opened(access())
    assert refused.value.status == 503
    assert len(log) == 2 * BATCH
    taken = Taken()
    log.connect(taken)
    log.acknowledge(taken.batches[-1][0])
    log.opened(access())
    log.flush()
    log.close()


async def test_accesses_that_were_sent_and_not_written_count_one_by_one(journal: str) -> None:
    """A control plane whose database is slow takes everything and acknowledges nothing."""
    log, taken = AccessLog(journal, most=2 * BATCH), Taken()
    log.connect(taken)
    with pytest.raises(AccessRefused):
        for _ in range(2 * BATCH + 1):
            log.opened(access())
            log.flush()
    assert len(log) == 2 * BATCH == len(taken.items())
    log.acknowledge(taken.batches[-1][0])
    assert len(log) == 0
    log.opened(access())
    log.flush()
    log.close()


async def test_access_that_cannot_be_put_into_the_journal_does_not_go_out(journal: str) -> None:
    log = AccessLog(journal)
    log.close()
    with pytest.raises(AccessRefused):
        log.opened(access())


async def test_nothing_more_is_sent_after_a_failure(log: AccessLog) -> None:
    taken = Taken()
    taken.works = False
    log.connect(taken)
    log.opened(access())
    log.flush()
    log.opened(access())
    log.flush()
    assert len(taken.batches) == 1
    assert len(log) == 2
    log.connect(again := Taken())
    assert [number for number, *_ in again.items()] == [1, 2]


@given(st.text(max_size=2000), st.text(max_size=2000))
def test_a_batch_of_the_longest_items_fits_into_a_message(one: str, two: str) -> None:
    given = access(one)
    given.method, given.path, given.result = two, one * 10, two * 10
    given.verdict = Verdict("deny", one * 10, two * 10, one * 10, two)
    message = json.dumps({"op": "log", "upto": 1, "items": [item_of(given)] * BATCH}).encode()
    assert len(message) < MAX_MESSAGE


async def test_each_control_plane_gets_the_accesses_of_its_own_sandboxes(journal: str) -> None:
    log, one, other = AccessLog(journal), Taken(), Taken()
    owners = {"s": "one", "t": "other"}
    log.connect(one, "one", lambda sandbox: owners.get(sandbox) == "one")
    log.connect(other, "other", lambda sandbox: owners.get(sandbox) == "other")
    for sandbox in ("s", "t", "nobody's", "t"):
        each = Access(sandbox, "connect", Target("a.example", 443), verdict=Verdict("allow", "", "r", "s"))
        log.opened(each)
        each.ended = 1.0
        log.closed(each)
    log.flush()
    assert [number for number, _, _ in one.items()] == [1, 3], "what nobody has is for the one that came first"
    assert [number for number, _, _ in other.items()] == [2, 4]
    log.disconnect("one")
    while len(other.batches) == 1:  # what it did not acknowledge goes to those who are left
        await asyncio.sleep(0.01)
    assert [number for number, _, _ in other.items()] == [2, 4, 1, 3]
    log.acknowledge(other.batches[-1][0], "other")
    assert len(log) == 0
    log.close()
