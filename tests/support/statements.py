"""SQL statements, compiled once for all databases of a run.

SQLAlchemy compiles a statement for each engine anew, and nearly every test has a database of its own: that was a fifth of the
time that a control plane takes to start.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.engine.mock import MockConnection
from sqlalchemy.schema import MetaData
from sqlalchemy.util import LRUCache

from carrel.store import database, postgres
from carrel.store.tables import metadata


@cache
def _creating(dialect: Dialect) -> list[str]:
    """What creates the tables of carrel."""
    found: list[str] = []
    recorder = MockConnection(dialect, lambda statement, *_: found.append(str(statement.compile(dialect=dialect))))
    MetaData.create_all(metadata, recorder, checkfirst=False)  # type: ignore[arg-type]
    return found


def _create_all(connection: Connection, checkfirst: bool) -> None:
    assert not checkfirst
    for statement in _creating(connection.dialect):
        connection.exec_driver_sql(statement)


def compile_statements_once() -> None:
    """From now on carrel's databases of one kind take compiled statements from one another."""
    compiled = {"compiled_cache": LRUCache[Any, Any](5000)}
    make, make_async = database.create_engine, postgres.create_async_engine
    database.create_engine = lambda *given, **named: make(*given, execution_options=compiled, **named)
    postgres.create_async_engine = lambda *given, **named: make_async(*given, execution_options=compiled, **named)
    metadata.create_all = _create_all  # type: ignore[method-assign, assignment]
    # What is compiled is found by its dialect: those of one kind are made alike, and count as the same.
    for kind in (SQLiteDialect_pysqlite, PGDialect_asyncpg):
        kind.__eq__ = lambda self, other: type(self) is type(other)  # type: ignore[method-assign]
        kind.__hash__ = lambda self: hash(type(self))  # type: ignore[method-assign]
