"""The workers of one server: processes that share its port, its data directory and its database. Here are the place of
one among them, and the numbers that they share in memory.

A worker is a node of its own: it owns sessions by lease. The files of contexts belong to the server, so that any worker
may start any context of the server. Starts no process; `carrel.workers` does.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum

from carrel.config import MOST_WORKERS
from carrel.errors import CarrelError

log = logging.getLogger("carrel.nodes")

SEPARATOR = ":"
"""Between the name of a server and the number of a worker. The name of a server cannot have it."""
LOOK_EVERY_S = 0.05
"""How often a worker looks for changes that others made, when no request makes it look."""
RETURNS_WITHIN_S = 5.0
"""How long a request waits for the process that replaces a dead worker."""
_POLL_S = 0.01


class SharedChange(IntEnum):
    """What a worker changed in the database, so that others must not trust what they remember."""

    TOKENS = 0
    POLICIES = 1
    SECRETS = 2
    ENVIRONMENTS = 3
    APPROVALS = 4
    MCP_SERVERS = 5
    NODES = 6


TABLES: Mapping[str, SharedChange] = {
    "tokens": SharedChange.TOKENS,
    "policies": SharedChange.POLICIES,
    "secrets": SharedChange.SECRETS,
    "former_secrets": SharedChange.SECRETS,
    "environments": SharedChange.ENVIRONMENTS,
    "environment_labels": SharedChange.ENVIRONMENTS,
    "environment_uses": SharedChange.ENVIRONMENTS,
    "approvals": SharedChange.APPROVALS,
    "mcp_servers": SharedChange.MCP_SERVERS,
}
"""The changes that a write to a table is announced as."""
JOB_TABLES = frozenset({"jobs", "approvals"})
"""The tables in which a worker finds what there is to do for jobs."""


class _Field(IntEnum):
    """A number of one worker in the table."""

    READY = 0
    BEATEN = 1
    CONNECTIONS = 2
    SANDBOXES = 3
    ADOPTED = 4
    PLACES = 5
    JOB_CHANGES = 6


class WorkerTable:
    """Numbers in memory that the leader makes and the workers inherit. A worker writes its own, and all read all.

    The process that writes the records of all workers has numbers of its own: those of the worker `writer`.
    """

    def __init__(self, workers: int):
        self.workers = workers
        self.writer = workers
        self._numbers = memoryview(mmap.mmap(-1, mmap.PAGESIZE * 4)).cast("q")
        # The numbers of one field lie side by side: `changes` compares them with one copy.
        self._changes_end = len(SharedChange) * workers

    def changes(self) -> bytes:
        """Return the counts of all changes; they differ after any change."""
        return self._numbers[: self._changes_end].tobytes()

    def change(self, what: SharedChange, worker: int) -> None:
        """Count a change that a worker made and that is committed."""
        self._numbers[what * self.workers + worker] += 1

    def changed(self, before: bytes, now: bytes) -> set[SharedChange]:
        """Return what differs between two values of `changes`."""
        size = self.workers * 8
        return {
            what
            for what in SharedChange
            if before[what * size : (what + 1) * size] != now[what * size : (what + 1) * size]
        }

    def is_ready(self, worker: int) -> bool:
        """Whether a worker takes requests."""
        return bool(self._get(_Field.READY, worker))

    def set_ready(self, worker: int, ready: bool) -> None:
        self._set(_Field.READY, worker, int(ready))

    def beaten(self, worker: int) -> float:
        """Return when (monotonic) the event loop of a worker last ran."""
        return self._get(_Field.BEATEN, worker) / 1000

    def beat(self, worker: int) -> None:
        """Give a sign of life."""
        self._set(_Field.BEATEN, worker, int(time.monotonic() * 1000))

    def connections(self, worker: int) -> int:
        return self._get(_Field.CONNECTIONS, worker)

    def set_connections(self, worker: int, count: int) -> None:
        self._set(_Field.CONNECTIONS, worker, count)

    def least_connections(self) -> int:
        """Return the number of connections of the worker that has the fewest."""
        ready = [self.connections(each) for each in range(self.workers) if self.is_ready(each)]
        return min(ready, default=0)

    def sandboxes(self, worker: int) -> int:
        """Return how many sandboxes a worker has or starts."""
        return self._get(_Field.SANDBOXES, worker)

    def set_sandboxes(self, worker: int, count: int) -> None:
        self._set(_Field.SANDBOXES, worker, count)

    def places(self, worker: int) -> int:
        """Return how many places for sandboxes a worker takes, those of sandboxes that start included."""
        return self._get(_Field.PLACES, worker)

    def set_places(self, worker: int, count: int) -> None:
        self._set(_Field.PLACES, worker, count)

    def job_changes(self) -> int:
        """Return how often all workers together changed jobs, or what jobs wait for."""
        return sum(self._get(_Field.JOB_CHANGES, each) for each in range(self.workers))

    def count_job_change(self, worker: int) -> None:
        """Count a change of a worker that is committed."""
        self._set(_Field.JOB_CHANGES, worker, self._get(_Field.JOB_CHANGES, worker) + 1)

    def adopted(self) -> int:
        """Return how many running sandboxes of a former server the workers found."""
        return sum(self._get(_Field.ADOPTED, each) for each in range(self.workers))

    def set_adopted(self, worker: int, count: int) -> None:
        self._set(_Field.ADOPTED, worker, count)

    def _get(self, field: _Field, worker: int) -> int:
        return self._numbers[self._changes_end + field * (self.workers + 1) + worker]

    def _set(self, field: _Field, worker: int, value: int) -> None:
        self._numbers[self._changes_end + field * (self.workers + 1) + worker] = value


@dataclass(frozen=True, slots=True)
class Worker:
    """The place of this process in its server. By default it is the only one."""

    server: str
    index: int = 0
    count: int = 1
    table: WorkerTable | None = None
    socket: str = ""
    """The path of the socket on which it takes requests from the others."""
    locks: str = ""
    """The path of the file with the locks between the workers."""
    writer: str = ""
    """The path of the socket of the process that writes the records of all workers, if there is one."""
    alone: bool = True
    """Whether no other worker ran when it was started: then it cleans up what a former server left."""

    @property
    def name(self) -> str:
        """The name of this process among the nodes."""
        return self.server if self.count == 1 else worker_name(self.server, self.index)

    @property
    def first(self) -> bool:
        """Whether it does what is done once for the whole server."""
        return self.index == 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all workers of this server."""
        if self.count == 1:
            return (self.server,)
        return tuple(worker_name(self.server, each) for each in range(self.count))

    @property
    def former(self) -> tuple[str, ...]:
        """The names that processes of this server may have had and that none has now. They are dead: this server has
        the lock of the data directory.
        """
        every = (self.server, *(worker_name(self.server, each) for each in range(MOST_WORKERS)))
        return tuple(each for each in every if each not in self.names)

    def index_of(self, name: str) -> int | None:
        """Return the number of another worker of this server."""
        if self.count == 1 or name == self.name or name not in self.names:
            return None
        return int(name.rpartition(SEPARATOR)[2])

    def recovers(self, owner: str | None) -> bool:
        """Whether this process, at its start, recovers the sessions of an owner."""
        return owner == self.name or (self.alone and owner not in self.names)

    def share(self, total: int) -> int:
        """Return this worker's part of a number that is divided among all workers."""
        return total // self.count + (self.index < total % self.count)

    @property
    def turns(self) -> str:
        """The path of the file in which the processes that write to the database take turns."""
        return self.turns_of(self.locks)

    @staticmethod
    def turns_of(locks: str) -> str:
        """Return the path of that file beside the file with the locks."""
        return f"{locks}-database"

    # the others

    def answers(self, name: str) -> bool | None:
        """Whether another worker takes requests; None if the name is not one of a worker."""
        index = self.index_of(name)
        return None if index is None or self.table is None else self.table.is_ready(index)

    async def returned(self, name: str) -> bool:
        """Wait until the process that replaces another worker takes requests, but not for long."""
        ends = time.monotonic() + RETURNS_WITHIN_S
        while not (answers := self.answers(name)) and time.monotonic() < ends:
            if answers is None:
                return False
            await asyncio.sleep(_POLL_S)
        return bool(answers)

    def places_of_others(self) -> int:
        """Return how many places for sandboxes the other workers take."""
        if self.table is None:
            return 0
        return sum(self.table.places(each) for each in range(self.count) if each != self.index)

    def tell_places(self, count: int) -> None:
        """Tell the other workers how many places this one takes."""
        if self.table is not None:
            self.table.set_places(self.index, count)

    def job_changes(self) -> int | None:
        """Return how often jobs, or what they wait for, were changed; None if only the database knows."""
        return None if self.table is None or not self.writer else self.table.job_changes()

    def announce(self, what: SharedChange) -> None:
        """Tell the other workers of a change that is committed."""
        if self.table is not None:
            self.table.change(what, self.index)

    def wrote(self, tables: Collection[str]) -> None:
        """Tell the other workers which tables a committed transaction changed."""
        for what in {TABLES[each] for each in tables if each in TABLES}:
            self.announce(what)
        if self.table is not None and not JOB_TABLES.isdisjoint(tables):
            self.table.count_job_change(self.index)


