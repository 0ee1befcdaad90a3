"""The audit log of one server: every operation is written before it is dispatched, and again when it has ended.

Operations that begin at the same moment share one transaction, and ends ride along with the next. Decides nothing of
operations and knows no database: the store it is given does. Only this server's own work is ever waited for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from carrel.audit.export import ExportStore, Stored, export
from carrel.audit.heads import Head, Headlike
from carrel.audit.keys import SigningKey
from carrel.audit.plan import Batch, Chain, Hold, Item, Plan, Tip
from carrel.audit.records import Ending, Entry, arguments_hash, row, server_chain
from carrel.audit.search import Filter, SearchStore, search
from carrel.errors import CarrelError, Conflict, InvalidRequest, PlatformError
from carrel.models import AuditPage

log = logging.getLogger("carrel.audit")

HEAD_RECORDS = 1000
HEAD_S = 300.0
FLUSH_S = 0.05
"""How long the end of an operation may wait for company."""
MAX_BATCH = 2000
FEW = 4
"""So few records are written at once, where the database can: the operation that waits for them would wait longer for
another thread.
"""
MAX_QUEUED = 50_000
MAX_CHAIN = 200
_MAX_CHAINS = 10_000
_RETRY_S = 1.0
_ATTEMPTS = 10
UNKNOWN = Ending("unknown", reason="the server ended")


class LogStore(ExportStore, SearchStore, Protocol):
    """What the log needs of a store; `store.audit.AuditStore` is one, and says what the methods do."""

    async def append(
        self, unknown: Collection[str], build: Callable[[Mapping[str, Tip]], Batch], *, short: bool = False
    ) -> None:
        """Write what `build` makes of the ends of chains."""

    async def unclean(self, node: str) -> Sequence[tuple[str, str, int, bool]]:
        """The holds of a server that are not clean."""

    async def holds(self, chain: str) -> Sequence[tuple[str, str, int, bool]]:
        """The holds of a chain."""

    async def unfinished(self, chain: str, start: int) -> Sequence[Stored]:
        """Begins without an end."""

    async def aged(self, at: float, *, after: str = "", limit: int = 1000) -> Sequence[str]:
        """Chains that can be pruned."""

    async def head_before(self, chain: str, at: float) -> Headlike | None:
        """The newest head of then."""

    async def prune(self, chain: str, seq: int, *, whole: bool) -> int:
        """Remove records up to a head."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An operation that began and whose end nobody saw, because the server ended in between."""

    chain: str
    seq: int
    at: float
    actor: str
    kind: str
    name: str


class Ticket:
    """An operation that may be dispatched now: its begin is written. Say `end` once it is over, however it went."""

    __slots__ = ("_ended", "_log", "began", "entry", "seq")

    def __init__(self, log: AuditLog, entry: Entry):
        self._log = log
        self._ended = False
        self.entry = entry
        self.began = time.monotonic()
        self.seq = 0

    def end(self, ending: Ending | None = None) -> None:
        """The operation is over. Never waits; only the first call counts."""
        if self._ended:
            return
        self._ended = True
        ending = ending or Ending(duration_ms=(time.monotonic() - self.began) * 1000)
        self._log._ended(self, ending)


