from __future__ import annotations

import asyncio
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from carrel.supervisor.output import END, RUN_COST, STDERR, STDOUT, ByteBudget, CommandOutput

writes = st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), st.binary(max_size=20)), max_size=30)


def _tags(written: list[tuple[int, bytes]]) -> list[tuple[int, int]]:
    return [(stream, byte) for stream, data in written for byte in data]


@given(writes, st.integers(0, 200), st.integers(0, 1000), st.integers(1, 7))
def test_what_is_kept_is_a_prefix_of_what_was_written(
    written: list[tuple[int, bytes]], limit: int, left: int, size: int
) -> None:
    budget = ByteBudget(left)
    output = CommandOutput(limit, budget)
    for stream, data in written:
        output.add(stream, data)
    everything = b"".join(data for _, data in written)
    kept = len(output)
    runs = len(list(groupby(stream for stream, _ in _tags(written)[:kept])))
    assert output.dropped == len(everything) - kept
    assert budget.left == left - kept - runs * RUN_COST >= 0
    if left >= limit + RUN_COST * len(written):
        assert kept == min(len(everything), limit)

    tagged = _tags(written)[:kept]
    expected = tuple(bytes(byte for kind, byte in tagged if kind == stream) for stream in (STDOUT, STDERR))
    assert output.whole() == expected

    seen: list[tuple[int, int]] = []
    while (piece := output.read(len(seen), size))[0] != END:
        assert 0 < len(piece[1]) <= size
        seen += [(piece[0], byte) for byte in piece[1]]
    assert seen == tagged

    output.release()
    assert (budget.left, len(output), output.read(0, 10)) == (left, 0, (END, b""))
    output.add(STDOUT, b"late")
    assert len(output) == 0


async def test_every_waiter_is_woken_by_bytes_and_by_the_end() -> None:
    output = CommandOutput(10, ByteBudget(10))
    for wake in (lambda: output.add(STDOUT, b"x"), lambda: output.add(STDOUT, b"x" * 100), output.end):
        waiters = [asyncio.create_task(output.changed()) for _ in range(3)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        wake()
        await asyncio.wait(waiters, timeout=5)
        assert [waiter.cancelled() for waiter in waiters] == [True, False, False]
    assert output.ended


@given(writes, st.integers(1, 60), st.integers(1, 9))
def test_passed_on_output_loses_nothing_and_is_not_kept(
    written: list[tuple[int, bytes]], limit: int, size: int
) -> None:
    budget = ByteBudget(10_000)
    calls: list[bool] = []
    output = CommandOutput(limit, budget, lambda: calls.append(True))
    offset, got = 0, list[tuple[int, bytes]]()

    def read_all() -> None:
        nonlocal offset
        while True:
            stream, data = output.read(offset, size)
            if stream == END:
                return
            got.append((stream, data))
            offset += len(data)
            output.passed(offset)

    for stream, data in written:
        output.add(stream, data)
        if output.full:
            before = len(calls)
            read_all()
            assert len(calls) == before + 1, "the program may write again"
    read_all()
    assert _tags(got) == _tags(written)
    assert len(output) == sum(len(data) for _, data in written)
    assert output.dropped == 0
    assert budget.left == budget.limit
