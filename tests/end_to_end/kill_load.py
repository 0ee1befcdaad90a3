"""Load on a server from several clients at once, by a seed, until the server is killed in the middle of it.

Every promise the server makes is written into the model; a kill is aimed at a kind of operation or at any moment.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from kill_model import Background, Broken, Context, Life, Picture
from kill_server import Server

from carrel.client import AsyncClient, AsyncSandbox
from carrel.errors import CarrelError, ServerUnreachable

WORKERS = 3
MOST_CONTEXTS = 3
MOST_PICTURES = 5
MOST_EPHEMERAL = 2
LONGEST_ROUND_S = 20.0
FILES = ("a.txt", "data/b.bin", "output/deep/er/c", "scripts/d.sh")
USUAL_S = {"snapshot": 0.03, "restore": 0.06, "fork": 0.08, "delete": 0.04, "exec": 0.03}
"""How long operations take until enough have been seen; others take 20 ms."""

KINDS = (
    "create", "resume", "attach", "ephemeral", "end_ephemeral", "exec", "start", "write", "snapshot", "restore",
    "fork", "stop", "terminate", "delete", "delete_snapshot",
)  # fmt: skip


SERVE = "the start of the server itself"


class Killed(Exception):
    """The server is gone, as it was meant to be."""


@dataclass
class World:
    """What is known across kills: one history of one data directory."""

    contexts: list[list[Context]] = field(default_factory=lambda: [[] for _ in range(WORKERS)])
    ephemeral: dict[str, Life] = field(default_factory=dict)
    durations: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=30)))
    hits: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def all(self) -> list[Context]:
        """Every context."""
        return [context for own in self.contexts for context in own]

    def usual(self, kind: str) -> float:
        """How long an operation takes."""
        seen = self.durations[kind]
        return statistics.median(seen) if len(seen) >= 3 else USUAL_S.get(kind, 0.02)


@dataclass
class Tally:
    """What all kills of a run came to."""

    kills: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0

    def add(self, kills: int, world: World, starts: list[float]) -> None:
        """One more history."""
        self.kills += kills
        self.hits += world.hits
        self.done += world.done
        self.done[SERVE] += len(starts)
        self.slowest = max(self.slowest, *starts, 0.0)

    def __str__(self) -> str:
        kinds = ", ".join(
            f"{kind} {self.hits[kind]} of {self.hits[kind] + self.done[kind]}" for kind in (*KINDS, SERVE)
        )
        return f"{self.kills} kills hit operations: {kinds}. Slowest start {self.slowest:.1f} s."


@dataclass(frozen=True)
class Aim:
    """When to kill: so long after the load starts, or at that part of the first operation of a kind."""

    delay: float
    kind: str | None = None
    part: float = 0.0
    again: float | None = None
    """The part of the start after the kill at which it is killed again."""

    @classmethod
    def of(cls, seed: int) -> Aim:
        """Every fourth seed kills at any moment, the others go through the kinds of operations."""
        random = Random(f"aim {seed}")
        again = random.uniform(0.3, 1.1) if random.random() < 0.25 else None
        if seed % 4 == 0:
            return cls(random.uniform(0, 0.4), again=again)
        turn = seed - seed // 4 - 1
        return cls(LONGEST_ROUND_S, KINDS[turn % len(KINDS)], random.uniform(0, 1.1), again)

    def __str__(self) -> str:
        when = f"{self.delay * 1000:.0f} ms in" if self.kind is None else f"{self.part:.0%} into {self.kind}"
        return when if self.again is None else f"{when}, again {self.again:.0%} into the next start"


class Load:
    """One round: from a server that runs to a server that is killed."""

    def __init__(self, world: World, server: Server, client: AsyncClient, seed: int):
        self.world = world
        self.aim = Aim.of(seed)
        self.killed = False
        self._server = server
        self._client = client
        self._seed = seed
        self._armed = self.aim.kind
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._followers: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Until the kill, and until every client has seen it."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.aim.delay, self.kill)
        tasks = []
        for number in range(WORKERS):
            worker = Worker(self, number, Random(f"{self._seed} {number}"))
            tasks += [asyncio.ensure_future(worker.work()), asyncio.ensure_future(worker.write_beside())]
        try:
            await asyncio.wait(tasks, timeout=LONGEST_ROUND_S * 2, return_when=asyncio.FIRST_EXCEPTION)
            if not self.killed:  # somebody has failed: there is nothing to wait for
                self.kill()
            await self._server.killed()
            _done, hung = await asyncio.wait([*tasks, *self._followers], timeout=20)
        finally:
            timer.cancel()
            for task in (*tasks, *self._followers):
                task.cancel()
            ended = await asyncio.gather(*tasks, *self._followers, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception) and not isinstance(error, Killed):
                raise error
        if hung:
            raise Broken(f"{len(hung)} clients still wait for a server that is gone")

    def kill(self) -> None:
        """Now."""
        if not self.killed:
            self._server.kill()
            self.killed = True

    def arm(self, kind: str) -> None:
        """The operation that the kill is aimed at starts now."""
        if self._armed == kind:
            self._armed = None
            asyncio.get_running_loop().call_later(self.aim.part * self.world.usual(kind), self.kill)

    @property
    def wanted(self) -> str | None:
        """The kind of operation that is still to be hit."""
        return self._armed

    @asynccontextmanager
    async def doing(self, kind: str) -> AsyncIterator[None]:
        """Around one request. A broken connection means the kill, any other failure is one."""
        self.arm(kind)
        before = self.killed
        began = time.monotonic()
        try:
            yield
        except ServerUnreachable as error:
            if not self.killed:
                raise Broken(f"{kind}: {error}") from error
            if not before:
                self.world.hits[kind] += 1
            raise Killed from None
        except CarrelError as error:
            raise Broken(f"{kind} failed: {type(error).__name__}: {error}") from error
        self.world.done[kind] += 1
        if not self.killed:
            self.world.durations[kind].append(time.monotonic() - began)

    def lock(self, context: Context) -> asyncio.Lock:
        """Held while the files of a context are replaced, or while one of them is written beside other work."""
        return self._locks[context.name]

    @property
    def client(self) -> AsyncClient:
        """The client of everyone here."""
        return self._client

    def follow(self, context: Context, command: Background) -> None:
        """Read a command's output from where it was left, until it ends or the server does."""
        self._followers.append(asyncio.ensure_future(self._follow(context, command)))

    async def _follow(self, context: Context, command: Background) -> None:
        assert context.box is not None
        await read_on(context.box, command)


