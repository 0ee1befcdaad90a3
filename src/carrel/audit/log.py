"""The audit log of one server: a record of every operation before it is dispatched, and another when it has ended.

Operations that begin at the same moment share one transaction, and end records go with the next one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from carrel.audit.export import ExportStore, Stored, export
from carrel.audit.keys import Headlike, SignedHead, SigningKey
from carrel.audit.plan import Batch, ChainEnd, EventOf, Hold, Item, Tip, TransactionPlan
from carrel.audit.records import AuditEntry, Ending, arguments_hash, row, server_chain
from carrel.audit.search import Filter, SearchStore, search
from carrel.errors import CarrelError, Conflict, DatabaseUnavailable, InvalidRequest, PlatformError
from carrel.models import AuditPage
from carrel.primitives.cache import Cache

log = logging.getLogger("carrel.audit")

HEAD_RECORDS = 1000
HEAD_S = 300.0
FLUSH_S = 0.05
"""How long an end record may wait for others to share a transaction with."""
MAX_BATCH = 2000
FEW = 32
"""The most records and heads that are computed on the event loop: more would delay others."""
MAX_QUEUED = 50_000
MAX_CHAIN = 200
_MAX_CHAINS = 10_000
_RETRY_S = 1.0
_ATTEMPTS = 10
UNKNOWN = Ending("unknown", reason="the server ended")


class LogStore(ExportStore, SearchStore, Protocol):
    """The methods of a store that the log needs; `store.audit.AuditStore` has and explains them."""

    async def tips(self, chains: Collection[str]) -> Mapping[str, Tip]:
        """Return the ends of chains."""

    async def append(self, batch: Batch) -> None:
        """Write a batch."""

    async def has(self, batch: Batch) -> bool:
        """Whether a batch was written whose answer was lost."""

    async def unclean(self, *nodes: str) -> Sequence[tuple[str, str, int, bool]]:
        """Return the holds of servers that are not clean."""

    async def holds(self, chain: str) -> Sequence[tuple[str, str, int, bool]]:
        """Return the holds of a chain."""

    async def unfinished(self, chain: str, start: int) -> Sequence[Stored]:
        """Return begin records without an end record."""

    async def aged(self, at: float, *, after: str = "", limit: int = 1000) -> Sequence[str]:
        """Return chains that can be pruned."""

    async def head_before(self, chain: str, at: float) -> Headlike | None:
        """Return the newest head of that time."""

    async def prune(self, chain: str, seq: int, *, whole: bool) -> int:
        """Remove records up to a head."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An operation without an end record, because the server was killed in between."""

    chain: str
    seq: int
    at: float
    actor: str
    kind: str
    name: str


class Ticket:
    """An operation that may be dispatched: its begin record is written. Call `end` when it is over, however it went."""

    __slots__ = ("_ended", "_log", "began", "entry", "seq")

    def __init__(self, log: AuditLog, entry: AuditEntry):
        self._log = log
        self._ended = False
        self.entry = entry
        self.began = time.monotonic()
        self.seq = 0

    def end(self, ending: Ending | None = None) -> None:
        """Record the end of the operation. Never waits; only the first call counts."""
        if self._ended:
            return
        self._ended = True
        ending = ending or Ending(duration_ms=(time.monotonic() - self.began) * 1000)
        self._log._ended(self, ending)