def worker_name(server: str, index: int) -> str:
    """Return the name of a worker of a server."""
    return f"{server}{SEPARATOR}{index}"


def server_of(node: str) -> str:
    """Return the name of the server that a node is, or is a worker of."""
    return node.partition(SEPARATOR)[0]


CatchUp = Callable[[], Awaitable[object]]


class OtherWorkers:
    """Follows the changes of the other workers. Every request waits until this worker knows all that were committed
    before it, so that a client may send each request to another worker.
    """

    def __init__(self, worker: Worker, catch_up: Mapping[SharedChange, CatchUp]):
        assert worker.table is not None
        self._table = worker.table
        self._catch_up = catch_up
        self._seen = self._table.changes()
        self._lock = asyncio.Lock()

    @property
    def changed(self) -> bool:
        """Whether there are changes that this worker does not know."""
        return self._table.changes() != self._seen

    async def follow(self) -> None:
        """Learn the changes. One that cannot be learnt now is tried again with the next call."""
        async with self._lock:
            now = self._table.changes()
            for what in self._table.changed(self._seen, now):
                try:
                    await self._catch_up[what]()
                except CarrelError as error:
                    log.warning("a change of another worker cannot be read: %s", error)
                    return
            self._seen = now

    async def run(self) -> None:
        """Follow the changes until cancelled, also without requests."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                if self.changed:
                    await self.follow()
            except Exception:
                log.exception("changes of other workers cannot be read; it is tried again")
