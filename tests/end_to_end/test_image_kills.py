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
LONGEST_S = 2.0
"""About as long as all work takes, so that kills hit all of it."""
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
    hits = dict.fromkeys(VICTIMS, 0)
    try:
        await server.start()
        client = server.client()
        await client.images.pull(published.names["first"])
        kept = await client.sandbox("kept", image=published.names["first"])
        for seed in seeds:
            random, victim = Random(seed), VICTIMS[seed % len(VICTIMS)]
            moment = random.uniform(0, LONGEST_S)
            try:
                work = Work(published, client, f"seed {seed}")
                running = asyncio.create_task(work.run(random))
                await asyncio.wait([running], timeout=moment)
                hits[victim] += kill_children(server.pid) if victim != "server" else 1
                if victim != "child":
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
                for name in (*published.names.values(), "imported:1", "built:1"):
                    box = await client.sandbox(f"of-{name[-9:-2].replace('/', '-')}", image=name)
                    assert (await box.commands.run("echo runs")).stdout == "runs\n"
                    await box.terminate(delete_files=True)
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
        record_property("image kills", f"{hits} of {len(seeds)}")
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
