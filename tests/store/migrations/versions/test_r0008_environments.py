from __future__ import annotations

from sqlalchemy import inspect
from sqlalchemy.engine import Connection

from carrel.store import Database


async def test_what_it_adds(migrated: Database) -> None:
    def look(connection: Connection) -> tuple[set[str], set[str]]:
        found = inspect(connection)
        return set(found.get_table_names()), {column["name"] for column in found.get_columns("sessions")}

    tables, columns = await migrated.read(look)
    assert {"environments", "environment_labels", "environment_uses"} <= tables and "acts_for" in columns
