"""Brings the tables of an open connection to what this code knows, in the caller's transaction. Knows no engine.

A database that is up to date costs one look at its revision, and a new one gets the tables as they are now. Only a
database that an older carrel made is migrated, so most starts need not import Alembic.
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

_LOCK = 0x63617272656C  # "carrel": the advisory lock of everyone who migrates this database
_SCRIPT = re.compile(r"r(\d{4})_\w+\.py")

# As the migration toolkit makes it and reads it.
_version = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


@cache
def known() -> tuple[str, ...]:
    """Every revision, the newest first, by the names of the scripts."""
    names = os.listdir(os.path.dirname(versions.__file__))
    return tuple(sorted((found[1] for name in names if (found := _SCRIPT.fullmatch(name))), reverse=True))


def newest() -> str:
    """The revision this code brings a database to."""
    return known()[0]


def migrate(connection: Connection) -> None:
    """Bring the tables to the newest revision; `PlatformError` for a database of a newer carrel, of one from before
    the first release, or of another program.

    The transaction must be one that keeps other writers of a SQLite file out (`BEGIN IMMEDIATE`); on PostgreSQL
    an advisory lock does, until the transaction ends.
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
    _make(connection)


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


def _make(connection: Connection) -> None:
    metadata.create_all(connection, checkfirst=False)
    _version.create(connection, checkfirst=True)
    connection.execute(insert(_version).values(version_num=newest()))
