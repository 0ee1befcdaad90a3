from __future__ import annotations

import time

from sqlalchemy import select

from carrel.store import Database
from carrel.store.clock import database_clock


async def test_it_is_the_time_and_moves_within_a_transaction(database: Database) -> None:
    def twice(connection: object) -> tuple[float, float]:
        query = select(database_clock())
        first = connection.execute(query).scalar_one()  # type: ignore[attr-defined]
        while (second := connection.execute(query).scalar_one()) <= first:  # type: ignore[attr-defined]
            assert time.time() < before + 30
        return first, second

    before = time.time()
    first, second = await database.write(twice)
    assert before - 0.01 <= first < second <= time.time() + 0.01
