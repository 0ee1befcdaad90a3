from __future__ import annotations

from alembic import command
from sqlalchemy import text
from sqlalchemy.engine import Connection

from carrel.store import Database
from carrel.store.approvals import ApprovalStore
from carrel.store.tables import metadata
from carrel.store.upgrades import config

VALUES = "'a', 'c', 's', 'shell', 'run_command', 'x', '{}', 'd', 'r', 'agent:a', 1, 9, 'approved', 'once', 5"


def before(connection: Connection) -> None:
    metadata.drop_all(connection)
    connection.execute(text("DROP TABLE alembic_version"))
    command.upgrade(config(connection), "0011")
    names = "id, context_id, sandbox_id, kind, operation, summary, arguments, digest, reason, requested_by"
    names += ", created_at, expires_at, state, scope, used_at"
    connection.execute(text(f"INSERT INTO approvals ({names}) VALUES ({VALUES})"))


async def test_what_was_used_stays_used(where: str) -> None:
    database = await Database.open(where)
    await database.write(before)
    await database.close()
    database = await Database.open(where)
    try:
        store = ApprovalStore(database)
        record = await store.get("a")
        assert record is not None and (record.used_at, record.run, record.run_on) == (5.0, None, None)
        assert not await store.use("a", 6.0, run="r", node="n") and await store.runs("n") == []
    finally:
        await database.close()
