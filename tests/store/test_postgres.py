"""What only PostgreSQL has to show; the rest of the store's tests run on it beside SQLite."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import text
from tests.support.postgres import Postgres

from carrel.errors import DatabaseUnavailable
from carrel.store import Database, SessionStore
from carrel.store.postgres import Postgres as PostgresPool


@pytest.mark.parametrize("kind", ["postgresql"])
async def test_connections_that_were_cut_are_made_anew(postgres: Postgres, where: str, kind: str) -> None:
    database = await Database.open(where)
    store = SessionStore(database)
    assert await store.get("x") is None
    others = "pid != pg_backend_pid() AND backend_type = 'client backend'"
    await postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
    async with asyncio.timeout(10):
        while True:  # what comes before the driver has heard of it may fail, in words
            try:
                assert await store.get("x") is None
                break
            except DatabaseUnavailable as error:
                assert error.field == "database" and error.extra["retry"] is True
    await database.close()


@pytest.mark.parametrize("kind", ["postgresql"])
async def test_a_lost_machine_holds_no_locks_for_long(where: str, kind: str) -> None:
    database = await Database.open(where)
    query = text("SELECT current_setting('idle_in_transaction_session_timeout')")
    assert await database.read(lambda connection: connection.execute(query).scalar_one()) == "15s"
    await database.close()


async def test_a_connection_that_is_given_up_while_it_is_made_is_closed(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[asyncpg.Connection] = []

    async def hangs(connection: asyncpg.Connection, *_: object) -> None:
        made.append(connection)
        await asyncio.Event().wait()

    server = PostgresPool(postgres.url())
    monkeypatch.setattr(asyncpg.Connection, "execute", hangs)
    reading = asyncio.create_task(server.read(lambda connection: connection.execute(text("SELECT 1")).scalar_one()))
    async with asyncio.timeout(10):
        while not made:
            await asyncio.sleep(0.001)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert made[0].is_closed()
    await server.close()


async def test_a_server_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    for host in (f"@/db?host={tmp_path}", "@127.0.0.1:1/db"):
        with pytest.raises(DatabaseUnavailable) as caught:
            await Database.open(f"postgresql://carrel:hush-hush{host}")
        assert caught.value.field == "database" and caught.value.hint
        assert "hush" not in repr(caught.value) + str(caught.value.problem())


async def test_the_driver_is_imported_only_for_a_url() -> None:
    program = "import sys; import carrel.store; print(sorted({'asyncpg', 'sqlalchemy.ext.asyncio'} & set(sys.modules)))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert (await process.communicate())[0] == b"[]\n"
