from __future__ import annotations

from sqlalchemy import inspect
from sqlalchemy.engine import Connection

from carrel.store import Database


async def test_what_it_adds(migrated: Database) -> None:
    def look(connection: Connection) -> dict[str, set[str]]:
        found = inspect(connection)
        return {table: {column["name"] for column in found.get_columns(table)} for table in ("sessions", "snapshots")}

    columns = await migrated.read(look)
    assert {"filespace", "snapshot", "notice"} <= columns["sessions"]
    assert {"node", "reason", "archived"} <= columns["snapshots"]
