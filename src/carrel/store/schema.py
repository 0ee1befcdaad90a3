"""Brings the tables of an open connection to what this code knows, in the caller's transaction. Knows no engine."""

from __future__ import annotations

import logging
import os
from functools import cache

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import func, inspect, select
from sqlalchemy.engine import Connection

from carrel.errors import PlatformError
from carrel.store import migrations
from carrel.store.migrations.versions.r0001_sessions import COLUMNS

_LOCK = 0x63617272656C  # "carrel": the advisory lock of everyone who migrates this database
_FIRST = "0001"


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", os.path.dirname(migrations.__file__).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


@cache
def _known() -> tuple[str, ...]:
    """Every revision, the newest first."""
    return tuple(script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions())


def newest() -> str:
    """The revision this code brings a database to."""
    return _known()[0]


def migrate(connection: Connection) -> None:
    """Bring the tables to the newest revision; `PlatformError` for a database of a newer carrel or of others.

    The transaction must be one that keeps other writers of a SQLite file out (`BEGIN IMMEDIATE`); on PostgreSQL
    an advisory lock does, until the transaction ends.
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    present = MigrationContext.configure(connection).get_current_heads()
    for revision in present:
        if revision not in _known():
            raise PlatformError(
                f"the database was made by a newer carrel: its schema is {revision}, this one knows up to {newest()}",
                field="database",
                hint="run the newer carrel, or give this one a database of its own",
            )
    if present == (newest(),):
        return
    config = _config(connection)
    if not present and inspect(connection).has_table("sessions"):
        _refuse_strangers(connection)
        command.stamp(config, _FIRST)
    command.upgrade(config, "head")


def _refuse_strangers(connection: Connection) -> None:
    """Tables without a revision are those of the first release, or not carrel's at all."""
    found = {column["name"] for column in inspect(connection).get_columns("sessions")}
    if found != {name for name, _kind, _nullable in COLUMNS}:
        raise PlatformError(
            "the database has a table `sessions` that carrel did not make",
            field="database",
            hint="give carrel a database (or a schema) of its own",
        )
