from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.schema import CreateIndex, CreateTable

from carrel.store import Database, FilespaceEntry, SessionRecord, SnapshotRecord
from carrel.store.jobs import JobRecord
from carrel.store.tables import (
    PathBytes,
    Words,
    declare_for_postgresql,
    filespace_entries,
    jobs,
    metadata,
    sessions,
    snapshots,
)

PARTIAL = {"sessions_context", "events_job", "jobs_expiry", "jobs_key", "jobs_webhook"}


@pytest.mark.parametrize("dialect", [sqlite.dialect(), postgresql.dialect()], ids=lambda each: each.name)
def test_both_databases_take_the_tables(dialect: object) -> None:
    declare_for_postgresql()
    for table in metadata.sorted_tables:
        assert "CREATE TABLE" in str(CreateTable(table).compile(dialect=dialect))  # type: ignore[arg-type]
        for index in table.indexes:
            words = str(CreateIndex(index).compile(dialect=dialect))  # type: ignore[arg-type]
            assert ("WHERE" in words) == (index.name in PARTIAL)


def test_a_record_has_a_column_for_each_field() -> None:
    pairs = [(sessions, SessionRecord), (snapshots, SnapshotRecord), (filespace_entries, FilespaceEntry)]
    pairs.append((jobs, JobRecord))
    for table, record in pairs:
        columns = {column.name for column in table.columns} - {"path_key"}
        assert columns == {field.name for field in fields(record)}


def row(name: str, **changes: object) -> dict[str, object]:
    texts = dict.fromkeys(("provider", "trust", "network"), "x")
    values = {name: {} for name in ("limits", "env", "labels")}
    numbers = dict.fromkeys(("isolation_level", "created_at", "last_activity_at"), 1)
    flags = dict.fromkeys(("ephemeral", "unsafe"), False)
    return {**texts, **values, **numbers, **flags, "state": "running", "id": name, **changes}


async def put(database: Database, *rows: dict[str, object]) -> None:
    await database.write(lambda connection: connection.execute(insert(sessions), list(rows)).close())


async def test_a_context_has_one_session_that_is_not_terminated(database: Database) -> None:
    await put(database, row("a", context_id="c", state="terminated"), row("b", context_id="c", state="error"))
    await put(database, row("e1", context_id=None), row("e2", context_id=None))
    await put(database, row("d", context_id="c", state="terminated"))
    with pytest.raises(IntegrityError):
        await put(database, row("f", context_id="c", state="creating"))


@pytest.mark.parametrize("changes", [{"id": "a"}, {"idempotency_key": "k", "state": "terminated"}, {"trust": None}])
async def test_what_the_tables_refuse(database: Database, changes: dict[str, object]) -> None:
    await put(database, row("a", idempotency_key="k"))
    with pytest.raises(IntegrityError):
        await put(database, {**row("b"), **changes})


@given(st.text(st.characters(), max_size=50))
def test_words_hold_what_both_databases_can(text: str) -> None:
    held = Words().process_bind_param(text, sqlite.dialect())
    assert held is not None and len(held) == len(text) and "\0" not in held
    held.encode()
    if "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text):
        assert held == text


@given(st.binary(max_size=50))
def test_paths_are_bytes(path: bytes) -> None:
    kind, dialect = PathBytes(), sqlite.dialect()
    text = kind.process_result_value(path, dialect)
    assert kind.process_bind_param(text, dialect) == path
