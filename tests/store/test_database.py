from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select, text
from sqlalchemy.engine import Connection
from tests.support.postgres import Postgres

from carrel.errors import CarrelError, InvalidRequest, PlatformError
from carrel.store import Database, SessionRecord, SessionStore
from carrel.store.database import Occupied
from carrel.store.tables import metadata


async def test_the_file_is_private_and_reopens(tmp_path: Path) -> None:
    path = tmp_path / "carrel.db"
    for where in (str(path), f"sqlite:///{path}"):
        database = await Database.open(where)
        await database.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["carrel.db"], "closed, it is one file"


async def test_a_damaged_file_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "carrel.db"
    path.write_bytes(b"not a database at all, whatever it may be called" * 100)
    before = path.read_bytes()
    with pytest.raises(PlatformError) as caught:
        await Database.open(str(path))
    assert caught.value.field == "data_dir" and caught.value.hint
    assert path.read_bytes() == before, "it is left for whoever wants to mend it"


async def test_every_sqlite_connection_is_set_up(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "carrel.db"))
    wanted = {"journal_mode": "wal", "synchronous": 1, "busy_timeout": 5000, "foreign_keys": 1}

    def check(connection: Connection) -> None:
        for name, value in wanted.items():
            assert connection.execute(text(f"PRAGMA {name}")).scalar() == value

    try:
        await database.read(check)
        await database.write(check)
    finally:
        await database.close()


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_readers_do_not_wait_for_a_writer(database: Database, kind: str, base: SessionRecord) -> None:
    store = SessionStore(database)
    await store.insert(base)
    wrote, go = threading.Event(), threading.Event()

    def write(connection: Connection) -> None:
        connection.execute(text("UPDATE sessions SET provider = 'other'"))
        wrote.set()
        assert go.wait(10)

    writer = asyncio.ensure_future(database.write(write))
    try:
        assert await asyncio.to_thread(wrote.wait, 10)
        record = await store.get("sbx-1")
    finally:
        go.set()
        await writer
    assert record is not None and record.provider == "namespace"
    record = await store.get("sbx-1")
    assert record is not None and record.provider == "other"


async def test_a_query_that_fails_writes_nothing(database: Database, base: SessionRecord) -> None:
    store = SessionStore(database)
    await store.insert(base)

    def half(connection: Connection) -> None:
        connection.execute(text("UPDATE sessions SET provider = 'other'"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await database.write(half)
    assert await store.get("sbx-1") == base
    with pytest.raises(PlatformError) as caught:
        await database.read(lambda connection: connection.execute(text("SELECT * FROM nowhere")).close())
    assert "nowhere" in caught.value.detail


async def test_a_locked_file_is_told_of_in_time(tmp_path: Path, base: SessionRecord) -> None:
    database = await Database.open(str(tmp_path / "carrel.db"))
    other = sqlite3.connect(tmp_path / "carrel.db", isolation_level=None)
    try:
        await database.write(lambda connection: connection.exec_driver_sql("PRAGMA busy_timeout=50").close())
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(PlatformError) as caught:
            await SessionStore(database).insert(base)
        assert "locked" in caught.value.detail
        other.execute("ROLLBACK")
        await SessionStore(database).insert(base)
    finally:
        other.close()
        await database.close()


async def test_a_short_write_happens_at_once_or_not_at_all(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "carrel.db"))
    await database.write(lambda connection: connection.execute(text("CREATE TABLE t (n INTEGER)")))
    count = text("SELECT count(*) FROM t")

    def put(connection: Connection) -> None:
        connection.execute(text("INSERT INTO t VALUES (1)"))

    def fails(connection: Connection) -> None:
        put(connection)
        raise ValueError

    database.write_here(put)
    with pytest.raises(ValueError):
        database.write_here(fails)
    assert await database.read(lambda connection: connection.execute(count).scalar()) == 1
    other = sqlite3.connect(tmp_path / "carrel.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Occupied):
        database.write_here(put)
    other.execute("ROLLBACK")
    other.close()
    database.write_here(put)
    assert await database.read(lambda connection: connection.execute(count).scalar()) == 2
    await database.close()
    assert os.listdir(tmp_path) == ["carrel.db"]


async def test_short_writes_leave_some_to_the_thread_that_empties_the_log(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "carrel.db"))
    await database.write(lambda connection: connection.execute(text("CREATE TABLE t (data BLOB)")))

    def put(connection: Connection) -> None:
        connection.execute(text("INSERT INTO t VALUES (zeroblob(100000))"))

    handed_on = 0
    for _ in range(500):
        try:
            database.write_here(put)
        except Occupied:
            handed_on += 1
            await database.write(put)
    assert handed_on >= 4
    assert (tmp_path / "carrel.db-wal").stat().st_size < 30_000_000, "50 MB were written"
    await database.close()


async def test_a_server_elsewhere_is_never_here(postgres: Postgres, where: str, kind: str) -> None:
    if kind == "postgresql":
        database = await Database.open(where)
        with pytest.raises(Occupied):
            database.write_here(lambda connection: None)
        await database.close()


async def test_what_is_stored_outlives_the_database(where: str, base: SessionRecord) -> None:
    database = await Database.open(where)
    await SessionStore(database).insert(base)
    await database.close()
    database = await Database.open(where)
    for table in metadata.sorted_tables:
        query = select(table).limit(1)
        await database.read(lambda connection, query=query: connection.execute(query).close())  # type: ignore[misc]
    assert await SessionStore(database).get("sbx-1") == base
    await database.close()


@pytest.mark.parametrize(
    "url",
    [
        "mysql://carrel:hush-hush@host/db",
        "hush-hush://",
        "HUSH-HUSH x://",
        "postgresql://carrel:hush-hush@host:hush-hush/db",
        "postgresql://carrel:hush/hush-hush@host/db",
        "postgresql://[hush-hush/db",
        "sqlite://",
    ],
)
async def test_a_url_that_is_none_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await Database.open(url)
    assert caught.value.field == "database" and caught.value.hint
    assert "@" not in caught.value.detail and (url.startswith("hush") or "hush" not in str(caught.value.problem()))


async def test_a_database_that_is_not_there_is_told_of(postgres: Postgres) -> None:
    with pytest.raises(PlatformError) as caught:
        await Database.open(postgres.url().replace("/postgres?", "/absent?"))
    assert "absent" in caught.value.detail and "hush" not in str(caught.value.problem())


@given(st.text(max_size=30))
def test_no_url_ends_in_a_traceback(rest: str) -> None:
    with pytest.raises(CarrelError):
        asyncio.run(Database.open("mysql://" + rest))
    with pytest.raises(CarrelError):  # port 1 of this host: nobody is there
        asyncio.run(Database.open("postgresql://127.0.0.1:1/" + re.sub(r"[?#]", "", rest)))
