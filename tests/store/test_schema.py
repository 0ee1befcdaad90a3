from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text
from sqlalchemy.engine import Connection

from carrel.errors import PlatformError
from carrel.store import Database, SessionRecord, SessionStore
from carrel.store.schema import known, newest
from carrel.store.tables import metadata
from carrel.store.upgrades import config


async def run(database: Database, *statements: str) -> None:
    def work(connection: Connection) -> None:
        for statement in statements:
            connection.execute(text(statement))

    await database.write(work)


def differences(connection: Connection) -> list[object]:
    return list(compare_metadata(MigrationContext.configure(connection), metadata))


async def test_the_migrations_make_the_tables(migrated: Database) -> None:
    assert await migrated.read(differences) == []
    await run(migrated, "ALTER TABLE sessions ADD COLUMN surplus INTEGER")
    assert len(await migrated.read(differences)) == 1, "the comparison can fail"


def anew(connection: Connection) -> None:
    """Make the tables again, by the migrations."""
    metadata.drop_all(connection)
    connection.execute(text("DROP TABLE alembic_version"))
    command.upgrade(config(connection), "head")


def shape(connection: Connection) -> dict[str, object]:
    """Everything the database says of its tables; the order of columns is no matter, as every query names them."""
    found = inspect(connection)
    revisions = connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all()
    tables: dict[str, object] = {"revisions": list(revisions)}
    for name in found.get_table_names():
        columns = [{**column, "type": repr(column["type"])} for column in found.get_columns(name)]
        indexes = [
            {**index, "dialect_options": {key: str(value) for key, value in index.get("dialect_options", {}).items()}}
            for index in found.get_indexes(name)
        ]
        tables[name] = {
            "columns": sorted(columns, key=lambda column: str(column["name"])),
            "key": found.get_pk_constraint(name),
            "indexes": sorted(indexes, key=lambda index: str(index["name"])),
            "unique": found.get_unique_constraints(name),
            "checks": found.get_check_constraints(name),
            "foreign": found.get_foreign_keys(name),
        }
    return tables


async def test_a_new_database_is_what_the_migrations_make(where: str) -> None:
    database = await Database.open(where)
    try:
        made = await database.read(shape)
        await database.write(anew)
        assert await database.read(shape) == made
        assert set(made) == {"revisions", "alembic_version", *metadata.tables} and made["revisions"] == [newest()]
    finally:
        await database.close()


def test_the_names_of_the_scripts_are_their_revisions() -> None:
    scripts = ScriptDirectory.from_config(config()).walk_revisions()
    assert known() == tuple(script.revision for script in scripts)


async def test_a_new_or_current_database_needs_no_alembic(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\nfrom carrel.store import Database\n"
        "async def main():\n    database = await Database.open(sys.argv[1])\n    await database.close()\n"
        "asyncio.run(main())\nprint('alembic' in sys.modules)\n"
    )
    path = str(tmp_path / "carrel.db")
    for state in ("new", "current"):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, path, stdout=asyncio.subprocess.PIPE
        )
        assert (await process.communicate())[0] == b"False\n", state


async def test_a_newer_schema_is_refused_and_left_alone(where: str) -> None:
    database = await Database.open(where)
    await run(database, "UPDATE alembic_version SET version_num = '9999'")
    await database.close()
    with pytest.raises(PlatformError) as caught:
        await Database.open(where)
    assert caught.value.field == "database" and caught.value.hint
    assert "newer" in caught.value.detail and "9999" in caught.value.detail and newest() in caught.value.detail
    assert "hush" not in str(caught.value.problem())


async def test_a_schema_from_before_the_first_release_is_refused_and_left_alone(where: str) -> None:
    database = await Database.open(where)
    await run(database, "UPDATE alembic_version SET version_num = '0012'")
    await database.close()
    for _ in range(2):
        with pytest.raises(PlatformError) as caught:
            await Database.open(where)
        assert caught.value.field == "database" and "new data directory" in (caught.value.hint or "")
        assert "before the first release" in caught.value.detail and "0012" in caught.value.detail


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
