"""The server is killed at seeded lines of the claim of a slot, and started again on what it left.

`CARREL_KILLS=200` kills more often, `CARREL_KILL_SEEDS=17,18` repeats some kills on a new data directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random

import pytest
from tests.support.sandboxes import until
from tests.support.slot_server import SlotServer

from carrel.client import AsyncClient
from carrel.errors import CarrelError
from carrel.isolation import probe
from carrel.workspaces.layout import encode

KILLS = 4
HISTORY = 25
"""The most kills of one data directory."""
FILES = "ls -p | grep -v /; cat file"


def histories() -> list[list[int]]:
    """The seeds for each data directory."""
    if named := os.environ.get("CARREL_KILL_SEEDS"):
        return [[int(word) for word in named.split(",")]]
    wanted = int(os.environ.get("CARREL_KILLS", KILLS))
    return [list(range(first, min(wanted, first + HISTORY))) for first in range(0, wanted, HISTORY)]


async def warm(client: AsyncClient) -> None:
    """Make the pool known by a cold start, and wait until it has slots."""
    async with await client.sandbox():
        pass

    async def full() -> bool:
        return any(pool.ready == 2 for pool in await client.pools())

    await until(full, what="two slots")


async def own(client: AsyncClient, context: str, written: set[str]) -> None:
    """The context has the file that was written for it, and no other."""
    box = await client.sandbox(context)
    found = (await box.commands.run(FILES)).stdout
    assert found == (f"file\n{context}" if context in written else ""), (context, found)
    await box.files.write("file", context)
    written.add(context)


@pytest.mark.skipif(
    os.geteuid() != 0 or probe.host().missing is not None, reason="needs root and the namespace provider"
)
@pytest.mark.timeout(HISTORY * 30)
@pytest.mark.parametrize("seeds", histories(), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
async def test_a_kill_during_a_claim_loses_and_shares_nothing(
    seeds: list[int], record_property: Callable[[str, object], None]
) -> None:
    server = SlotServer(volumes="directory")
    client: AsyncClient | None = None
    contexts = ["killed", "kept"]
    written: set[str] = set()
    hits = 0
    try:
        await server.start()
        client = server.client()
        await warm(client)
        await own(client, "killed", written)
        await client.close()
        await server.stop()
        lines = int((server.data / "lines").read_text())
        assert lines > 100, "the claim was not seen"
        await server.start()
        client = server.client()
        await warm(client)
        await own(client, "kept", written)
        kept = server.handles()["kept"]
        assert kept.startswith("slot-")
        for seed in seeds:
            server.kill()
            await server.killed()
            await client.close()
            server.line = 1 + Random(seed).randrange(lines)
            context = f"killed-{seed}"
            contexts.append(context)
            try:
                await server.start()
                client = server.client()
                await warm(client)
                try:
                    await client.sandbox(context)
                except CarrelError:
                    hits += 1
                else:
                    server.kill()
                await server.killed()
                await client.close()
                server.line = 0
                await server.start()
                client = server.client()
                handles = server.handles()
                assert handles["kept"] == kept, "a claimed slot is taken over"
                assert server.sandboxes() == set(handles.values()), "everything else is ended"
                await server.settled(set(handles.values()), {encode(each, ephemeral=False) for each in contexts})
                for each in contexts[-3:]:
                    await own(client, each, written)
            except BaseException as error:
                error.add_note(f"seed {seed}, line {server.line} of {lines}: CARREL_KILL_SEEDS={seed}")
                error.add_note(f"the server said\n{server.tail()}")
                raise
        await own(client, "kept", written)
        await client.close()
        await server.stop()
        await server.silent({encode(each, ephemeral=False) for each in contexts})
    finally:
        record_property("slot kills", f"{hits} of {len(seeds)} during a claim")
        if client is not None:
            await client.close()
        server.close()
