from __future__ import annotations

from alembic import command
from sqlalchemy import text
from sqlalchemy.engine import Connection

from carrel.store import Database, SessionStore
from carrel.store.tables import metadata
from carrel.store.upgrades import config

VALUES = "'s', 'c', false, 'terminated', 'p', 1, false, 'medium', 'none', '{}', '{}', '{}', 1, 2, 'careful'"


def before(connection: Connection) -> None:
    metadata.drop_all(connection)
    connection.execute(text("DROP TABLE alembic_version"))
    command.upgrade(config(connection), "0012")
    names = "id, context_id, ephemeral, state, provider, isolation_level, unsafe, trust, network, limits, env, labels"
    connection.execute(
        text(f"INSERT INTO sessions ({names}, created_at, last_activity_at, template) VALUES ({VALUES})")
    )


async def test_a_session_from_before_is_not_forgotten(where: str) -> None:
    database = await Database.open(where)
    await database.write(before)
    await database.close()
    database = await Database.open(where)
    try:
        store = SessionStore(database)
        record = await store.newest_of_context("c")
        assert record is not None
        assert (record.agent, record.used_bytes, record.expires_at, record.forgotten) == (None, None, None, False)
        await store.forget("c")
        record = await store.newest_of_context("c")
        assert record is not None and (record.forgotten, record.template) == (True, None)
    finally:
        await database.close()
