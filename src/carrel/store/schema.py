"""Creates or migrates the tables on an open connection, in the caller's transaction.

A new database gets the current tables, and an up-to-date one only has its revision read. Only a database of an older
carrel is migrated, so most starts need not import Alembic.
"""

from __future__ import annotations

import os
import re
from functools import cache

from sqlalchemy import Column, MetaData, PrimaryKeyConstraint, String, Table, func, insert, inspect, select
from sqlalchemy.engine import Connection

from carrel.errors import PlatformError
from carrel.store.migrations import versions
from carrel.store.tables import metadata

_LOCK = 0x63617272656C  # "carrel": the advisory lock for migrations
_SCRIPT = re.compile(r"r(\d{4})_\w+\.py")

# The table that Alembic creates and reads.
_version = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


@cache
def known() -> tuple[str, ...]:
    """Return every revision, newest first, read from the file names of the scripts."""
    names = os.listdir(os.path.dirname(versions.__file__))
    return tuple(sorted((found[1] for name in names if (found := _SCRIPT.fullmatch(name))), reverse=True))


def newest() -> str:
    """Return the revision that this code migrates a database to."""
    return known()[0]


def migrate(connection: Connection) -> None:
    """Bring the tables to the newest revision; `PlatformError` for a database of a newer carrel, of one from before
    the first release, or of another program.

    On SQLite the transaction must exclude other writers (`BEGIN IMMEDIATE`); on PostgreSQL an advisory lock does.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    found = inspect(connection)
    present: set[str] = set()
    if found.has_table(_version.name):
        present.update(connection.execute(select(_version.c.version_num)).scalars())
    for revision in present:
        _check_revision(revision)
    if present == {newest()}:
        return
    if present:
        from carrel.store.upgrades import upgrade

        upgrade(connection)
        return
    if found.has_table("sessions"):
        raise PlatformError(
            "the database has a table `sessions` that carrel did not make",
            field="database",
            hint="give carrel a database (or a schema) of its own",
        )
    metadata.create_all(connection, checkfirst=False)
    _version.create(connection, checkfirst=True)
    connection.execute(insert(_version).values(version_num=newest()))


def _check_revision(revision: str) -> None:
    """Refuse a database that this code can neither use nor upgrade."""
    if revision in known():
        return
    oldest = known()[-1]
    if revision < oldest:
        raise PlatformError(
            f"the database was made by a carrel from before the first release: its schema is {revision}, and only "
            f"{oldest} and later ones can be upgraded",
            field="database",
            hint="start with a new data directory, or give carrel an empty database",
        )
    raise PlatformError(
        f"the database was made by a newer carrel: its schema is {revision}, this one knows up to {newest()}",
        field="database",
        hint="run the newer carrel, or give this one a database of its own",
    )
