"""The server is killed at seeded moments under load and started again on what it left.

`CARREL_KILLS=200` kills more often, `CARREL_KILL_SEEDS=17,18` repeats some kills on a new data directory.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import AsyncIterator, Callable
from random import Random

import pytest
from tests.support.kill_checks import Check
from tests.support.kill_load import SERVE, Load, Tally, World
from tests.support.kill_loss import lose_and_find
from tests.support.kill_server import Server
from tests.support.kill_work import workers
from tests.support.postgres import Postgres

from carrel.client import AsyncClient
from carrel.isolation import probe
from carrel.workspaces.layout import encode

DATABASES = ("sqlite", "postgresql")
VOLUMES = ("auto", "directory")
CHECKPOINTS = ("checkpoints", "plain")
KILLS = 6
"""Kills with each database, unless more are asked for."""
HISTORY = 12
"""The most kills of one data directory."""


def cases() -> list[tuple[str, str, str, list[int]]]:
    """A database, a way to keep volumes, how often the server takes snapshots by itself, and seeds for each data
    directory. They take turns, so that few kills show much."""
    if named := os.environ.get("CARREL_KILL_SEEDS"):
        seeds = [int(word) for word in named.split(",")]
        return [(*case, seeds) for case in itertools.product(DATABASES, VOLUMES, CHECKPOINTS)]
    wanted = int(os.environ.get("CARREL_KILLS", KILLS))
    found = []
    for number, database in enumerate(DATABASES):
        own = range(1 + number * wanted, 1 + (number + 1) * wanted)
        for turn, first in enumerate(range(0, wanted, HISTORY)):
            volumes, often = VOLUMES[(number + turn) % 2], CHECKPOINTS[(number + turn // 2) % 2]
            found.append((database, volumes, often, list(own[first : first + HISTORY])))
    return found


def name_of(value: str | list[int]) -> str:
    """A part of a test's name."""
    return value if isinstance(value, str) else f"{value[0]}-{value[-1]}"


@pytest.fixture
async def database(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[str | None]:
    """A database that is this test's alone; None for the server's own."""
    if kind == "sqlite":
        yield None
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    schema = f"k{uuid.uuid4().hex}"
    await postgres.execute(f"CREATE SCHEMA {schema}")
    yield postgres.url(search_path=schema)
    await postgres.execute(f"DROP SCHEMA {schema} CASCADE")


@pytest.mark.skipif(
    os.geteuid() != 0 or probe.host().missing is not None, reason="needs root and the namespace provider"
)
@pytest.mark.timeout(HISTORY * 40)
@pytest.mark.parametrize(("kind", "volumes", "often", "seeds"), cases(), ids=name_of)
async def test_nothing_is_lost_stuck_or_left_over(
    database: str | None, volumes: str, often: str, seeds: list[int], record_property: Callable[[str, object], None]
) -> None:
    checkpoints = often == CHECKPOINTS[0]
    world, server = World(), Server(database, volumes, checkpoint_s=1 if checkpoints else None)
    client: AsyncClient | None = None
    kills = 1
    try:
        world.hits[SERVE] += await server.start_and_kill(Random(seeds[0]).random())  # on an empty directory
        await server.start()
        client = server.client()
        for index, seed in enumerate(seeds):
            load = Load(world, server, client, seed)
            try:
                await load.run(workers)
                await client.close()
                kills += 1
                if load.aim.again is not None:
                    world.hits[SERVE] += await server.start_and_kill(load.aim.again)
                    kills += 1
                await server.start()
                client = server.client()
                await Check(world, server, client, seed).run(thorough=seed == seeds[-1], archived=checkpoints)
            except Exception as error:
                history = ",".join(map(str, seeds[: index + 1]))
                error.add_note(f"seed {seed}, {load.aim}: CARREL_KILL_SEEDS={seed}, with its history {history}")
                error.add_note(f"the server said\n{server.tail()}")
                raise
        client = await lose_and_find(world, server, client, volumes)
        await server.stop()
        await server.silent({encode(context.name, ephemeral=False) for context in world.all() if context.made})
    finally:
        tally = Tally()
        tally.add(kills, world, server.starts)
        record_property("kills", tally.plain())  # shown at the end of the run
        if client is not None:
            await client.close()
        server.close()
