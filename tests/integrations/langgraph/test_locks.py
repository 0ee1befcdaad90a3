from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.postgres import Postgres

from carrel.errors import PlatformError, ThreadBusy
from carrel.integrations.langgraph import locks
from carrel.integrations.langgraph.locks import FileLocks, Locks, PostgresLocks, held

ELSEWHERE = """
import asyncio, sys
from carrel.integrations.langgraph import open_checkpointer
async def main():
    async with open_checkpointer(sys.argv[1]) as checkpoints, checkpoints.running("t"):
        print("held", flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.fixture(params=["file", "postgresql"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Locks, Locks]]:
    """The same locks, as two processes have them."""
    if request.param == "file":
        yield FileLocks(str(tmp_path / "locks")), FileLocks(str(tmp_path / "locks"))
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    one, other = PostgresLocks(postgres.url()), PostgresLocks(postgres.url())
    yield one, other
    await one.close()
    await other.close()


async def test_one_holder_at_a_time_here_and_elsewhere(pair: tuple[Locks, Locks]) -> None:
    one, other = pair
    async with held(one, "a"):
        for again in (one, other):
            with pytest.raises(ThreadBusy):
                async with held(again, "a"):
                    pytest.fail("two hold it")
        async with held(other, "b"):
            pass
    async with held(other, "a"):
        pass


async def test_who_is_broken_off_while_taking_one_does_not_keep_it(pair: tuple[Locks, Locks]) -> None:
    one, other = pair
    assert await one.take(0, lambda: None)  # what it takes to connect is not what this is about
    for turns in range(40):
        taking = asyncio.ensure_future(one.take(1, lambda: None))
        for _ in range(turns):
            await asyncio.sleep(0)
        taking.cancel()
        [taken] = await asyncio.gather(taking, return_exceptions=True)
        if taken is True:  # it was not broken off any more
            await one.release(1)
        assert await other.take(1, lambda: None)
        await other.release(1)
    await one.release(0)


async def test_who_waits_gets_it_when_it_is_free(pair: tuple[Locks, Locks]) -> None:
    one, other = pair
    order: list[str] = []

    async def second() -> None:
        async with held(other, "a", wait_s=30):
            order.append("second")

    async with asyncio.TaskGroup() as group, held(one, "a"):
        group.create_task(second())
        await asyncio.sleep(0)
        with pytest.raises(ThreadBusy):
            async with held(other, "a", wait_s=0.15):
                pass
        order.append("first")
    assert order == ["first", "second"]


async def test_an_error_under_the_lock_comes_through_and_frees_it(pair: tuple[Locks, Locks]) -> None:
    one, other = pair
    for error in (TimeoutError("own"), OSError("x"), ValueError("y")):
        with pytest.raises(type(error)) as caught:
            async with held(one, "a"):
                raise error
        assert caught.value is error
    async with held(other, "a"):
        pass


async def test_a_killed_process_holds_nothing(database: str, tmp_path: Path) -> None:
    from carrel.integrations.langgraph import open_checkpointer

    process = subprocess.Popen([sys.executable, "-c", ELSEWHERE, database], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == "held\n"
        async with open_checkpointer(database) as checkpoints:
            with pytest.raises(ThreadBusy):
                async with checkpoints.running("t"):
                    pytest.fail("two hold it")
            process.send_signal(signal.SIGKILL)
            async with checkpoints.running("t", wait_s=30):
                pass
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_a_lost_connection_ends_what_ran_under_its_locks(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "PING_EVERY_S", 0.02)
    found = PostgresLocks(postgres.url(application_name="to-be-lost"))
    watching = asyncio.create_task(found.watch())
    try:
        with pytest.raises(PlatformError, match="lost"):
            async with held(found, "a"):
                await postgres.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'to-be-lost'"
                )
                await asyncio.sleep(60)
        async with held(found, "a"):
            pass  # on a new connection
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await found.close()


async def test_a_database_that_is_not_there_is_said_in_words(tmp_path: Path) -> None:
    found = PostgresLocks(f"postgresql://x:hush@/x?host={tmp_path}")
    with pytest.raises(PlatformError) as caught:
        async with held(found, "a"):
            pass
    assert "hush" not in str(caught.value)


@given(st.sets(st.text(), max_size=50))
def test_names_have_numbers_that_both_databases_take(names: set[str]) -> None:
    numbers = {locks._number(name) for name in names}
    assert len(numbers) == len(names) and all(0 <= number < 2**62 for number in numbers)


async def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"")
    os.symlink(tmp_path / "target", tmp_path / "locks")
    with pytest.raises(OSError):
        async with held(FileLocks(str(tmp_path / "locks")), "a"):
            pass
