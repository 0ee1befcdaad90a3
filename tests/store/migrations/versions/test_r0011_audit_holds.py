from __future__ import annotations

from alembic import command
from sqlalchemy import text
from sqlalchemy.engine import Connection

from carrel.store import Database
from carrel.store.audit import AuditStore
from carrel.store.tables import metadata
from carrel.store.upgrades import config


def before(connection: Connection) -> None:
    metadata.drop_all(connection)
    connection.execute(text("DROP TABLE alembic_version"))
    command.upgrade(config(connection), "0010")
    values = "('a', 'n', 3, false), ('b', 'm', 9, true)"
    connection.execute(text(f"INSERT INTO audit_chains (chain, node, open_from, clean) VALUES {values}"))


async def test_what_servers_left_is_still_known(where: str) -> None:
    database = await Database.open(where)
    await database.write(before)
    await database.close()
    database = await Database.open(where)
    try:
        store = AuditStore(database)
        assert await store.unclean("n") == [("a", "n", 3, False)]
        assert await store.chains() == ["a", "b"] and await store.holds("b") == [("b", "m", 9, True)]
    finally:
        await database.close()
