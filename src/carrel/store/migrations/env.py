"""The script that Alembic runs to migrate, on the connection and in the transaction of `upgrades`."""

from __future__ import annotations

from alembic import context
from sqlalchemy.engine import Connection

from carrel.store.tables import metadata

connection = context.config.attributes.get("connection")
if not isinstance(connection, Connection):
    raise TypeError("migrations run when a database is opened, not by the alembic command")
context.configure(connection=connection, target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
