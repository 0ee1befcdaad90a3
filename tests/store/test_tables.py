from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
from sqlalchemy import create_engine, insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError
from sqlalchemy.schema import CreateIndex, CreateTable

from carrel.store import SessionRecord
from carrel.store.tables import metadata, sessions


@pytest.mark.parametrize("dialect", [sqlite.dialect(), postgresql.dialect()], ids=lambda each: each.name)
def test_both_databases_take_the_tables(dialect: object) -> None:
    for table in metadata.sorted_tables:
        assert "CREATE TABLE" in str(CreateTable(table).compile(dialect=dialect))  # type: ignore[arg-type]
        for index in table.indexes:
            words = str(CreateIndex(index).compile(dialect=dialect))  # type: ignore[arg-type]
            assert ("WHERE" in words) == (index.name == "sessions_context")


def test_a_record_has_a_column_for_each_field() -> None:
    assert {column.name for column in sessions.columns} == {field.name for field in fields(SessionRecord)}


def row(name: str, **changes: object) -> dict[str, object]:
    found: dict[str, object] = {column.name: 1 for column in sessions.columns if not column.nullable}
    return {**found, "ephemeral": False, "unsafe": False, "state": "running", "id": name, **changes}


@pytest.fixture
def connection() -> Iterator[Connection]:
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        metadata.create_all(connection)
        yield connection
    engine.dispose()


def test_a_context_has_one_session_that_is_not_terminated(connection: Connection) -> None:
    add = insert(sessions)
    connection.execute(add, [row("a", context_id="c", state="terminated"), row("b", context_id="c", state="error")])
    connection.execute(add, [row("e1", context_id=None), row("e2", context_id=None)])
    connection.execute(add, row("d", context_id="c", state="terminated"))
    with pytest.raises(IntegrityError):
        connection.execute(add, row("f", context_id="c", state="creating"))


@pytest.mark.parametrize("changes", [{"id": "a"}, {"idempotency_key": "k", "state": "terminated"}, {"trust": None}])
def test_what_the_tables_refuse(connection: Connection, changes: dict[str, object]) -> None:
    connection.execute(insert(sessions), row("a", idempotency_key="k"))
    with pytest.raises(IntegrityError):
        connection.execute(insert(sessions), {**row("b"), **changes})
