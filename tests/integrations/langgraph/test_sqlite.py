"""SQLite near the event loop: nobody is kept waiting, neither by another process nor by a long statement."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
import threading
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.integrations.langgraph.sqlite import IN_A_ROW, InlineConnection


@pytest.fixture
async def near(tmp_path: Path) -> AsyncIterator[InlineConnection]:
    async with InlineConnection(str(tmp_path / "a.db"), 30.0) as connection:
        await connection.executescript("PRAGMA journal_mode=WAL; CREATE TABLE t (k INTEGER PRIMARY KEY, v TEXT)")
        await connection.commit()
        yield connection


async def test_who_waits_for_another_process_keeps_nobody_else_waiting(near: InlineConnection, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writing = asyncio.ensure_future(near.execute("INSERT INTO t VALUES (1, 'a')").__aenter__())
        for _ in range(20):  # the loop turns while it waits
            await asyncio.sleep(0.001)
        assert not writing.done()
        other.execute("COMMIT")
        await writing
    await near.commit()
    async with near.execute("SELECT v FROM t") as cursor:
        assert await cursor.fetchall() == [("a",)]


async def test_it_does_not_wait_for_ever(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as other:
        other.executescript("PRAGMA journal_mode=WAL; CREATE TABLE t (k)")
        other.execute("BEGIN IMMEDIATE")
        async with InlineConnection(str(tmp_path / "a.db"), 0.05) as near:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                await near.execute("INSERT INTO t VALUES (1)")


async def test_one_that_read_before_another_wrote_is_told_at_once(near: InlineConnection, tmp_path: Path) -> None:
    await near.execute("BEGIN")
    async with near.execute("SELECT * FROM t") as cursor:
        assert await cursor.fetchall() == []
    with closing(sqlite3.connect(tmp_path / "a.db")) as other, other:
        other.execute("INSERT INTO t VALUES (1, 'a')")
    with pytest.raises(sqlite3.OperationalError) as raised:  # trying again would be of no use
        await near.execute("INSERT INTO t VALUES (2, 'b')")
    assert raised.value.sqlite_errorcode == sqlite3.SQLITE_BUSY_SNAPSHOT
    await near.rollback()


async def test_one_that_gave_up_sees_what_comes_and_writes_again(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.executescript("PRAGMA journal_mode=WAL; CREATE TABLE t (k)")
        async with InlineConnection(path, 0.02) as near:
            for give_up in (_time_out, _break_off):
                other.execute("BEGIN IMMEDIATE")
                await give_up(near.execute("INSERT INTO t VALUES (1)").__aenter__())
                other.execute("ROLLBACK")
                assert not near.in_transaction
                for count in (1, 2):
                    other.execute("INSERT INTO t VALUES (2)")
                    async with near.execute("SELECT count(*) FROM t") as cursor:
                        assert await cursor.fetchone() == (count,)
                await near.execute("DELETE FROM t")
                await near.commit()


async def _time_out(writing: Coroutine[Any, Any, object]) -> None:
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        await writing


async def _break_off(writing: Coroutine[Any, Any, object]) -> None:
    task = asyncio.ensure_future(writing)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_one_that_is_broken_off_in_the_thread_leaves_nothing_to_those_who_come_next(
    near: InlineConnection, tmp_path: Path
) -> None:
    begun, go = threading.Event(), threading.Event()

    def hold() -> int:
        begun.set()
        go.wait(30)
        return 1

    await near.create_function("hold", 0, hold)
    await near.create_function("place", 0, threading.get_ident)
    writing = asyncio.ensure_future(near.execute("INSERT INTO t SELECT hold(), 'a' ORDER BY 1").__aenter__())
    await asyncio.to_thread(begun.wait, 30)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    reading = asyncio.ensure_future(near.execute("SELECT k, place() FROM t UNION SELECT 9, place()").__aenter__())
    await asyncio.sleep(0)  # it did not run here, where it would have waited for the other
    assert not reading.done()
    go.set()
    found = await (await reading).fetchall()
    assert [key for key, _ in found] == [9] and found[0][1] != threading.get_ident()
    assert not near.in_transaction
    with closing(sqlite3.connect(tmp_path / "a.db", timeout=0)) as other, other:
        other.execute("INSERT INTO t VALUES (2, 'b')")
    async with near.execute("SELECT k, place() FROM t") as cursor:
        assert await cursor.fetchall() == [(2, threading.get_ident())]


REPAIRS = """
import fcntl, os, sqlite3, sys
path = sys.argv[1]
if os.fork() == 0:  # a process that is killed leaves its log of changes
    connection = sqlite3.connect(path)
    connection.executescript("PRAGMA journal_mode=WAL; CREATE TABLE t (k); INSERT INTO t VALUES (1)")
    os._exit(0)
