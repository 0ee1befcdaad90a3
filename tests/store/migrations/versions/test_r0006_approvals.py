from __future__ import annotations

from sqlalchemy import inspect
from sqlalchemy.engine import Connection

from carrel.store import Database


async def test_what_it_adds(migrated: Database) -> None:
    def look(connection: Connection) -> set[str]:
        return set(inspect(connection).get_table_names())

    assert {"approvals", "policies"} <= await migrated.read(look)