class AuditLog:
    """Writes, searches, exports and prunes records. `open` it before all else, `close` it after all else.

    With `strict`, `begin` returns when the record is in the database, so no operation runs without a record. Else it
    returns at once, and a killed server may have dispatched operations of the last `flush_s` seconds without a record.
    The event of an operation is written in the transaction of its record, and so costs no wait of its own.
    """

    def __init__(
        self,
        store: LogStore,
        key: SigningKey,
        node: str,
        event_of: EventOf,
        *,
        strict: bool = True,
        head_records: int = HEAD_RECORDS,
        head_s: float = HEAD_S,
        flush_s: float = FLUSH_S,
        clock: Callable[[], float] = time.time,
    ):
        self.key = key
        self.node = node
        self._event_of = event_of
        self._store = store
        self._strict = strict
        self._head_records = head_records
        self._head_s = head_s
        self._flush_s = flush_s
        self._clock = clock
        self._queue: deque[Item] = deque()
        self._chains: Cache[str, ChainEnd] = Cache(_MAX_CHAINS)
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
        self._doubtful: tuple[Batch, TransactionPlan, list[Item]] | None = None
        """What may be in the database or not: the answer was lost."""
        self._timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, former: Sequence[str] = ()) -> list[Unfinished]:
        """Start writing. Ends operations that this server left open when it was killed as unknown, and returns them.
        `former` are more names under which processes of it wrote that are dead.
        """
        self._task = asyncio.get_running_loop().create_task(self._run())
        try:
            left = [Hold(*hold) for hold in await self._store.unclean(self.node, *former)]
            return [one for hold in left for one in await self._close_open(hold.chain, [hold])]
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Write all waiting records and sign every chain. Operations without an end stay open until the next `open`."""
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
        """Return the hash of the full arguments, keyed with this server's key."""
        return arguments_hash(arguments, self.key.arguments)

    async def begin(self, entry: AuditEntry) -> Ticket:
        """Record that an operation is about to be dispatched. It must not be if this raises `PlatformError`."""
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

    def record(self, entry: AuditEntry, ending: Ending) -> None:
        """Record something that is already over: a refusal, or an action of the server. `flush` waits for it.

        `PlatformError` when too many records wait.
        """
        self._put(Item("whole", entry, ending, self._clock()))

    async def flush(self) -> None:
        """Wait until all records so far are written; `PlatformError` when they cannot be."""
        written = asyncio.get_running_loop().create_future()
        self._put(Item("whole", AuditEntry("", "", "", ""), None, 0.0, written=written), urgent=True)
        await written

    async def adopt(self, chain: str) -> list[Unfinished]:
        """Take over a chain with its session. Ends operations that another server left open there as unknown, and
        returns them.
        """
        await self.flush()
        self._chains.pop(chain)
        left = [hold for each in await self._store.holds(chain) if not (hold := Hold(*each)).clean]
        return await self._close_open(chain, left) if left else []

    async def seal(self, chains: Iterable[str] | None = None) -> None:
        """Sign heads now, for all chains (or those among `chains`) that this server wrote to since their last head."""
        self._seal.update(self._dirty if chains is None else self._dirty.keys() & set(chains))
        await self.flush()

    async def search(self, wanted: Filter, *, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """Return a page of operations, newest first."""
        return await search(self._store, wanted, limit=limit, cursor=cursor)

    async def export(self, chains: Sequence[str] | None = None, *, compress: bool = False) -> AsyncIterator[bytes]:
        """Yield a file for `verify` with the records and heads of these chains, or of all."""
        async for piece in export(
            self._store, self.key, self.node, self._clock, self.seal, self._reading, chains=chains, compress=compress
        ):
            yield piece

    async def prune(self, before: float, by: str | None = None) -> int:
        """Remove the records covered by a head that was signed before that time, and return how many.

        The head stays, so that later records can still be verified. The chain of the server gets a record of the
        pruning, by `by` or the server itself. An operation without an end keeps its record and all later ones, and a
        chain that is being exported is skipped. Chains of sandboxes without a context are removed entirely.
        """
        await self.seal()
        removed, after = 0, ""
        while names := await self._store.aged(before, after=after):
            for name in names:
                signed = await self._store.head_before(name, before)
                holds = [Hold(*each) for each in await self._store.holds(name)]
                if signed is None or not holds:
                    continue
                head = SignedHead(*signed)
                if head.seq >= min(map(self._first_open, holds)):
                    continue
                mine = all(hold.clean and hold.node == self.node for hold in holds)
                whole = mine and name.startswith("sandbox:")
                async with self._writing:  # or a record could be added to a removed chain
                    if self._read[name]:
                        continue
                    count = await self._store.prune(name, head.seq, whole=whole)
                    if whole:
                        self._chains.pop(name)
                removed += count
                arguments = {"chain": name, "seq": head.seq, "hash": head.hash, "records": count}
                entry = AuditEntry(
                    server_chain(self.node), by or self.node, "session", "prune_audit", arguments=arguments
                )
                self.record(entry, Ending())
            after = names[-1]
            await self.flush()
        return removed

    @asynccontextmanager
    async def _reading(self, chain: str) -> AsyncIterator[None]:
        """Keep this server from pruning a chain."""
        async with self._writing:  # wait for a running prune
            self._read[chain] += 1
        try:
            yield
        finally:
            self._read[chain] -= 1
            self._read += Counter()  # drops the zeros

    def _first_open(self, hold: Hold) -> float:
        """Return the position before which every operation of a server in a chain has ended."""
        if hold.clean:
            return math.inf
        if hold.node == self.node:
            return min(self._open.get(hold.chain, ()), default=math.inf)
        return hold.open_from

    # waiting records

    def _put(self, item: Item, *, urgent: bool = False) -> None:
        if self._task is None or self._closing:
            raise PlatformError("the audit log is closed", hint="the server is shutting down; ask again later")
        chain = item.entry.chain
        if len(chain) > MAX_CHAIN or not chain.isascii() or not chain.isprintable():
            raise InvalidRequest("this is not a valid name of a chain", field="chain", hint="use `chain_of`")
        if item.type != "end" and chain:
            if len(self._queue) >= MAX_QUEUED:
                raise self._cannot("too many records wait", self._broken)
            if self._broken is not None and item.written is None:
                raise self._cannot(self._broken.detail, self._broken)
        self._queue.append(item)
        if urgent or len(self._queue) >= MAX_BATCH:
            self._hurry()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._flush_s, self._hurry)

    def _ended(self, ticket: Ticket, ending: Ending) -> None:
        try:
            self._put(Item("end", ticket.entry, ending, self._clock(), ticket))
        except PlatformError:
            log.warning("an operation in %s ended after the audit log was closed", ticket.entry.chain)

    def _hurry(self) -> None:
        self._urgent = True
        self._wake.set()

    @staticmethod
    def _cannot(why: str, cause: CarrelError | None = None) -> PlatformError:
        words = f"the audit log cannot be written, so no operation may run: {why}"
        hint = "repair the database; operations then continue by themselves"
        if isinstance(cause, DatabaseUnavailable):
            return DatabaseUnavailable(words, hint=hint, retry=True, retry_after=1)
        return PlatformError(words, hint=hint)

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
        await self._settle_doubt()
        items = [item for item in batch if item.entry.chain and not item.stored]
        touched = {item.entry.chain for item in items} | seal
        if not touched:
            return
        for _ in range(_ATTEMPTS):
            known = {name: replace(chain) for name in touched if (chain := self._chains.get(name)) is not None}
            plan = TransactionPlan(
                self.key,
                self.node,
                known,
                self._open,
                items,
                seal,
                self._taken,
                self._head_records,
                self._clock(),
                self._event_of,
            )
            unknown = touched - known.keys()
            tips = await self._store.tips(unknown) if unknown else {}
            few = len(items) + len(seal) <= FEW
            made = plan.build(tips) if few else await asyncio.to_thread(plan.build, tips)
            try:
                await self._store.append(made)
            except Conflict:
                for name in touched:
                    self._chains.pop(name)
                continue
            except CarrelError:
                self._doubtful = made, plan, items
                raise
            self._apply(plan, items)
            return
        raise PlatformError("other servers keep writing to the same chains")

    async def _settle_doubt(self) -> None:
        """Find out whether what was written last is in the database, if its answer was lost."""
        if self._doubtful is None:
            return
        made, plan, items = self._doubtful
        if await self._store.has(made):
            self._apply(plan, items)
            for item in items:
                item.stored = True
                if item.type == "begin" and item.written is not None and item.ticket is not None:
                    item.ticket.end(Ending("cancelled"))  # its caller was told that it must not be dispatched
        self._doubtful = None

    def _apply(self, plan: TransactionPlan, items: list[Item]) -> None:
        for name, chain in plan.chains.items():
            self._chains.put(name, chain)
            self._taken.pop(name, None)
            if still := plan.still(name):
                self._open[name] = still
            else:
                self._open.pop(name, None)
            if chain.seq == chain.head_seq:
                self._dirty.pop(name, None)
            else:
                self._dirty.setdefault(name, self._clock())
        for item in items:
            if item.type == "begin" and item.ticket is not None:
                item.ticket.seq = plan.seqs[id(item.ticket)]
        self._remind()

    def _remind(self) -> None:
        """Set the timer for the next heads."""
        if self._head_timer is None and self._dirty:
            first = next(iter(self._dirty.values()))
            wait = min(max(first + self._head_s - self._clock(), 0.0), self._head_s)
            self._head_timer = asyncio.get_running_loop().call_later(wait, self._heads_due)

    def _heads_due(self) -> None:
        self._head_timer = None
        now = self._clock()
        # A clock that was set back must not delay a head.
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
            elif item.ticket is not None:  # the caller was cancelled while it was written
                item.ticket.end(Ending("cancelled"))

    def _failed(self, batch: list[Item], seal: set[str], error: Exception) -> None:
        self._seal |= seal
        if not isinstance(error, CarrelError):
            log.error("the audit log failed", exc_info=error)
            sound = [item for item in batch if self._sound(item)]
            if len(sound) < len(batch):  # an item that cannot be encoded must not block the others
                self._queue.extendleft(reversed(sound))
                self._hurry()
                return
        self._broken = error if isinstance(error, CarrelError) else PlatformError(type(error).__name__)
        kept: list[Item] = []
        for item in batch:
            if item.written is None:
                kept.append(item)
            elif not item.written.done():
                item.written.set_exception(self._cannot(self._broken.detail, self._broken))
        self._queue.extendleft(reversed(kept))
        if self._timer is None and not self._closing:
            self._timer = asyncio.get_running_loop().call_later(_RETRY_S, self._hurry)

    def _sound(self, item: Item) -> bool:
        """Return whether an item can be encoded as a record; if not, its waiting caller gets an error."""
        try:
            row(item.type, item.entry, item.ending, seq=1, at=item.at, node=self.node, before=b"")
        except Exception as error:
            if item.written is not None and not item.written.done():
                item.written.set_exception(self._cannot(f"{type(error).__name__} while encoding the record"))
            return False
        return True

    # operations of killed servers

    async def _close_open(self, chain: str, left: Sequence[Hold]) -> list[Unfinished]:
        found = []
        nodes, mine = frozenset(hold.node for hold in left), self._open.get(chain, set())
        for _, _, body in await self._store.unfinished(chain, min(hold.open_from for hold in left)):
            values = json.loads(body)
            if values["seq"] in mine or values["node"] not in nodes:
                continue
            entry = AuditEntry(
                chain,
                values["actor"],
                values["kind"],
                values["name"],
                decision=values["decision"],
                arguments=values.get("arguments", {}),
            )
            self._put(Item("end", entry, UNKNOWN, self._clock(), ref=values["seq"]))
            found.append(Unfinished(chain, values["seq"], values["at"], entry.actor, entry.kind, entry.name))
        self._seal.add(chain)
        self._taken[chain] = nodes
        await self.flush()
        return found
