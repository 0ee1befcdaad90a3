from __future__ import annotations

from sqlalchemy import inspect
from sqlalchemy.engine import Connection

from carrel.store import Database


async def test_what_it_adds(migrated: Database) -> None:
    def look(connection: Connection) -> tuple[set[str], list[str]]:
        found = inspect(connection)
        unique = [index["name"] for index in found.get_indexes("audit_records") if index["unique"]]
        return set(found.get_table_names()), [str(name) for name in unique]

    tables, unique = await migrated.read(look)
    assert {"audit_records", "audit_heads", "audit_holds", "tokens"} <= tables
    assert unique == ["audit_records_seq"]
