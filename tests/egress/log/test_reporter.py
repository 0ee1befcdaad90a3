from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.access import Access, Refused, Target
from carrel.egress.log.journal import Item, Journal, read
from carrel.egress.log.reporter import BATCH, Reporter, item_of
from carrel.policy.verdict import Verdict
from carrel.primitives.channel import MAX_MESSAGE


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(str(tmp_path / "journal"))
    yield journal
    journal.close()


def access(host: str = "a.example") -> Access:
    return Access("s", "connect", Target(host, 443), verdict=Verdict("allow", "it is allowed", "r", "sources.json"))


class Taken:
    def __init__(self) -> None:
        self.batches: list[tuple[int, list[Item]]] = []
        self.works = True

    def __call__(self, place: int, items: list[Item]) -> bool:
        self.batches.append((place, items))
        return self.works

    def items(self) -> list[tuple[object, object, object]]:
        return [(item["number"], item["ended"], item["received"]) for _, items in self.batches for item in items]


async def test_what_is_short_is_told_once_and_what_lasts_twice(journal: Journal) -> None:
    reporter, taken = Reporter(journal, flush_s=0), Taken()
    reporter.listen(taken)
    quick, long = access(), access("b.example")
    reporter.opened(long)
    reporter.opened(quick)
    quick.ended = 2.0
    reporter.closed(quick)
    while not taken.batches:
        await asyncio.sleep(0)
    long.received, long.ended = 5, 3.0
    reporter.closed(long)
    reporter.flush()
    assert taken.items() == [(1, None, 0), (2, 2.0, 0), (1, 3.0, 5)]


async def test_what_is_refused_is_told_once_and_needs_no_journal(journal: Journal) -> None:
    reporter, taken = Reporter(journal), Taken()
    reporter.listen(taken)
    refused = access()
    refused.ended = 2.0
    reporter.opened(refused)
    reporter.closed(refused)
    assert read(journal._path)[0] == {}
    reporter.flush()
    assert taken.items() == [(1, 2.0, 0)]


async def test_what_was_not_acknowledged_is_told_again(journal: Journal) -> None:
    reporter, first = Reporter(journal), Taken()
    for _ in range(BATCH + 1):
        reporter.opened(access())
    reporter.listen(first)
    assert [len(items) for _, items in first.batches] == [BATCH, 1]
    reporter.acknowledged(first.batches[0][0])
    second = Taken()
    reporter.listen(second)
    assert second.batches == first.batches[1:]
    reporter.acknowledged(second.batches[0][0])
    assert len(reporter) == 0


async def test_who_follows_a_killed_proxy_tells_what_it_had_let_out(journal: Journal) -> None:
    killed = Reporter(journal)
    written, unsure = access(), access("b.example")
    killed.opened(written)
    taken = Taken()
    killed.listen(taken)
    killed.acknowledged(taken.batches[-1][0])
    killed.opened(unsure)
    later = Journal(journal._path)
    reporter, taken = Reporter(later), Taken()
    reporter.listen(taken)
    [(_, [item])] = taken.batches
    assert (item["number"], item["host"], item["result"], item["recovered"]) == (2, "b.example", "unknown", True)
    reporter.opened(new := access())
    assert new.number == 3
    reporter.acknowledged(taken.batches[0][0])
    assert list(read(journal._path)[0]) == [3]
    reporter.flush()
    later.written([3])
    later.close()
    Path(journal._path).touch()
    journal.written([2])


async def test_what_a_killed_proxy_told_is_not_taken_for_what_the_next_one_tells(journal: Journal) -> None:
    """It is acknowledged when it is written down, and by then another may listen to that."""
    killed, before = Reporter(journal), Taken()
    for _ in range(3):
        killed.opened(access())
        killed.listen(before)
    later = Journal(journal._path)
    reporter, taken = Reporter(later), Taken()
    reporter.listen(taken)
    reporter.acknowledged(before.batches[-1][0])
    assert list(read(journal._path)[0]) == [1, 2, 3], "nobody has written them down"
    reporter.acknowledged(taken.batches[-1][0])
    later.close()
    Path(journal._path).touch()
    journal.written([1, 2, 3])


async def test_nothing_goes_out_unrecorded(journal: Journal) -> None:
    reporter = Reporter(journal, most=2 * BATCH)
    with pytest.raises(Refused) as refused:
        for _ in range(2 * BATCH + 1):
            reporter.opened(access())
    assert refused.value.status == 503
    assert len(reporter) == 2 * BATCH
    taken = Taken()
    reporter.listen(taken)
    reporter.acknowledged(taken.batches[-1][0])
    reporter.opened(access())
    reporter.flush()


async def test_what_was_told_and_not_written_down_counts_one_by_one(journal: Journal) -> None:
    """A control plane whose database is slow takes everything and acknowledges nothing."""
    reporter, taken = Reporter(journal, most=2 * BATCH), Taken()
    reporter.listen(taken)
    with pytest.raises(Refused):
        for _ in range(2 * BATCH + 1):
            reporter.opened(access())
            reporter.flush()
    assert len(reporter) == 2 * BATCH == len(taken.items())
    reporter.acknowledged(taken.batches[-1][0])
    assert len(reporter) == 0
    reporter.opened(access())
    reporter.flush()


async def test_what_cannot_be_put_into_the_journal_does_not_go_out(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "j"))
    journal.close()
    with pytest.raises(Refused):
        Reporter(journal).opened(access())


async def test_a_listener_that_fails_is_not_told_more(journal: Journal) -> None:
    reporter, taken = Reporter(journal), Taken()
    taken.works = False
    reporter.listen(taken)
    reporter.opened(access())
    reporter.flush()
    reporter.opened(access())
    reporter.flush()
    assert len(taken.batches) == 1
    assert len(reporter) == 2


@given(st.text(max_size=2000), st.text(max_size=2000))
def test_a_batch_of_the_longest_items_fits_into_a_message(one: str, two: str) -> None:
    given = access(one)
    given.method, given.path, given.result = two, one * 10, two * 10
    given.verdict = Verdict("deny", one * 10, two * 10, one * 10, two)
    message = json.dumps({"op": "log", "upto": 1, "items": [item_of(given)] * BATCH}).encode()
    assert len(message) < MAX_MESSAGE
