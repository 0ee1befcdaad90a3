"""A server that was stopped loses files on its disk: they come back from the archive."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time

from tests.support.kill_checks import all_archived, files_of, meet, resume
from tests.support.kill_history import Broken, pushed
from tests.support.kill_load import World
from tests.support.kill_model import Context, Life
from tests.support.kill_server import Server
from tests.support.volumes import archive_damage_of

from carrel.client import AsyncClient
from carrel.workspaces.archive import Archive
from carrel.workspaces.layout import encode
from carrel.workspaces.remote import Remote
from carrel.workspaces.volumes import open_driver


async def lose_and_find(world: World, server: Server, client: AsyncClient, volumes: str) -> AsyncClient:
    """Stop the server, delete every snapshot and some workspaces on its disk, start it again; what was there last is
    there again. Every sandbox must run, and the model must be certain."""
    made = {encode(context.name, ephemeral=False) for context in world.all() if context.made}
    running = [context for context in world.all() if context.life is Life.RUNNING]
    lost = [context for context in running if context.filespace][:1]
    lost += [context for context in running if not context.filespace][:1]
    await all_archived(world)
    for context in lost:
        await _last_words(client, context)
    await client.close()
    await server.stop()
    for context in world.all():
        context.scene.pushes = False
        context.does(context.may_do(time.time()), time.time(), *((pushed,) if context.life is Life.RUNNING else ()))
        context.life = Life.STOPPED if context.life is Life.RUNNING else context.life
    await server.silent(made)
    names = [encode(context.name, ephemeral=False) for context in lost]
    await asyncio.to_thread(_delete, str(server.data / "storage"), volumes, names)
    await asyncio.to_thread(_verify, str(server.data / "archive"), sorted(made))
    await server.start()
    client = server.client()
    for context in lost:
        context.commands.clear()
        context.look(await files_of(await resume(client, context)), time.time())
        if context.filespace:
            await meet(client, context)
    return client


async def _last_words(client: AsyncClient, context: Context) -> None:
    """What a workspace and its filespace get just before the end, each on its own."""
    assert context.box is not None
    now = time.time()
    context.file("last").becomes(frozenset({b"words"}), now)
    await context.box.files.write("last", b"words")
    if context.filespace:
        context.synced("in/last").is_stored(b"stored", now)
        await client.filespace(context.name).write("in/last", b"stored")


def _delete(storage: str, volumes: str, lost: list[str]) -> None:
    driver = open_driver(storage, "directory" if volumes == "directory" else "auto")
    try:
        for snapshot in driver.snapshots():
            driver.delete_snapshot(snapshot)
        for volume in lost:
            driver.delete_volume(volume)
    finally:
        driver.close()


def _verify(path: str, volumes: list[str]) -> None:
    """Whatever was being stored at a kill: all that the archive says it has is whole."""
    with tempfile.TemporaryDirectory() as cache:
        remote = Remote.open(path)
        archive = Archive(remote, os.path.join(cache, "archive"))
        for volume in volumes:
            for snapshot in archive.snapshots(volume):
                if damage := archive_damage_of(remote, volume, snapshot):
                    raise Broken(f"snapshot {snapshot} of {volume} in the archive: {damage}")