class AuditLog:
    """`open` it before anything else is done, `close` it after everything else has ended.

    Strict, `begin` returns when the record is in the database, so that an operation without a record cannot be. Else it
    returns at once, and a server that is killed may have dispatched operations of the last `flush_s` seconds that no
    record tells of.
    """

    def __init__(
        self,
        store: LogStore,
        key: SigningKey,
        node: str,
        *,
        strict: bool = True,
        head_records: int = HEAD_RECORDS,
        head_s: float = HEAD_S,
        flush_s: float = FLUSH_S,
        clock: Callable[[], float] = time.time,
    ):
        self.key = key
        self.node = node
        self._store = store
        self._strict = strict
        self._head_records = head_records
        self._head_s = head_s
        self._flush_s = flush_s
        self._clock = clock
        self._queue: deque[Item] = deque()
        self._chains: OrderedDict[str, Chain] = OrderedDict()
        self._open: dict[str, set[int]] = {}
        self._dirty: dict[str, float] = {}
        self._seal: set[str] = set()
        self._taken: dict[str, frozenset[str]] = {}
        self._read: Counter[str] = Counter()
        self._writing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._urgent = False
        self._closing = False
        self._broken: CarrelError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> list[Unfinished]:
        """Begin to write. What this server left open when it ended last is closed as unknown, and told."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        try:
            left = [Hold(*hold) for hold in await self._store.unclean(self.node)]
            return [one for hold in left for one in await self._close_open(hold.chain, [hold])]
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Write what is left and sign every chain. An operation that has not ended stays open until `open`."""
        if self._task is None or self._closing:
            return
        with suppress(PlatformError):
            await self.flush()
        self._seal.update(self._dirty)
        self._closing = True
        self._hurry()
        await self._task
        for timer in (self._timer, self._head_timer):
            if timer is not None:
                timer.cancel()
        if self._queue:
            log.error("%d audit records could not be written: %s", len(self._queue), self._broken)

    def hash_arguments(self, arguments: Mapping[str, object]) -> str:
        """The hash of full arguments, keyed with this server's key."""
        return arguments_hash(arguments, self.key.arguments)

    async def begin(self, entry: Entry) -> Ticket:
        """An operation is about to be dispatched. `PlatformError` when that cannot be written: then it must not be."""
        ticket = Ticket(self, entry)
        item = Item("begin", entry, None, self._clock(), ticket)
        if not self._strict:
            self._put(item)
            return ticket
        item.written = written = asyncio.get_running_loop().create_future()
        self._put(item, urgent=True)
        try:
            await written
        except asyncio.CancelledError:
            if written.done() and not written.cancelled() and written.exception() is None:
                ticket.end(Ending("cancelled"))
            raise
        return ticket

    def record(self, entry: Entry, ending: Ending) -> None:
        """Something that is over already: a refusal, or an act of the server. Written soon; `flush` waits for it.

        `PlatformError` when so many records wait that the log can take no more.
        """
        self._put(Item("whole", entry, ending, self._clock()))

    async def flush(self) -> None:
        """Wait until everything said so far is written; `PlatformError` when it cannot be."""
        written = asyncio.get_running_loop().create_future()
        self._put(Item("whole", Entry("", "", "", ""), None, 0.0, written=written), urgent=True)
        await written

    async def adopt(self, chain: str) -> list[Unfinished]:
        """This server has got the session of a chain: what another left open there is closed as unknown, and told."""
        await self.flush()
        self._chains.pop(chain, None)
        left = [hold for each in await self._store.holds(chain) if not (hold := Hold(*each)).clean]
        return await self._close_open(chain, left) if left else []

    async def seal(self, chains: Iterable[str] | None = None) -> None:
        """Sign heads now: of all the chains (or of those among these) that this server wrote to since their last."""
        self._seal.update(self._dirty if chains is None else self._dirty.keys() & set(chains))
        await self.flush()

    async def search(self, wanted: Filter, *, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """Operations, newest first."""
        return await search(self._store, wanted, limit=limit, cursor=cursor)

    async def export(self, chains: Sequence[str] | None = None, *, compress: bool = False) -> AsyncIterator[bytes]:
        """The records of these chains, or of all, with heads up to their ends, as a file that `verify` can check."""
        async for piece in export(
            self._store, self.key, self.node, self._clock, self.seal, self._reading, chains=chains, compress=compress
        ):
            yield piece

    async def prune(self, before: float, by: str | None = None) -> int:
        """Remove the records that a head signed before that moment covers, and say how many.

        The head stays, so that what comes after it can still be verified; the pruning itself is recorded in the chain
        of the server, as done by the server or by whoever asked for it. An operation that has not ended keeps its
        record and all that came after, and a chain that is being exported waits for the next time. The chains of
        sandboxes without a context go altogether.
        """
        await self.seal()
        removed, after = 0, ""
        while names := await self._store.aged(before, after=after):
            for name in names:
                signed = await self._store.head_before(name, before)
                holds = [Hold(*each) for each in await self._store.holds(name)]
                if signed is None or not holds:
                    continue
                head = Head(*signed)
                if head.seq >= min(map(self._first_open, holds)):
                    continue
                mine = all(hold.clean and hold.node == self.node for hold in holds)
                whole = mine and name.startswith("sandbox:")
                async with self._writing:  # or a record could be added to a chain that is no more
                    if self._read[name]:
                        continue
                    count = await self._store.prune(name, head.seq, whole=whole)
                    if whole:
                        self._chains.pop(name, None)
                removed += count
                said = {"chain": name, "seq": head.seq, "hash": head.hash, "records": count}
                entry = Entry(server_chain(self.node), by or self.node, "session", "prune_audit", arguments=said)
                self.record(entry, Ending())
            after = names[-1]
            await self.flush()
        return removed

    @asynccontextmanager
    async def _reading(self, chain: str) -> AsyncIterator[None]:
        """While a chain is read from its start to its end."""
        async with self._writing:  # a prune of it that is under way ends first
            self._read[chain] += 1
        try:
            yield
        finally:
            self._read[chain] -= 1
            self._read += Counter()  # without those that nobody reads

    def _first_open(self, hold: Hold) -> float:
        """The place before which every operation of a server in a chain has ended."""
        if hold.clean:
            return math.inf
        if hold.node == self.node:
            return min(self._open.get(hold.chain, ()), default=math.inf)
        return hold.open_from

    # what waits

    def _put(self, item: Item, *, urgent: bool = False) -> None:
        if self._task is None or self._closing:
            raise PlatformError("the audit log is closed", hint="the server is shutting down; ask again later")
        chain = item.entry.chain
        if len(chain) > MAX_CHAIN or not chain.isascii() or not chain.isprintable():
            raise InvalidRequest("this cannot be the name of a chain", field="chain", hint="use `chain_of`")
        if item.type != "end" and item.entry.chain:
            if len(self._queue) >= MAX_QUEUED:
                raise self._cannot("too many records wait")
            if self._broken is not None and item.written is None:
                raise self._cannot(self._broken.detail)
        self._queue.append(item)
        if urgent or len(self._queue) >= MAX_BATCH:
            self._hurry()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._flush_s, self._hurry)

    def _ended(self, ticket: Ticket, ending: Ending) -> None:
        try:
            self._put(Item("end", ticket.entry, ending, self._clock(), ticket))
        except PlatformError:
            log.warning("the end of an operation in %s came after the audit log was closed", ticket.entry.chain)

    def _hurry(self) -> None:
        self._urgent = True
        self._wake.set()

    @staticmethod
    def _cannot(why: str) -> PlatformError:
        return PlatformError(
            f"the audit log cannot be written, so nothing may be done: {why}",
            hint="mend the database; operations go on by themselves then",
        )

    # writing

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._urgent:
                self._urgent = False
                batch, seal = self._take()
                try:
                    async with self._writing:
                        await self._commit(batch, seal)
                except Exception as error:
                    self._failed(batch, seal, error)
                    break
                self._broken = None
                self._settle(batch)
            if self._closing:
                return

    def _take(self) -> tuple[list[Item], set[str]]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch: list[Item] = []
        while self._queue and len(batch) < MAX_BATCH:
            item = self._queue.popleft()
            if item.written is None or not item.written.cancelled():
                batch.append(item)
        self._urgent = self._urgent or bool(self._queue)
        seal, self._seal = self._seal, set()
        return batch, seal

    async def _commit(self, batch: list[Item], seal: set[str]) -> None:
        items = [item for item in batch if item.entry.chain]
        touched = {item.entry.chain for item in items} | seal
        if not touched:
            return
        for _ in range(_ATTEMPTS):
            known = {name: replace(chain) for name in touched if (chain := self._chains.get(name)) is not None}
            plan = Plan(
                self.key, self.node, known, self._open, items, seal, self._taken, self._head_records, self._clock()
            )
            try:
                unknown = touched - known.keys()
                await self._store.append(unknown, plan.build, short=len(items) <= FEW and not seal and not unknown)
            except Conflict:
                for name in touched:
                    self._chains.pop(name, None)
                continue
            self._apply(plan, items)
            return
        raise PlatformError("other servers write to the same chains without end")

    def _apply(self, plan: Plan, items: list[Item]) -> None:
        for name, chain in plan.chains.items():
            self._chains[name] = chain
            self._chains.move_to_end(name)
            self._taken.pop(name, None)
            if still := plan.still(name):
                self._open[name] = still
            else:
                self._open.pop(name, None)
            if chain.seq == chain.head_seq:
                self._dirty.pop(name, None)
            else:
                self._dirty.setdefault(name, self._clock())
        while len(self._chains) > _MAX_CHAINS:
            self._chains.popitem(last=False)
        for item in items:
            if item.type == "begin" and item.ticket is not None:
                item.ticket.seq = plan.seqs[id(item.ticket)]
        self._remind()

    def _remind(self) -> None:
        """Have heads signed in time."""
        if self._head_timer is None and self._dirty:
            first = next(iter(self._dirty.values()))
            wait = min(max(first + self._head_s - self._clock(), 0.0), self._head_s)
            self._head_timer = asyncio.get_running_loop().call_later(wait, self._heads_due)

    def _heads_due(self) -> None:
        self._head_timer = None
        now = self._clock()
        # A clock that was set back must not put a head off.
        due = {name for name, since in self._dirty.items() if not since - 1 <= now < since + self._head_s}
        if due:
            self._seal |= due
            self._hurry()
        else:
            self._remind()

    def _settle(self, batch: list[Item]) -> None:
        for item in batch:
            if item.written is None:
                continue
            if not item.written.done():
                item.written.set_result(None)
            elif item.ticket is not None:  # whoever asked went while it was written
                item.ticket.end(Ending("cancelled"))

    def _failed(self, batch: list[Item], seal: set[str], error: Exception) -> None:
        self._seal |= seal
        if not isinstance(error, CarrelError):
            log.error("the audit log failed", exc_info=error)
            sound = [item for item in batch if self._sound(item)]
            if len(sound) < len(batch):  # what no record can be made of must not keep the others from being written
                self._queue.extendleft(reversed(sound))
                self._hurry()
                return
        self._broken = error if isinstance(error, CarrelError) else PlatformError(type(error).__name__)
        kept: list[Item] = []
        for item in batch:
            if item.written is None:
                kept.append(item)
            elif not item.written.done():
                item.written.set_exception(self._cannot(self._broken.detail))
        self._queue.extendleft(reversed(kept))
        if self._timer is None and not self._closing:
            self._timer = asyncio.get_running_loop().call_later(_RETRY_S, self._hurry)

    def _sound(self, item: Item) -> bool:
        """Whether a record can be made of an item; who waits for one of which none can is told."""
        try:
            row(item.type, item.entry, item.ending, seq=1, at=item.at, node=self.node, before=b"")
        except Exception as error:
            if item.written is not None and not item.written.done():
                item.written.set_exception(self._cannot(f"{type(error).__name__} in what was said of it"))
            return False
        return True

    # what others left

    async def _close_open(self, chain: str, left: Sequence[Hold]) -> list[Unfinished]:
        found = []
        nodes, mine = frozenset(hold.node for hold in left), self._open.get(chain, set())
        for _, _, body in await self._store.unfinished(chain, min(hold.open_from for hold in left)):
            values = json.loads(body)
            if values["seq"] in mine or values["node"] not in nodes:
                continue
            entry = Entry(chain, values["actor"], values["kind"], values["name"], decision=values["decision"])
            self._put(Item("end", entry, UNKNOWN, self._clock(), ref=values["seq"]))
            found.append(Unfinished(chain, values["seq"], values["at"], entry.actor, entry.kind, entry.name))
        self._seal.add(chain)
        self._taken[chain] = nodes
        await self.flush()
        return found
