"""Migrates a database of an older carrel. Imported only when one is opened, as Alembic takes long to import."""

from __future__ import annotations

import logging
import os

from alembic import command
from alembic.config import Config
from sqlalchemy.engine import Connection

from carrel.store import migrations


def config(connection: Connection | None = None) -> Config:
    """Return the settings of Alembic: the folder of the scripts, and the connection they run on."""
    made = Config()
    made.set_main_option("script_location", os.path.dirname(migrations.__file__).replace("%", "%%"))
    made.attributes["connection"] = connection
    return made


def upgrade(connection: Connection) -> None:
    """Run every migration that the database lacks."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    command.upgrade(config(connection), "head")
