"""Load on a server from several clients at once, by a seed, until the server is killed in the middle of it.

Every promise the server makes is written into the model; a kill is aimed at a kind of operation or at any moment.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.support.kill_history import Broken
from tests.support.kill_model import Background, Context, Life
from tests.support.kill_server import Server

from carrel.client import AsyncClient, AsyncSandbox
from carrel.errors import CarrelError, ServerUnreachable

WORKERS = 3
LONGEST_ROUND_S = 20.0
USUAL_S = {
    "snapshot": 0.03,
    "restore": 0.06,
    "fork": 0.08,
    "delete": 0.04,
    "exec": 0.03,
    "sync": 0.04,
    "download": 0.03,
}
"""How long operations take until enough have been seen; others take 20 ms."""

KINDS = (
    "create", "sync", "resume", "exec", "start", "stop", "write", "snapshot", "restore", "fork", "filespace_write",
    "terminate", "delete", "delete_snapshot", "filespace_delete", "download", "remove", "ephemeral", "end_ephemeral",
    "attach",
)  # fmt: skip

SERVE = "the start of the server itself"


Workers = Callable[["Load", int], Iterable[Coroutine[None, None, None]]]
"""What the client of that number does; each goes on until the kill."""


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

    def plain(self) -> dict[str, object]:
        """As plain values, which pass from one process to another."""
        return {"kills": self.kills, "hits": dict(self.hits), "done": dict(self.done), "slowest": self.slowest}

    @classmethod
    def sum(cls, parts: Iterable[dict[str, Any]]) -> Tally:
        """Of several histories, as their `plain`."""
        whole = cls()
        for part in parts:
            whole.kills += part["kills"]
            whole.hits += Counter(part["hits"])
            whole.done += Counter(part["done"])
            whole.slowest = max(whole.slowest, part["slowest"])
        return whole

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
        self.seed = seed
        self._armed = self.aim.kind
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._followers: list[asyncio.Task[None]] = []

    async def run(self, workers: Workers) -> None:
        """Until the kill, and until every client has seen it."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.aim.delay, self.kill)
        tasks = []
        for number in range(WORKERS):
            tasks += [asyncio.ensure_future(work) for work in workers(self, number)]
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
