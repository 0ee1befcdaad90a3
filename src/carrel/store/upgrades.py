"""Runs the migrations on a database that an older carrel made. Imported only when there is one."""

from __future__ import annotations

import logging
import os

from alembic import command
from alembic.config import Config
from sqlalchemy.engine import Connection

from carrel.store import migrations


def config(connection: Connection | None = None) -> Config:
    """The settings of Alembic: where the scripts are, and the connection they run on."""
    made = Config()
    made.set_main_option("script_location", os.path.dirname(migrations.__file__).replace("%", "%%"))
    made.attributes["connection"] = connection
    return made


def upgrade(connection: Connection) -> None:
    """Run every migration that the database lacks."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    command.upgrade(config(connection), "head")
