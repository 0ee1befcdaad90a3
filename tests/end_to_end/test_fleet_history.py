"""Several servers behind a load balancer, on PostgreSQL and S3, while one after the other is killed.

`CARREL_FLEET_S=180` kills for that long, with 100 contexts and 16 clients, every 20 s; see `make fleet`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
from tests.support.fleet import TOKEN, Fleet
from tests.support.fleet_history import Context, History, Writer
from tests.support.postgres import Postgres
from tests.support.relays import Balancer
from tests.support.s3 import S3Server

from carrel.client import AsyncClient

NAMES = ("a", "b", "c")
LONG_S = float(os.environ.get("CARREL_FLEET_S", "0"))


@dataclass(frozen=True)
class Size:
    """How much is done."""

    contexts: int
    clients: int
    lease_s: float
    checkpoint_s: float
    every_s: float
    """The time from one kill to the next."""
    kills: int


SHORT = Size(contexts=8, clients=4, lease_s=2, checkpoint_s=2, every_s=0, kills=4)
LONG = Size(contexts=100, clients=16, lease_s=5, checkpoint_s=15, every_s=20, kills=max(1, int(LONG_S // 20)))
SIZE = LONG if LONG_S else SHORT
GRACE_S = 30.0
"""How much longer than a lease trouble may last: a takeover starts a sandbox, on a machine that is busy."""


@asynccontextmanager
async def serving(postgres: Postgres, s3: S3Server, servers: int, size: Size) -> AsyncIterator[tuple[Fleet, Balancer]]:
    schema = f"history_{secrets.token_hex(4)}"
    await postgres.execute(f"CREATE SCHEMA {schema}")
    fleet = Fleet(
        postgres.url(search_path=schema),
        CARREL_ARCHIVE=s3.url(schema),
        CARREL_LEASE_S=str(size.lease_s),
        CARREL_SANDBOX_CHECKPOINT_S=str(size.checkpoint_s),
        CARREL_POOL_SIZE="0",
        **s3.environment,
    )
    try:
        for name in NAMES[:servers]:
            fleet.start(name)
            await asyncio.to_thread(fleet.ready, name)
        balancer = Balancer(lambda: [fleet.last_url(name) for name in NAMES[:servers]])
        try:
            yield fleet, balancer
        finally:
            balancer.close()
    finally:
        await asyncio.to_thread(fleet.close)
        await postgres.execute(f"DROP SCHEMA {schema} CASCADE")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SIZE.lease_s + 2 * GRACE_S):
        while not condition():
            await asyncio.sleep(0.05)


async def end_in_turns(fleet: Fleet, history: History, servers: int) -> None:
    """End one server after the other. Each fourth is stopped by its operator, the others are killed, and every second one
    stays away until another has taken one of its sessions over.
    """
    for number in range(SIZE.kills):
        began, written, taken_over = time.monotonic(), history.written, history.taken_over
        name = NAMES[number % servers]
        await until(lambda: history.written >= written + 2 * SIZE.clients)  # noqa: B023
        has_some = any(each.node == name for each in history.contexts)
        if number % 4 == 2:
            await asyncio.to_thread(fleet.stop, name)
        else:
            fleet.kill(name)
        if number % 2 and has_some:
            await until(lambda: history.taken_over > taken_over)  # noqa: B023
        fleet.start(name)
        await asyncio.to_thread(fleet.ready, name)
        await asyncio.sleep(max(0.0, began + SIZE.every_s - time.monotonic()))  # the pace of the long run
    written = history.written
    await until(lambda: history.written >= written + 2 * SIZE.clients)


@pytest.mark.timeout(int(240 + 3 * LONG_S))
@pytest.mark.parametrize("servers", [2, 3] if LONG_S else [3])
async def test_nothing_is_lost_or_run_twice_while_servers_are_killed(
    postgres: Postgres,
    s3: S3Server,
    carrel_forks: None,
    servers: int,
    record_property: Callable[[str, object], None],
) -> None:
    history = History([Context(f"h{number}") for number in range(SIZE.contexts)])
    async with serving(postgres, s3, servers, SIZE) as (fleet, balancer), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(balancer.url, TOKEN)) for _ in range(SIZE.clients)]
        writers = [Writer(history, client, seed, SIZE.lease_s + GRACE_S) for seed, client in enumerate(clients)]
        over = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                working = [group.create_task(each.run(over)) for each in writers]
                await end_in_turns(fleet, history, servers)
                over.set()
                await asyncio.gather(*working)
            for context, writer in zip(history.contexts, itertools.cycle(writers), strict=False):
                await writer.check(context)
            found = [each async for each in clients[0].sandboxes()]
            assert {each.context_id for each in found} == {each.name for each in history.contexts if each.info}
        except BaseExceptionGroup as errors:
            for name in NAMES[:servers]:
                with suppress(OSError):
                    errors.add_note(f"{name}: {fleet.log(name)[-4000:]}")
            raise
        finally:
            record_property("history", f"{servers} servers, {SIZE.kills} kills: {history.plain()}")
        assert all(balancer.connections), balancer.connections
        assert history.longest <= SIZE.lease_s + GRACE_S
        assert history.written >= SIZE.contexts
