"""What must hold after a server was killed and started again: nothing lost, nothing stuck, nothing left over."""

from __future__ import annotations

import asyncio
import io
import time
from random import Random

from tests.support.kill_history import Broken, met, pulled
from tests.support.kill_load import World, read_on
from tests.support.kill_model import Context, Life
from tests.support.kill_server import Server
from tests.support.kill_tar import counts, files_in
from tests.support.sandboxes import until

from carrel.client import AsyncClient, AsyncSandbox
from carrel.errors import CarrelError, Conflict, FileMissing, NotFound
from carrel.models import FileKind, SandboxInfo, SnapshotInfo, State
from carrel.workspaces.layout import CONTEXT_FILE, encode

STUCK_S = 60.0
CLOCK_S = 0.05
"""How far the times of server and clients may differ: it is one clock, read at two places."""


class Check:
    """One look at a server that has just been started."""

    def __init__(self, world: World, server: Server, client: AsyncClient, seed: int):
        self._world = world
        self._server = server
        self._client = client
        self._random = Random(f"check {seed}")

    async def run(self, *, thorough: bool = False, archived: bool = False) -> None:
        """Everything, and afterwards the model is certain again. `thorough` waits for every command and restores
        every snapshot; `archived` waits until all of them are in the archive."""
        try:
            for context in self._world.all():
                context.settle(time.time())
            async with asyncio.timeout(STUCK_S * 4):
                infos = [info async for info in self._client.sandboxes()]
                self._states(infos)
                await self._ephemeral(infos)
                await self._leftovers(infos)
                for context in self._world.all():
                    await self._commands(context, thorough=thorough)
                restored = self._random.choice(self._world.all()) if self._world.all() else None
                looks = [
                    self._context(context, thorough or context is restored, thorough=thorough)
                    for context in self._world.all()
                ]
                for outcome in await asyncio.gather(*looks, return_exceptions=True):
                    if outcome is not None:
                        raise outcome
                await self._stray()
                if archived or thorough:
                    await all_archived(self._world)
        except CarrelError as error:
            raise Broken(f"after the restart: {type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise Broken("after the restart something is stuck") from error

    # sessions

    def _states(self, infos: list[SandboxInfo]) -> None:
        found = {info.context_id: info for info in infos if info.context_id is not None}
        wrong = [f"{info.context_id or info.id} is {info.state}" for info in infos if info.state not in _RESTING]
        wrong += [f"{name} is not known to anyone" for name in found.keys() - {each.name for each in self._world.all()}]
        for context in self._world.all():
            info = found.get(context.name)
            life = _life(info)
            if context.life not in {Life.UNSURE, life}:
                wrong.append(f"{context.name} should have {context.life.value}, has {life.value}")
            if context.life is Life.RUNNING and info and context.box is not None and info.id != context.box.id:
                wrong.append(f"{context.name} has another session: {info.id}, not {context.box.id}")
            context.life = life
            context.scene.pushes = context.filespace and life is Life.RUNNING
            context.made = context.made or info is not None
            if info is not None:
                context.box = self._client.attach(info)
        if wrong:
            raise Broken("sessions: " + "; ".join(wrong))
        for own in self._world.contexts:  # what was asked for, never answered and never made
            own[:] = [context for context in own if context.made or not context.may_be_made]

    async def _ephemeral(self, infos: list[SandboxInfo]) -> None:
        found = {info.id: info for info in infos if info.ephemeral}
        for info in found.values():
            box = self._client.attach(info)
            async with asyncio.timeout(STUCK_S):
                await box.commands.run("true", check=True, timeout=STUCK_S)
        self._world.ephemeral = dict.fromkeys(found, Life.RUNNING)

    async def _leftovers(self, infos: list[SandboxInfo]) -> None:
        running = [info.id for info in infos if info.state is State.RUNNING]
        volumes = {encode(context.name, ephemeral=False) for context in self._world.all() if context.made}
        volumes |= {encode(name, ephemeral=True) for name in self._world.ephemeral}
        await self._server.settled(running, volumes)

    # what is in one context

    async def _commands(self, context: Context, *, thorough: bool) -> None:
        """Commands are still there, and their output goes on where it was left."""
        for command in [command for command in context.commands if not command.ended]:
            if context.life is not Life.RUNNING or context.box is None:
                if not command.may_be_gone:
                    raise Broken(f"command {command.id} of {context.name} is gone with its sandbox")
                command.ended = True
                continue
            try:
                info = await context.box.commands.get(command.id).info()
            except NotFound as error:
                if not command.may_be_gone:
                    raise Broken(f"command {command.id} of {context.name} is not known any more") from error
                command.ended = True
                continue
            if thorough or not info.running or self._random.random() < 0.3:
                async with asyncio.timeout(STUCK_S):
                    await read_on(context.box, command)
            else:
                output = await context.box.commands.get(command.id).output(command.offset)
                command.take(output.data, output.offset)
        context.commands = [command for command in context.commands if not command.ended]

    async def _context(self, context: Context, restores: bool, *, thorough: bool) -> None:
        if not context.may_be_made:
            return
        async with asyncio.timeout(STUCK_S):
            box = await resume(self._client, context)
            await box.commands.run("true", check=True, timeout=STUCK_S)
        context.look(await files_of(box), time.time())
        if context.filespace:
            context.look_there(await stored_files(self._client, context), time.time())
        ready = await self._snapshots(context, box)
        # Those that nobody asked for may go at any time; the newest of them is tried first, while it is surely there.
        ready.sort(key=lambda info: (info.reason == "request", -info.created_at.timestamp()))
        chosen = ready[:1] + [info for info in ready[1:] if info.reason == "request"]
        if restores and chosen:
            context.commands_may_end()
            for snapshot in chosen if thorough else [self._random.choice(chosen)]:
                context.may_be_restored(context.pictures[snapshot.id], time.time())
                try:
                    await box.restore(snapshot)
                    context.is_restored(context.pictures[snapshot.id], time.time())
                except (NotFound, Conflict):
                    if await self._promised(box, snapshot):
                        raise
                    context.settle(time.time())
                context.look(await files_of(box), time.time())
        if context.filespace:
            await meet(self._client, context)

    async def _snapshots(self, context: Context, box: AsyncSandbox) -> list[SnapshotInfo]:
        listed: dict[str, SnapshotInfo] = {}

        async def made() -> bool:
            """A checkpoint may be taken just now; what a killed server was at must not be."""
            listed.clear()
            listed.update({info.id: info for info in await box.snapshots()})
            return all(info.status != "creating" for info in listed.values())

        await until(made, STUCK_S, f"no snapshot of {context.name} that is being made")
        wrong = []
        for name, picture in context.pictures.items():
            if not picture.may_be_gone and (name not in listed or listed[name].status != "ready"):
                wrong.append(f"{name} is {listed[name].status if name in listed else 'gone'}, and was promised")
        if wrong:
            raise Broken(f"snapshots of {context.name}: " + "; ".join(wrong))
        context.pictures = {name: picture for name, picture in context.pictures.items() if name in listed}
        ready = []
        for info in listed.values():
            if info.status != "ready":
                continue
            if info.id not in context.pictures:  # nobody was told of it: the server took it
                context.pictures[info.id] = context.picture(info.created_at.timestamp() - CLOCK_S, time.time())
            context.pictures[info.id].may_be_gone = info.reason != "request"
            data = io.BytesIO()
            try:
                await box.download_snapshot(info, data)
            except (NotFound, Conflict):
                if await self._promised(box, info):
                    raise
                continue
            context.look_at_picture(info.id, files_in(data))
            ready.append(info)
        return ready

    @staticmethod
    async def _promised(box: AsyncSandbox, snapshot: SnapshotInfo) -> bool:
        """Whether a snapshot must be there: one that nobody asked for goes when there are newer ones."""
        return snapshot.reason == "request" or snapshot.id in {
            info.id for info in await box.snapshots() if info.status == "ready"
        }

    async def _stray(self) -> None:
        """Wait until every snapshot on disk has a record."""

        async def none() -> bool:
            on_disk = self._server.snapshots()
            for context in self._world.all():
                if context.box is not None:
                    on_disk -= {info.id for info in await context.box.snapshots()}
            return not on_disk

        await until(none, STUCK_S, "no snapshot on disk that no record knows")


_RESTING = frozenset({State.RUNNING, State.STOPPED})


def _life(info: SandboxInfo | None) -> Life:
    if info is None:
        return Life.NONE
    return Life.RUNNING if info.state is State.RUNNING else Life.STOPPED


async def resume(client: AsyncClient, context: Context) -> AsyncSandbox:
    """The sandbox of a context, which gets the filespace's changes unless it runs."""
    context.scene.pushes = context.filespace
    asked = context.may_do(time.time(), *(() if context.life is Life.RUNNING else (pulled,)))
    box = await client.sandbox(context.name, filespace=context.filespace)
    context.does(asked, time.time(), *(() if context.life is Life.RUNNING else (pulled,)))
    context.box, context.life, context.made = box, Life.RUNNING, True
    if (notice := (await box.info()).notice) is not None:
        raise Broken(f"{context.name} says: {notice}")
    return box


async def meet(client: AsyncClient, context: Context) -> None:
    """Bring a workspace and its filespace together while nobody writes: both hold the same, and nothing else."""
    assert context.box is not None
    asked = context.may_do(time.time(), met)
    await context.box.sync("both")
    context.does(asked, time.time(), met)
    here, there = await files_of(context.box, everything=True), await stored_files(client, context)
    context.look(here, time.time())
    context.look_there(there, time.time())
    if here != there:
        raise Broken(f"after a sync {context.name} has {sorted(here)} and its filespace {sorted(there)}")


async def all_archived(world: World) -> None:
    """Wait until every snapshot is in the archive."""

    async def archived() -> bool:
        boxes = [context.box for context in world.all() if context.box is not None]
        infos = [info for box in boxes for info in await box.snapshots()]
        return all(info.archived for info in infos if info.status == "ready")

    await until(archived, STUCK_S, "every snapshot in the archive")


async def stored_files(client: AsyncClient, context: Context) -> dict[str, bytes]:
    """Every file of a filespace. The server may push meanwhile: what it deletes is looked for again."""
    filespace = client.filespace(context.name)
    while True:
        try:
            return {file.path: await filespace.read(file.path) async for file in filespace.list()}
        except FileMissing:
            continue


async def files_of(box: AsyncSandbox, *, everything: bool = False) -> dict[str, bytes]:
    """The files of a workspace; with `everything` also those on their way to their place."""
    names = [info.path for info in await box.files.list(".", recursive=True) if info.kind is FileKind.FILE]
    return {name: await box.files.read(name) for name in names if counts(name) or (everything and name != CONTEXT_FILE)}
