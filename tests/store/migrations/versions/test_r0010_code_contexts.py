from __future__ import annotations

from sqlalchemy import inspect
from sqlalchemy.engine import Connection

from carrel.store import Database


async def test_what_it_adds(migrated: Database) -> None:
    def look(connection: Connection) -> list[set[str]]:
        tables = ("code_contexts", "environment_requests")
        return [{column["name"] for column in inspect(connection).get_columns(table)} for table in tables]

    assert await migrated.read(look) == [{"session_id", "name", "environment"}, {"node", "key", "name"}]
