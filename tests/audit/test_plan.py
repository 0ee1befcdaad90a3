from __future__ import annotations

from tests.support.no_events import no_event

from carrel.audit import AuditEntry, Ending, SigningKey
from carrel.audit.plan import ChainEnd, Hold, Item, TransactionPlan
from carrel.audit.records import genesis

ENTRY = AuditEntry("context:c", "a", "shell", "run")


def plan(
    key: SigningKey,
    items: list[Item],
    *,
    chains: dict[str, ChainEnd] | None = None,
    opened: dict[str, set[int]] | None = None,
    seal: tuple[str, ...] = (),
    taken: dict[str, frozenset[str]] | None = None,
) -> TransactionPlan:
    return TransactionPlan(key, "n", chains or {}, opened or {}, items, seal, taken or {}, 3, 100.0, no_event)


def begin(ticket: object) -> Item:
    return Item("begin", ENTRY, None, 1.0, ticket)  # type: ignore[arg-type]


def test_a_chain_that_nobody_knew_is_continued_where_it_ends(key: SigningKey) -> None:
    for tip, first in (((0, b"", 0), 1), ((7, b"h" * 32, 7), 8)):
        work = plan(key, [begin(object()), Item("whole", ENTRY, Ending(), 2.0)])
        rows, heads, holds, _ = work.build({"context:c": tip})
        assert [row.seq for row in rows] == [first, first + 1]
        assert heads == [] and holds == [Hold("context:c", "n", first, False)]
        assert work.still("context:c") == {first} and work.chains["context:c"].held
    assert genesis("context:c") != genesis("context:d")


def test_an_end_finds_its_begin_in_the_same_transaction(key: SigningKey) -> None:
    class Of:
        seq = 0

    ticket = Of()
    end = Item("end", ENTRY, Ending(), 1.5, ticket)  # type: ignore[arg-type]
    rows, heads, holds, _ = plan(key, [begin(ticket), end]).build({"context:c": (0, b"", 0)})
    assert [(row.type, row.ref) for row in rows] == [("begin", None), ("end", 1)]
    assert holds == [Hold("context:c", "n", 3, False)] and heads == []


def test_a_head_when_there_are_enough_records(key: SigningKey) -> None:
    chains = {"context:c": ChainEnd(4, b"h" * 32, 2, held=True)}
    rows, heads, holds, _ = plan(key, [Item("whole", ENTRY, Ending(), 1.0)], chains=chains).build({})
    assert [(head.seq, head.records, head.hash) for head in heads] == [(5, 3, rows[0].hash.hex())]
    assert heads[0].genuine() and holds == [Hold("context:c", "n", 6, True)]
    assert not chains["context:c"].held, "the next record says again that it is not clean"


def test_between_heads_nothing_but_records_is_written(key: SigningKey) -> None:
    chains = {"context:c": ChainEnd(3, b"h" * 32, 2, held=True)}
    rows, heads, holds, _ = plan(key, [begin(object())], chains=chains).build({})
    assert (len(rows), heads, holds) == (1, [], [])


def test_a_chain_with_open_operations_is_not_clean(key: SigningKey) -> None:
    chains = {"context:c": ChainEnd(9, b"h" * 32, 7, held=True)}
    _, heads, holds, _ = plan(key, [], chains=chains, opened={"context:c": {4, 8}}, seal=("context:c",)).build({})
    assert heads[0].seq == 9 and holds == [Hold("context:c", "n", 4, False)]
    end = Item("end", ENTRY, Ending(), 1.0, ref=4)
    work = plan(key, [end], chains={"context:c": ChainEnd(9, b"h" * 32, 9, held=True)}, opened={"context:c": {4, 8}})
    work.build({})
    assert work.still("context:c") == {8}


def test_only_who_continues_a_chain_says_so(key: SigningKey) -> None:
    tip = (5, b"h" * 32, 2)
    assert plan(key, [], seal=("context:c",)).build({"context:c": tip})[2] == []
    taken = plan(key, [], seal=("context:c",), taken={"context:c": frozenset({"m", "n"})}).build({"context:c": tip})
    assert taken[2] == [Hold("context:c", "n", 6, True), Hold("context:c", "m", 6, True)]
