"""Runs the migrations on a database that an older carrel made. Imported only when there is one."""

from __future__ import annotations

import logging
import os

from alembic import command
from alembic.config import Config
from sqlalchemy import inspect
from sqlalchemy.engine import Connection

from carrel.errors import PlatformError
from carrel.store import migrations
from carrel.store.migrations.versions.r0001_sessions import COLUMNS

_FIRST = "0001"


def config(connection: Connection | None = None) -> Config:
    """The settings of Alembic: where the scripts are, and the connection they run on."""
    made = Config()
    made.set_main_option("script_location", os.path.dirname(migrations.__file__).replace("%", "%%"))
    made.attributes["connection"] = connection
    return made


def upgrade(connection: Connection, *, adopt: bool = False) -> None:
    """Run every migration the database lacks. With `adopt` its tables have no revision: they have to be those of the
    first release.
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)
    settings = config(connection)
    if adopt:
        _refuse_strangers(connection)
        command.stamp(settings, _FIRST)
    command.upgrade(settings, "head")


def _refuse_strangers(connection: Connection) -> None:
    found = {column["name"] for column in inspect(connection).get_columns("sessions")}
    if found != {name for name, _kind, _nullable in COLUMNS}:
        raise PlatformError(
            "the database has a table `sessions` that carrel did not make",
            field="database",
            hint="give carrel a database (or a schema) of its own",
        )
