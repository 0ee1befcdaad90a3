"""The server, or the process that unpacks a layer, is killed at seeded moments while images are pulled, imported, built,
removed and collected. `CARREL_KILLS=200` kills more often, `CARREL_KILL_SEEDS=3,7` repeats some kills.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from tests.support.image_kills import CLEANED, FOLDERS, OnDisk, Published, Work
from tests.support.kill_server import Server
from tests.support.registry import RegistryServer

from carrel.client import AsyncClient
from carrel.isolation import probe
from carrel.workspaces.layout import encode

KILLS = 3
HISTORY = 12
"""The most kills of one data directory."""
VICTIMS = ("server", "child", "server", "both")


def histories() -> list[list[int]]:
    """The seeds for each data directory."""
    if named := os.environ.get("CARREL_KILL_SEEDS"):
        return [[int(word) for word in named.split(",")]]
    wanted = int(os.environ.get("CARREL_KILLS", KILLS))
    return [list(range(first, min(wanted, first + HISTORY))) for first in range(0, wanted, HISTORY)]


@pytest.mark.skipif(
    os.geteuid() != 0 or probe.host().missing is not None, reason="needs root and the namespace provider"
)
@pytest.mark.timeout(HISTORY * 60)
@pytest.mark.parametrize("seeds", histories(), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
async def test_nothing_half_made_is_used_and_nothing_leaks(
    seeds: list[int], registry: RegistryServer, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    published = Published(registry, tmp_path)
    await published.fill(tmp_path)
    server = Server(volumes="directory", settings={"CARREL_IMAGES_PLAIN_HTTP": registry.host})
    disk = OnDisk(server.data / "images")
    client: AsyncClient | None = None
    hits = 0
    try:
        await server.start()
        client = server.client()
        began = time.monotonic()
        await Work(published, client, "whole").run(Random(seeds[0]))
        longest = time.monotonic() - began  # kills hit all of it
        kept = await client.sandbox("kept", image="imported:1")
        for seed in seeds:
            random, victim = Random(seed), VICTIMS[seed % len(VICTIMS)]
            moment = random.uniform(0, longest)
            try:
                work = Work(published, client, f"seed {seed}")
                await work.clear()
                running = asyncio.create_task(work.run(random))
                await asyncio.wait([running], timeout=moment)
                if victim == "child":
                    while not kill_children(server.pid) and not running.done():
                        await asyncio.sleep(0.005)
                else:
                    if victim == "both":
                        kill_children(server.pid)
                    hits += not running.done()
                    server.kill()
                    await server.killed()
                await running
                if victim != "child":
                    await client.close()
                    await server.start()
                    client = server.client()
                    kept = await client.sandbox("kept")
                await check(client, disk, server, CLEANED if victim != "child" else ("temporary",))
                assert (await kept.commands.run("cat /etc/os-release")).stdout == "ID=copied\n"
                await Work(published, client, f"seed {seed}").repeat()
                disk.check_whole()
                for name in (random.choice(list(published.names.values())), "built:1"):
                    async with await client.sandbox(image=name) as box:
                        assert (await box.commands.run("echo $(cat /made)")).stdout.endswith(
                            f"seed {seed}\n" if name == "built:1" else "\n"
                        )
            except Exception as error:
                error.add_note(f"seed {seed}, {victim} after {moment:.3f} s; CARREL_KILL_SEEDS={seed}")
                error.add_note(f"the server said\n{server.tail()}")
                raise
        await kept.terminate(delete_files=True)
        await client.close()
        await server.stop()
        disk.make_old()
        await server.start()
        client = server.client()
        await client.images.delete("imported:1")
        await no_surplus(disk, FOLDERS)
        disk.check_whole()
        await client.close()
        client = None
        await server.stop()
        await server.silent(set())
    finally:
        record_property("image kills", f"{hits} of {len(seeds)} while the server worked")
        if client is not None:
            await client.close()
        server.close()


def kill_children(server: int) -> int:
    """Kill the processes that unpack for a server, and return how many there were."""
    found = 0
    for path in Path(f"/proc/{server}/task").glob("*/children"):
        for word in path.read_text().split():
            if b"carrel.images.unpack" in Path(f"/proc/{word}/cmdline").read_bytes():
                os.kill(int(word), signal.SIGKILL)
                found += 1
    return found


async def check(client: AsyncClient, disk: OnDisk, server: Server, folders: Sequence[str]) -> None:
    """Images are whole; what was being made is gone, with the sandboxes of builds and their files."""
    disk.check_whole()
    assert {each.digest.removeprefix("sha256:") for each in await client.images.list()} <= disk.listed("images")
    await no_surplus(disk, folders)
    records = [each async for each in client.sandboxes()]
    assert [each.context_id for each in records if each.state != "terminated"] == ["kept"], records
    await server.settled([records[0].id], {encode("kept", ephemeral=False)})


async def no_surplus(disk: OnDisk, folders: Sequence[str]) -> None:
    until = time.monotonic() + 10
    while (left := disk.surplus(folders)) and time.monotonic() < until:
        await asyncio.sleep(0.02)
    assert not left
