from __future__ import annotations

from sqlalchemy import inspect

from carrel.store import Database


async def test_what_it_adds(migrated: Database) -> None:
    assert "mcp_servers" in await migrated.read(lambda connection: set(inspect(connection).get_table_names()))
