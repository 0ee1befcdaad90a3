"""Clients that write numbered lines into the files of contexts through a load balancer, and compare what was answered with
what is there, while servers are killed.

Each line is written by one command with an id of its own. An error is followed as its `retry` and `hint` say; every other
error breaks the history. A context knows the lines that must be in its file, in this order:

- a line whose command was answered is there, once;
- after `not_running` the sandbox is started again. Then the file may have lost lines at its end, but none that an archived
  snapshot had, and only if another server had the session since, by the events of the session.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from carrel.client import AsyncClient, AsyncSandbox
from carrel.errors import AlreadyExists, CarrelError, NotFound, NotRunning, ServerUnreachable
from carrel.models import EventInfo, SandboxInfo

T = TypeVar("T")
FILE = "history"
PAUSE_S = 0.1
SNAPSHOT_PART = 0.1
"""The part of operations that take a snapshot."""


class Broken(AssertionError):
    """The servers broke a promise."""


@dataclass
class Context:
    """One context, and what must be in its file."""

    name: str
    lines: list[int] = field(default_factory=list)
    seen: int = 0
    """The last known event of its session."""
    archived: int = 0
    """How many of its lines an archived snapshot has at least."""
    info: SandboxInfo | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def node(self) -> str | None:
        """The server that started its sandbox."""
        return None if self.info is None else self.info.node


@dataclass
class History:
    """What all clients saw."""

    contexts: list[Context]
    errors: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0
    """The longest time from the first error of an operation to its success."""
    written: int = 0
    lost: int = 0
    resumed: int = 0
    taken_over: int = 0

    def plain(self) -> str:
        """The sums, for the end of a run."""
        errors = ", ".join(f"{count} {name}" for name, count in sorted(self.errors.items()))
        return (
            f"{self.written} lines in {len(self.contexts)} contexts, {self.resumed} resumed ({self.taken_over} on another "
            f"server, {self.lost} lines after the last archived snapshot lost); longest trouble {self.longest:.1f} s; "
            f"errors: {errors or 'none'}"
        )


class Writer:
    """One client."""

    def __init__(self, history: History, client: AsyncClient, seed: int, patience_s: float):
        self._history = history
        self._client = client
        self._random = Random(seed)
        self._patience_s = patience_s

    async def run(self, over: asyncio.Event) -> None:
        """Write until it is over."""
        while not over.is_set():
            free = [each for each in self._history.contexts if not each.lock.locked()]
            context = self._random.choice(free or self._history.contexts)
            async with context.lock:
                await self.step(context)

    async def step(self, context: Context) -> None:
        """Write one line, or take a snapshot."""
        if context.info is None:
            await self._start(context)
            await self._happened(context)
        if context.lines and self._random.random() < SNAPSHOT_PART:
            await self._snapshot(context)
        else:
            await self._append(context, next(_NUMBERS))

    async def check(self, context: Context) -> None:
        """Compare the file with the lines."""
        async with context.lock:
            if context.info is not None:
                found = await self._read(context)
                if found != context.lines:
                    raise Broken(_difference(context, found))

    # the operations

    async def _append(self, context: Context, number: int) -> None:
        for attempt in itertools.count():
            name = f"kline-{number}-{attempt}"
            if await self._ran(context, f"echo {number} >> {FILE}", name):
                context.lines.append(number)
                self._history.written += 1
                return
            # The sandbox is gone, and with it the command: the file says whether it has run.
            found = await self._restarted(context, number)
            if found:
                self._history.written += 1
                return

    async def _ran(self, context: Context, command: str, name: str) -> bool:
        """Run a command exactly once; False when its sandbox has ended before its result was known."""
        box = self._box(context)

        async def begin() -> None:
            try:
                await box.commands.start(command, id=name)
            except AlreadyExists:  # a request whose answer was lost
                pass

        try:
            await self._trying(begin)
            result = await self._trying(box.commands.get(name).wait)
        except NotRunning:
            return False
        except NotFound as error:  # another sandbox of the context answered
            raise Broken(f"{context.name}: command {name} is not known in a sandbox that did not end") from error
        if result.exit_code != 0 or result.stdout or result.stderr:
            raise Broken(f"{context.name}: {command!r} answered {result}")
        return True

    async def _restarted(self, context: Context, pending: int) -> bool:
        """Start the sandbox again, and find out what is left. Whether the pending line is there."""
        before = context.node
        await self._start(context)
        happened = await self._happened(context)
        self._history.resumed += 1
        self._history.taken_over += before != context.node
        found = await self._read(context)
        expected = [*context.lines, pending]
        if found != expected[: len(found)]:
            raise Broken(_difference(context, found))
        if len(found) < context.archived:
            raise Broken(f"{context.name}: {len(found)} lines are left, an archived snapshot had {context.archived}")
        if len(found) < len(context.lines):
            if before == context.node and {each.node for each in happened} <= {before}:
                states = [(each.node, each.body.get("state")) for each in happened]
                raise Broken(f"lines are lost on the same server. {_difference(context, found)}; {states}")
            self._history.lost += len(context.lines) - len(found)
        context.lines = found
        return found[-1:] == [pending]

    async def _happened(self, context: Context) -> list[EventInfo]:
        """The events of the session since this was last asked."""

        async def read() -> list[EventInfo]:
            events = self._client.events(context.name, kinds=["session"], after=context.seen, follow=False)
            return [each async for each in events]

        found = await self._trying(read)
        context.seen = max((each.id for each in found), default=context.seen)
        return found

    async def _read(self, context: Context) -> list[int]:
        while True:
            try:
                data = await self._trying(lambda: self._box(context).files.read(FILE))
                break
            except NotFound:
                return []
            except NotRunning:
                await self._start(context)
        return [int(line) for line in data.split()]

    async def _start(self, context: Context) -> None:
        box = await self._trying(lambda: self._client.sandbox(context.name))
        context.info = await self._trying(box.info)

    async def _snapshot(self, context: Context) -> None:
        had, box = len(context.lines), self._box(context)
        try:
            name = (await self._trying(box.snapshot)).id
            found = {each.id: each for each in await self._trying(box.snapshots)}
        except NotRunning:
            return  # the next line finds out what is left
        if name in found and found[name].archived:
            context.archived = had

    def _box(self, context: Context) -> AsyncSandbox:
        assert context.info is not None
        return self._client.attach(context.info)

    async def _trying(self, act: Callable[[], Awaitable[T]]) -> T:
        """Ask until the answer is no retryable error."""
        began: float | None = None
        while True:
            try:
                answer = await act()
            except CarrelError as error:
                if isinstance(error, NotRunning | AlreadyExists | NotFound):
                    self._note(began)
                    raise
                self._history.errors[error.code] += 1
                broke = isinstance(error, ServerUnreachable)  # the connection itself: nobody answered
                if not broke and (error.status != 503 or error.extra.get("retry") is not True):
                    raise Broken(f"an error that is not retryable: {error.problem()}") from error
                began = time.monotonic() if began is None else began
                if time.monotonic() - began > self._patience_s:
                    raise Broken(f"for {self._patience_s} s the answer was {error.problem()}") from error
                await asyncio.sleep(PAUSE_S)
            else:
                self._note(began)
                return answer

    def _note(self, began: float | None) -> None:
        if began is not None:
            self._history.longest = max(self._history.longest, time.monotonic() - began)


_NUMBERS = itertools.count(1)


def _difference(context: Context, found: list[int]) -> str:
    twice = sorted(line for line, count in Counter(found).items() if count > 1)
    missing = sorted(set(context.lines) - set(found))
    more = sorted(set(found) - set(context.lines))
    return (
        f"{context.name} on '{context.node}': its file has {len(found)} lines, {len(context.lines)} were answered "
        f"({context.archived} archived); twice: {twice[:20]}, missing: {missing[:20]}, unknown: {more[:20]}"
    )
