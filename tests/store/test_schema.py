from __future__ import annotations

import asyncio
import sys

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.engine import Connection

from carrel.errors import PlatformError
from carrel.store import Database, SessionRecord, SessionStore
from carrel.store.schema import newest
from carrel.store.tables import metadata


async def run(database: Database, *statements: str) -> None:
    def work(connection: Connection) -> None:
        for statement in statements:
            connection.execute(text(statement))

    await database.write(work)


async def test_the_migrations_make_the_tables(database: Database) -> None:
    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    assert await database.read(differences) == []
    await run(database, "ALTER TABLE sessions ADD COLUMN surplus INTEGER")
    assert len(await database.read(differences)) == 1, "the comparison can fail"


async def test_a_newer_schema_is_refused_and_left_alone(where: str) -> None:
    database = await Database.open(where)
    await run(database, "UPDATE alembic_version SET version_num = '9999'")
    await database.close()
    with pytest.raises(PlatformError) as caught:
        await Database.open(where)
    assert caught.value.field == "database" and caught.value.hint
    assert "newer" in caught.value.detail and "9999" in caught.value.detail and newest() in caught.value.detail
    assert "hush" not in str(caught.value.problem())


async def test_tables_of_others_are_refused(where: str) -> None:
    database = await Database.open(where)
    await run(database, "DROP TABLE alembic_version", "DROP TABLE sessions", "CREATE TABLE sessions (id INTEGER)")
    await database.close()
    for _ in range(2):
        with pytest.raises(PlatformError) as caught:
            await Database.open(where)
        assert "did not make" in caught.value.detail


async def test_many_open_an_empty_database_at_once(where: str, base: SessionRecord) -> None:
    databases = await asyncio.gather(*(Database.open(where) for _ in range(4)))
    await SessionStore(databases[0]).insert(base)
    for database in databases:
        assert await SessionStore(database).get(base.id) == base
        await database.close()


async def test_two_processes_open_an_empty_database_at_once(where: str) -> None:
    program = (
        "import asyncio, sys\nfrom carrel.store import Database\n"
        "async def main():\n    database = await Database.open(sys.argv[1])\n    await database.close()\n"
        "sys.stdin.read(1)\nasyncio.run(main())\n"
    )
    started = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, where, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        for _ in range(2)
    ]
    done = await asyncio.gather(*(each.communicate(b"x") for each in started))
    assert [each.returncode for each in started] == [0, 0], done
    database = await Database.open(where)
    await database.close()
