from __future__ import annotations

import pytest
from alembic import command
from sqlalchemy import text
from sqlalchemy.engine import Connection

from carrel.store import Database
from carrel.store.schema import known, newest
from carrel.store.tables import metadata
from carrel.store.upgrades import config


def at(connection: Connection, revision: str) -> None:
    metadata.drop_all(connection)
    connection.execute(text("DROP TABLE alembic_version"))
    command.upgrade(config(connection), revision)


def revisions(connection: Connection) -> list[str]:
    return list(connection.execute(text("SELECT version_num FROM alembic_version")).scalars())


@pytest.mark.parametrize("revision", known())
async def test_a_database_of_any_release_is_brought_up_to_date(where: str, revision: str) -> None:
    database = await Database.open(where)
    await database.write(lambda connection: at(connection, revision))
    assert await database.read(revisions) == [revision]
    await database.close()
    database = await Database.open(where)
    assert await database.read(revisions) == [newest()]
    for table in metadata.sorted_tables:
        await database.read(lambda connection, table=table: connection.execute(table.select()).close())  # type: ignore[misc]
    await database.close()
