from __future__ import annotations

import asyncio

import pytest

from carrel.control.jobs.runner import _Looks
from carrel.control.nodes import workers
from carrel.control.nodes.workers import OtherWorkers, SharedChange, Worker, WorkerTable, server_of
from carrel.errors import PlatformError


def of_three(index: int, table: WorkerTable | None = None, *, alone: bool = False) -> Worker:
    return Worker("s", index, 3, table, alone=alone)


def test_names() -> None:
    assert Worker("s").name == "s" and Worker("s").names == ("s",)
    assert [of_three(index).name for index in range(3)] == ["s:0", "s:1", "s:2"] == list(of_three(0).names)
    assert server_of("s:2") == server_of("s") == "s"
    assert of_three(1).index_of("s:2") == 2
    assert [of_three(1).index_of(name) for name in ("s:1", "s", "t:0", "s:3")] == [None] * 4


def test_who_recovers_what() -> None:
    """Each worker what it had; one that is alone also what no worker of now has."""
    assert [of_three(1).recovers(each) for each in ("s:1", "s:0", "s:7", "s", None)] == [True, *[False] * 4]
    assert [of_three(0, alone=True).recovers(each) for each in ("s:0", "s:1", "s:7", "s", None)] == [
        True, False, True, True, True,
    ]  # fmt: skip
    assert all(Worker("s").recovers(each) for each in ("s", "s:0", None))
    assert not set(of_three(0).names) & set(of_three(0).former) and "s" in of_three(0).former
    assert "s:0" in Worker("s").former and "s" not in Worker("s").former


@pytest.mark.parametrize("total", [0, 1, 2, 3, 10, 1000])
def test_shares_are_the_whole(total: int) -> None:
    shares = [of_three(index).share(total) for index in range(3)]
    assert sum(shares) == total and max(shares) - min(shares) <= 1
    assert Worker("s").share(total) == total


async def test_a_change_of_one_is_learnt_by_the_others_once() -> None:
    table = WorkerTable(3)
    learnt: list[str] = []

    def others(index: int) -> OtherWorkers:
        async def learn(what: SharedChange) -> None:
            learnt.append(f"{index} {what.name}")

        return OtherWorkers(of_three(index, table), {what: (lambda what=what: learn(what)) for what in SharedChange})

    first, second = others(0), others(1)
    assert not first.changed
    of_three(2, table).wrote(["tokens", "sessions", "secrets"])
    assert first.changed and second.changed
    await first.follow()
    assert sorted(learnt) == ["0 SECRETS", "0 TOKENS"] and not first.changed and second.changed
    await second.follow()
    assert sorted(learnt)[2:] == ["1 SECRETS", "1 TOKENS"]


def test_jobs_are_looked_at_when_a_worker_changed_some() -> None:
    table = WorkerTable(3)
    first, second = (Worker("s", index, 3, table, writer="a socket") for index in (0, 1))
    assert Worker("s").job_changes() is None and Worker("s", 0, 3, table).job_changes() is None, "others may write"
    looks = _Looks(second.job_changes)
    assert looks.needed() and not looks.needed()
    first.wrote(["sessions"])
    assert not looks.needed()
    for table_of_jobs in ("jobs", "approvals"):
        first.wrote([table_of_jobs])
        assert looks.needed() and not looks.needed()
    looks.due_in(-1)
    assert looks.needed(), "one starts now"
    assert all(_Looks(Worker("s").job_changes).needed() for _ in range(2))


async def test_a_change_that_cannot_be_learnt_is_tried_again() -> None:
    table, tries = WorkerTable(3), 0

    async def fail_once() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise PlatformError("the database is away")

    others = OtherWorkers(of_three(0, table), dict.fromkeys(SharedChange, fail_once))
    of_three(1, table).announce(SharedChange.POLICIES)
    await others.follow()
    assert others.changed
    await others.follow()
    assert not others.changed and tries == 2


async def test_a_request_waits_for_the_next_process_of_a_dead_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    table = WorkerTable(3)
    worker = of_three(0, table)
    assert worker.answers("s:1") is False and worker.answers("t") is None
    waiting = asyncio.create_task(worker.returned("s:1"))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    table.set_ready(1, True)
    assert await waiting
    monkeypatch.setattr(workers, "RETURNS_WITHIN_S", 0.02)
    assert not await worker.returned("s:2") and not await worker.returned("t")
