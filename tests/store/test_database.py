from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest
from sqlalchemy import insert, select, text

from carrel.errors import PlatformError
from carrel.store import Database
from carrel.store.tables import metadata, sessions

ROW = {
    **{column.name: "x" for column in sessions.columns if not column.nullable},
    **dict.fromkeys(("ephemeral", "unsafe"), False),
    **{name: {} for name in ("limits", "env", "labels")},
    **dict.fromkeys(("isolation_level", "created_at", "last_activity_at"), 1),
}


async def test_the_file_is_private_and_reopens(tmp_path: Path) -> None:
    path = tmp_path / "carrel.db"
    for _ in range(2):
        database = await Database.open(str(path))
        await database.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_damaged_file_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "carrel.db"
    path.write_bytes(b"not a database at all, whatever it may be called" * 100)
    before = path.read_bytes()
    with pytest.raises(PlatformError) as caught:
        await Database.open(str(path))
    assert caught.value.field == "data_dir" and caught.value.hint
    assert path.read_bytes() == before, "it is left for whoever wants to mend it"


async def test_every_connection_is_set_up(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "carrel.db"))
    try:
        wanted = {"journal_mode": "wal", "synchronous": 1, "busy_timeout": 5000, "foreign_keys": 1}
        async with database.engine.connect() as one, database.engine.connect() as other:
            for connection in (one, other):
                for name, value in wanted.items():
                    assert (await connection.execute(text(f"PRAGMA {name}"))).scalar() == value
    finally:
        await database.close()


async def test_readers_do_not_wait_for_a_writer(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "carrel.db"))
    try:
        async with database.engine.begin() as writer, asyncio.timeout(3):
            await writer.execute(insert(sessions).values(**ROW))
            async with database.engine.connect() as reader:
                assert (await reader.execute(select(sessions.c.id))).all() == []
        async with database.engine.connect() as reader:
            assert (await reader.execute(select(sessions.c.id))).scalars().all() == ["x"]
    finally:
        await database.close()


async def test_what_is_stored_outlives_the_database(tmp_path: Path) -> None:
    path = str(tmp_path / "carrel.db")
    database = await Database.open(path)
    async with database.engine.begin() as connection:
        await connection.execute(insert(sessions).values(**ROW))
    await database.close()
    assert os.listdir(tmp_path) == ["carrel.db"], "closed, it is one file"
    database = await Database.open(path)
    async with database.engine.connect() as connection:
        for table in metadata.sorted_tables:
            await connection.execute(select(table).limit(1))
        assert (await connection.execute(select(sessions.c.id))).scalars().all() == ["x"]
    await database.close()
