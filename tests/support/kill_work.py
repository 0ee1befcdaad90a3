"""What clients do to a server until it is killed, by a seed; every promise they get is written into the model."""

from __future__ import annotations

import asyncio
import io
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine
from random import Random

from tests.support.kill_history import NOTHING, Broken, Step, met, pulled, pushed
from tests.support.kill_load import KINDS, Killed, Load
from tests.support.kill_model import CONTESTED, Background, Context, Life, Picture
from tests.support.kill_tar import files_in

from carrel.client import AsyncSandbox
from carrel.errors import FileMissing

MOST_CONTEXTS = 3
MOST_EPHEMERAL = 2
FILES = ("a.txt", "data/b.bin", "output/deep/er/c", "scripts/d.sh")
STORED_FILES = ("in/e.txt", "in/deep/f.bin")
"""What clients write in the filespace only."""
BESIDE, STORED_BESIDE = "beside", "in/beside"
SYNCS: dict[str, Step] = {"push": pushed, "pull": pulled, "both": met}


def workers(load: Load, number: int) -> list[Coroutine[None, None, None]]:
    """One client, which does two things at once."""
    worker = Worker(load, number, Random(f"{load.seed} {number}"))
    return [worker.work(), worker.write_beside()]


class Worker:
    """One client's work on contexts of its own."""

    def __init__(self, load: Load, number: int, random: Random):
        self._load = load
        self._number = number
        self._random = random
        self._contexts = load.world.contexts[number]

    async def work(self) -> None:
        """Operations in a seeded order; the first worker sees to the one that is aimed at."""
        wanted = self._load.wanted if self._number == 0 else None
        lead = self._random.randrange(3)
        for count in itertools.count():
            if self._load.killed:
                raise Killed
            kind = self._random.choice(KINDS)
            if wanted is not None and self._load.wanted == wanted and count >= lead:
                kind = wanted
            await self._operation(kind)
            await asyncio.sleep(self._random.random() * 0.01)

    async def write_beside(self) -> None:
        """Small writes all the time, also while snapshots are taken."""
        while True:
            if self._load.killed:
                raise Killed
            made = [context for context in self._contexts if context.made]
            if made:
                context = self._random.choice(made)
                async with self._load.lock(context):
                    if context.filespace and self._random.random() < 0.3:
                        if any(context is each for each in self._contexts):
                            await self._store(context, STORED_BESIDE, 50)
                    elif context.life is Life.RUNNING:
                        await self._put(context, BESIDE, 50)
            await asyncio.sleep(self._random.random() * 0.02)

    async def _operation(self, kind: str) -> None:
        if kind == "ephemeral":
            await self._ephemeral()
        elif kind == "end_ephemeral":
            await self._end_ephemeral()
        elif kind == "create":
            if len(self._contexts) >= MOST_CONTEXTS:
                await self._delete(self._contexts[0])
            await self._deploy(self._new())
        else:
            of_kind = [context for context in self._contexts if context.filespace or kind not in _OF_FILESPACES]
            if of_kind:
                await self._on(self._random.choice(of_kind), kind)
                return
            if len(self._contexts) >= MOST_CONTEXTS:
                await self._delete(self._contexts[0])
            await self._on(self._new(filespace=True), kind)

    async def _on(self, context: Context, kind: str) -> None:
        acts: dict[str, Callable[[Context], Awaitable[None]]] = {
            "resume": self._resume, "attach": self._deploy, "exec": self._exec, "start": self._start,
            "write": self._write, "snapshot": self._snapshot, "restore": self._restore, "fork": self._fork,
            "stop": self._stop, "terminate": self._terminate, "delete": self._delete,
            "delete_snapshot": self._delete_snapshot, "remove": self._remove, "download": self._download,
            "sync": self._sync, "filespace_write": self._filespace_write, "filespace_delete": self._filespace_delete,
        }  # fmt: skip
        beside = kind in _OF_FILESPACES and kind != "sync" and context.made
        if context.life is not Life.RUNNING and not beside:
            await self._deploy(context)
        await acts[kind](context)

    def _new(self, *, filespace: bool | None = None) -> Context:
        wanted = self._random.random() < 0.5 if filespace is None else filespace
        context = Context(f"w{self._number}-{next(self._load.world.numbers)}", wanted)
        self._contexts.append(context)
        return context

    def _box(self, context: Context) -> AsyncSandbox:
        assert context.box is not None
        return context.box

    def _content(self, size: int) -> bytes:
        words = b"%d/%d " % (self._load.seed, next(self._load.world.numbers))
        return words + self._random.randbytes(self._random.randrange(size)) + words

    # the operations

    async def _deploy(self, context: Context) -> None:
        kind = "attach" if context.life is Life.RUNNING else "resume" if context.may_be_made else "create"
        askers = 3 if self._random.random() < 0.3 else 1
        context.may_be_made = True
        steps: tuple[Step, ...] = ()
        if kind != "attach":
            context.life = Life.UNSURE
            context.scene.pushes = context.filespace
            steps = (pulled,)
        asked = context.may_do(time.time(), *steps)
        async with self._load.doing(kind):
            ask = self._load.client.sandbox
            boxes = await asyncio.gather(*(ask(context.name, filespace=context.filespace) for _ in range(askers)))
        context.does(asked, time.time(), *steps)
        if len({box.id for box in boxes}) != 1:
            raise Broken(f"{askers} askers at once got {boxes}")
        context.life, context.made, context.box = Life.RUNNING, True, boxes[0]

    async def _resume(self, context: Context) -> None:
        await self._stop(context)
        if context.filespace and self._random.random() < 0.7:
            await self._filespace_write(context)
        await self._deploy(context)

    async def _put(self, context: Context, name: str, size: int) -> None:
        content = self._content(size)
        context.file(name).may_become(frozenset({content}), time.time())
        async with self._load.doing("write"):
            await self._box(context).files.write(name, content)
        context.file(name).becomes(frozenset({content}), time.time())

    async def _write(self, context: Context) -> None:
        names = (*FILES, CONTESTED) if context.filespace else FILES
        await self._put(context, self._random.choice(names), self._random.choice((100, 5_000, 400_000)))

    async def _remove(self, context: Context) -> None:
        there = [name for name in (*FILES, *STORED_FILES) if None not in context.file(name).now]
        if not there:
            await self._put(context, FILES[0], 100)
            there = [FILES[0]]
        name = self._random.choice(there)
        context.file(name).may_become(NOTHING, time.time())
        async with self._load.doing("remove"):
            await self._box(context).files.delete(name)
        context.file(name).becomes(NOTHING, time.time())

    # with filespaces

    async def _sync(self, context: Context) -> None:
        direction = self._random.choice(sorted(SYNCS))
        for _ in range(self._random.randrange(3)):
            await self._random.choice((self._filespace_write, self._write, self._remove))(context)
        asked = context.may_do(time.time(), SYNCS[direction])
        async with self._load.doing("sync"):
            await self._box(context).sync(direction)
        context.does(asked, time.time(), SYNCS[direction])

    async def _store(self, context: Context, name: str, size: int) -> None:
        content = self._content(size)
        context.synced(name).may_be_stored(content, time.time())
        async with self._load.doing("filespace_write"):
            await self._load.client.filespace(context.name).write(name, content)
        context.synced(name).is_stored(content, time.time())

    async def _filespace_write(self, context: Context) -> None:
        name = self._random.choice((*STORED_FILES, CONTESTED))
        await self._store(context, name, self._random.choice((100, 5_000, 100_000, 2_500_000)))

    async def _filespace_delete(self, context: Context) -> None:
        name = self._random.choice((*STORED_FILES, CONTESTED))
        if context.synced(name).there == NOTHING:
            await self._store(context, name, 100)
        context.synced(name).may_be_stored(None, time.time())
        async with self._load.doing("filespace_delete"):
            try:
                await self._load.client.filespace(context.name).delete(name)
            except FileMissing as error:
                if None not in context.synced(name).there:
                    raise Broken(f"{name} of {context.name} is not in the filespace") from error
        context.synced(name).is_stored(None, time.time())

    # what is kept

    async def _exec(self, context: Context) -> None:
        words = f"{self._load.seed} {next(self._load.world.numbers)}"
        history = context.file("by-command")
        history.may_become(frozenset({b"", words.encode()}), time.time())
        nap = self._random.random() * 0.03
        async with self._load.doing("exec"):
            command = f"sleep {nap:.3f}; printf %s '{words}' > by-command; echo {words}"
            result = await self._box(context).commands.run(command, timeout=30)
        if result.stdout != f"{words}\n":
            raise Broken(f"exec answered {result}")
        history.becomes(frozenset({words.encode()}), time.time())

    async def _start(self, context: Context) -> None:
        tag, lines, code = (
            next(self._load.world.numbers),
            self._random.choice((20, 80, 250)),
            self._random.randrange(99),
        )
        expected = b"".join(b"command %d line %d\n" % (tag, line) for line in range(lines))
        loop = (
            f'i=0; while [ $i -lt {lines} ]; do echo "command {tag} line $i"; i=$((i+1)); sleep 0.01; done; exit {code}'
        )
        async with self._load.doing("start"):
            started = await self._box(context).commands.start(loop, timeout=120)
        command = Background(started.id, expected, code)
        context.commands.append(command)
        self._load.follow(context, command)

    async def _snapshot(self, context: Context) -> None:
        began = time.time()
        async with self._load.doing("snapshot"):
            info = await self._box(context).snapshot()
        if info.status != "ready":
            raise Broken(f"a snapshot was answered that is {info.status}")
        context.pictures[info.id] = context.picture(began, time.time())

    def _chosen(self, context: Context) -> tuple[str, Picture]:
        sure = sorted(each for each in context.pictures.items() if not each[1].may_be_gone)
        return self._random.choice(sure)

    async def _pictured(self, context: Context) -> None:
        if all(picture.may_be_gone for picture in context.pictures.values()):
            await self._snapshot(context)

    async def _restore(self, context: Context) -> None:
        await self._pictured(context)
        async with self._load.lock(context):
            name, picture = self._chosen(context)
            context.commands_may_end()
            context.may_be_restored(picture, time.time())
            context.life = Life.UNSURE
            async with self._load.doing("restore"):
                await self._box(context).restore(name)
            context.is_restored(picture, time.time())
            context.life = Life.RUNNING

    async def _fork(self, context: Context) -> None:
        if len(self._contexts) >= MOST_CONTEXTS:
            await self._delete(next(each for each in self._contexts if each is not context))
        name, picture = None, None
        if self._random.random() < 0.5:
            await self._pictured(context)
            name, picture = self._chosen(context)
        twin = self._new(filespace=context.filespace)
        twin.may_be_made, twin.life, twin.scene.pushes = True, Life.UNSURE, context.filespace
        began = time.time()
        try:
            async with self._load.doing("fork"):
                twin.box = await self._box(context).fork(twin.name, name)
        finally:  # answered or not: if it is there, it is whole
            twin.becomes(picture or context.picture(began, time.time()), time.time())
        twin.life, twin.made = Life.RUNNING, True

    async def _stop(self, context: Context) -> None:
        async with self._load.lock(context):
            context.commands_may_end()
            context.life = Life.UNSURE
            asked = context.may_do(time.time(), pushed)
            async with self._load.doing("stop"):
                await self._box(context).stop()
            context.scene.pushes = False
            context.does(asked, time.time(), pushed)
            context.life = Life.STOPPED

    async def _terminate(self, context: Context) -> None:
        async with self._load.lock(context):
            context.commands_may_end()
            context.life = Life.UNSURE
            asked = context.may_do(time.time(), pushed)
            async with self._load.doing("terminate"):
                await self._box(context).terminate(reason="enough")
            context.scene.pushes = False
            context.does(asked, time.time(), pushed)
            context.life = Life.NONE

    async def _delete(self, context: Context) -> None:
        async with self._load.lock(context):
            if context.box is None:  # a fork or a creation that was never answered: made first
                await self._deploy(context)
            context.commands_may_end()
            context.life = Life.UNSURE
            context.may_be_deleted(time.time())
            async with self._load.doing("delete"):
                await self._box(context).terminate(reason="enough", delete_files=True)
            self._contexts.remove(context)
            if self._random.random() < 0.5:
                self._contexts.append(context.reborn())

    async def _delete_snapshot(self, context: Context) -> None:
        await self._pictured(context)
        name, picture = self._chosen(context)
        picture.may_be_gone = True
        async with self._load.doing("delete_snapshot"):
            await self._box(context)._connection.send(
                "DELETE", f"/v1/sandboxes/{self._box(context).id}/snapshots/{name}"
            )
        del context.pictures[name]

    async def _download(self, context: Context) -> None:
        await self._pictured(context)
        name, _ = self._chosen(context)
        data = io.BytesIO()
        async with self._load.doing("download"):
            await self._box(context).download_snapshot(name, data)
        context.look_at_picture(name, files_in(data))

    # what is not

    async def _ephemeral(self) -> None:
        if len(self._load.world.ephemeral) >= MOST_EPHEMERAL:
            await self._end_one()
        async with self._load.doing("ephemeral"):
            box = await self._load.client.sandbox()
        self._load.world.ephemeral[box.id] = Life.RUNNING

    async def _end_ephemeral(self) -> None:
        if not self._load.world.ephemeral:
            await self._ephemeral()
        await self._end_one()

    async def _end_one(self) -> None:
        running = sorted(name for name, life in self._load.world.ephemeral.items() if life is Life.RUNNING)
        if not running:
            return
        name = self._random.choice(running)
        self._load.world.ephemeral[name] = Life.UNSURE
        async with self._load.doing("end_ephemeral"):
            await self._load.client.attach(await self._load.client.find(name)).terminate()
        self._load.world.ephemeral.pop(name, None)


_OF_FILESPACES = frozenset({"sync", "filespace_write", "filespace_delete"})
