"""The clock of the database: the only clock that all control planes share."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import ColumnElement, Double, Select, select
from sqlalchemy.engine import Connection
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

STEP_S = 0.001


class _Clock(FunctionElement[float]):
    type = Double()
    inherit_cache = True
    name = "clock"


@compiles(_Clock, "sqlite")
def _sqlite(element: _Clock, compiler: SQLCompiler, **_: object) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


# Not now(): that is the start of the transaction, and a statement may have waited for a row since.
@compiles(_Clock, "postgresql")
def _postgresql(element: _Clock, compiler: SQLCompiler, **_: object) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


def database_clock() -> ColumnElement[float]:
    """Seconds since 1970 by the database's clock, evaluated when a row is examined."""
    return _Clock()


_NOW = select(_Clock())


def clock_of(connection: Connection) -> float:
    """Return the time by the database's clock. SQLite has that of this machine, so nothing is asked for it."""
    if connection.dialect.name == "sqlite":
        return time.time()
    return float(connection.execute(_NOW).scalar_one())


def moment_after(connection: Connection, moment: float, newest: Select[Any]) -> float:
    """Return a moment of this machine's clock, or one just after the `newest` if that is later: another machine, whose
    clock is ahead, may have written it. So an order by such moments is the order of the writes.
    """
    last = connection.execute(newest).scalar_one_or_none()
    return moment if last is None else max(moment, last + STEP_S)