os.wait()
index = open(path + "-shm", "r+b", buffering=0)
fcntl.lockf(index, fcntl.LOCK_SH, 1, 128)  # another that has the database open,
fcntl.lockf(index, fcntl.LOCK_EX, 3, 120)  # and is just about to make its index anew
index.write(bytes(136))
print(flush=True)
sys.stdin.read()
"""


async def test_it_waits_while_another_process_repairs(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", REPAIRS, path, stdin=PIPE, stdout=PIPE)
    assert other.stdout is not None and other.stdin is not None
    try:
        await other.stdout.readline()
        async with InlineConnection(path, 30.0) as near:
            with pytest.raises(sqlite3.OperationalError) as raised:
                near._conn.execute("SELECT * FROM t")
            assert raised.value.sqlite_errorcode == sqlite3.SQLITE_BUSY_RECOVERY
            reading = asyncio.ensure_future(near.execute("SELECT * FROM t").__aenter__())
            await asyncio.sleep(0)
            other.stdin.close()
            assert await (await reading).fetchall() == [(1,)]
    finally:
        other.stdin.close()
        await other.wait()


async def test_what_the_driver_complains_of_is_told(near: InlineConnection) -> None:
    with pytest.raises(sqlite3.OperationalError, match="decode"):
        async with near.execute("SELECT CAST(x'ff' AS TEXT)") as cursor:
            await cursor.fetchall()


async def test_what_is_short_runs_here_and_what_is_long_elsewhere(near: InlineConnection) -> None:
    await near.create_function("place", 0, threading.get_ident)

    async def place(statement: str) -> bool:
        async with near.execute(statement) as cursor:
            [(found,)] = await cursor.fetchall()
        await near.rollback()
        return bool(found == threading.get_ident())

    assert await place("SELECT place()")
    assert not await place("SELECT place() ORDER BY 1")
    assert not await place("SELECT place() WHERE 1 IN (1)")
    assert await place("SELECT place()")
    near._lookups = True
    assert await place("SELECT place() ORDER BY 1")


async def test_the_log_of_changes_is_emptied_now_and_then(near: InlineConnection, tmp_path: Path) -> None:
    async def fill(commits: int) -> int:
        for _ in range(commits):
            await near.execute("INSERT INTO t (v) VALUES (?)", ("x" * 4000,))
            await near.commit()
        return (tmp_path / "a.db-wal").stat().st_size

    once = await fill(IN_A_ROW)
    assert await fill(4 * IN_A_ROW) < 2 * once
    assert (tmp_path / "a.db").stat().st_size > 4 * IN_A_ROW * 4000


async def test_one_that_is_closed_says_so(tmp_path: Path) -> None:
    near = await InlineConnection(str(tmp_path / "a.db"), 1.0)
    await near.close()
    with pytest.raises(ValueError, match=r"closed|no active"):
        await near.execute("SELECT 1")


steps = st.lists(
    st.tuples(st.just("put"), st.integers(0, 5), st.text(max_size=3))
    | st.tuples(st.just("many"), st.integers(0, 5), st.text(max_size=3))
    | st.tuples(st.just("drop"), st.integers(0, 5), st.just(""))
    | st.tuples(st.sampled_from(["commit", "rollback", "list"]), st.just(0), st.just("")),
    max_size=30,
)


@settings(max_examples=25)
@given(steps)
def test_it_holds_what_a_plain_connection_holds(todo: list[tuple[str, int, str]]) -> None:
    async def run(path: str) -> list[object]:
        seen: list[object] = []
        async with InlineConnection(path, 1.0) as near:
            await near.executescript(MADE)
            for name, key, value in todo:
                if name == "put":
                    await near.execute(PUT, (key, value))
                elif name == "many":
                    await near.executemany(PUT, iter([(key, value), (key + 1, value)]))
                elif name == "drop":
                    await near.execute(DROP, (key,))
                elif name == "list":
                    async with near.execute(LIST) as cursor:
                        seen.append(await cursor.fetchall())
                else:
                    await getattr(near, name)()
        return seen

    def plainly(path: str) -> list[object]:
        seen: list[object] = []
        with closing(sqlite3.connect(path)) as plain:
            plain.executescript(MADE)
            for name, key, value in todo:
                if name == "put":
                    plain.execute(PUT, (key, value))
                elif name == "many":
                    plain.executemany(PUT, [(key, value), (key + 1, value)])
                elif name == "drop":
                    plain.execute(DROP, (key,))
                elif name == "list":
                    seen.append(plain.execute(LIST).fetchall())
                else:
                    getattr(plain, name)()
        return seen

    with tempfile.TemporaryDirectory() as place:
        assert asyncio.run(run(f"{place}/a.db")) == plainly(f"{place}/b.db")
        with closing(sqlite3.connect(f"{place}/a.db")) as one, closing(sqlite3.connect(f"{place}/b.db")) as other:
            assert one.execute(LIST).fetchall() == other.execute(LIST).fetchall()


MADE = "PRAGMA journal_mode=WAL; CREATE TABLE t (k INTEGER PRIMARY KEY, v TEXT)"
PUT, DROP, LIST = "INSERT OR REPLACE INTO t VALUES (?, ?)", "DELETE FROM t WHERE k = ?", "SELECT * FROM t ORDER BY k"