async def read_on(box: AsyncSandbox, command: Background) -> None:
    """The rest of a command's output, and its end."""
    try:
        stream = box.commands.get(command.id).stream(command.offset)
        async for chunk in stream:
            command.take(chunk.data, chunk.offset)
    except ServerUnreachable:
        raise Killed from None
    except CarrelError as error:
        command.ended = True
        if command.may_be_gone:
            return
        raise Broken(f"command {command.id}: {type(error).__name__}: {error}") from error
    command.ended = True
    if command.may_be_gone:
        return
    assert stream.info is not None
    if command.got != command.expected:
        raise Broken(f"command {command.id} ended after {len(command.got)} of {len(command.expected)} bytes")
    if stream.info.exit_code != command.exit_code:
        raise Broken(f"command {command.id} ended with {stream.info.exit_code}, not {command.exit_code}")


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
            running = [context for context in self._contexts if context.life is Life.RUNNING]
            if self._load.killed:
                raise Killed
            if running:
                context = self._random.choice(running)
                async with self._load.lock(context):
                    if context.life is Life.RUNNING:
                        await self._put(context, "beside", 50)
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
            context = self._random.choice(self._contexts) if self._contexts else self._new()
            await self._on(context, kind)

    async def _on(self, context: Context, kind: str) -> None:
        acts: dict[str, Callable[[Context], Awaitable[None]]] = {
            "resume": self._resume, "attach": self._deploy, "exec": self._exec, "start": self._start,
            "write": self._write, "snapshot": self._snapshot, "restore": self._restore, "fork": self._fork,
            "stop": self._stop, "terminate": self._terminate, "delete": self._delete,
            "delete_snapshot": self._delete_snapshot,
        }  # fmt: skip
        if context.life is not Life.RUNNING:
            await self._deploy(context)
        await acts[kind](context)

    def _new(self) -> Context:
        context = Context(f"w{self._number}-{next(self._load.world.numbers)}")
        self._contexts.append(context)
        return context

    def _box(self, context: Context) -> AsyncSandbox:
        assert context.box is not None
        return context.box

    def _content(self, size: int) -> bytes:
        words = b"%d/%d " % (self._load._seed, next(self._load.world.numbers))
        return words + self._random.randbytes(self._random.randrange(size)) + words

    # the operations

    async def _deploy(self, context: Context) -> None:
        kind = "attach" if context.life is Life.RUNNING else "resume" if context.may_be_made else "create"
        askers = 3 if self._random.random() < 0.3 else 1
        context.may_be_made = True
        if kind != "attach":
            context.life = Life.UNSURE
        async with self._load.doing(kind):
            boxes = await asyncio.gather(*(self._load.client.sandbox(context.name) for _ in range(askers)))
        if len({box.id for box in boxes}) != 1:
            raise Broken(f"{askers} askers at once got {boxes}")
        context.life, context.made, context.box = Life.RUNNING, True, boxes[0]

    async def _resume(self, context: Context) -> None:
        await self._stop(context)
        await self._deploy(context)

    async def _put(self, context: Context, name: str, size: int) -> None:
        content = self._content(size)
        context.file(name).may_become(frozenset({content}), time.time())
        async with self._load.doing("write"):
            await self._box(context).files.write(name, content)
        context.file(name).becomes(frozenset({content}), time.time())

    async def _write(self, context: Context) -> None:
        await self._put(context, self._random.choice(FILES), self._random.choice((100, 5_000, 400_000)))

    async def _exec(self, context: Context) -> None:
        words = f"{self._load._seed} {next(self._load.world.numbers)}"
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
            context.may_become(picture, time.time())
            context.life = Life.UNSURE
            async with self._load.doing("restore"):
                await self._box(context).restore(name)
            context.becomes(picture, time.time())
            context.life = Life.RUNNING

    async def _fork(self, context: Context) -> None:
        if len(self._contexts) >= MOST_CONTEXTS:
            await self._delete(next(each for each in self._contexts if each is not context))
        name, picture = None, None
        if self._random.random() < 0.5:
            await self._pictured(context)
            name, picture = self._chosen(context)
        twin = self._new()
        twin.may_be_made, twin.life = True, Life.UNSURE
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
            async with self._load.doing("stop"):
                await self._box(context).stop()
            context.life = Life.STOPPED

    async def _terminate(self, context: Context) -> None:
        async with self._load.lock(context):
            context.commands_may_end()
            context.life = Life.UNSURE
            async with self._load.doing("terminate"):
                await self._box(context).terminate(reason="enough")
            context.life = Life.NONE

    async def _delete(self, context: Context) -> None:
        async with self._load.lock(context):
            if context.box is None:  # a fork or a creation that was never answered: made first
                await self._deploy(context)
            context.commands_may_end()
            context.life = Life.UNSURE
            context.may_become(Picture({}), time.time())
            for picture in context.pictures.values():
                picture.may_be_gone = True
            async with self._load.doing("delete"):
                await self._box(context).terminate(reason="enough", delete_files=True)
            self._contexts.remove(context)
            if self._random.random() < 0.5:
                self._contexts.append(Context(context.name))  # the same name, and nothing of what was

    async def _delete_snapshot(self, context: Context) -> None:
        await self._pictured(context)
        name, picture = self._chosen(context)
        picture.may_be_gone = True
        async with self._load.doing("delete_snapshot"):
            await self._box(context)._connection.call(
                "DELETE", f"/v1/sandboxes/{self._box(context).id}/snapshots/{name}"
            )
        del context.pictures[name]

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
