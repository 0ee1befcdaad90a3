"""The event log of one server: appends events in groups, numbers them, follows the log for its readers, and removes old
events.

Readers read from the store, in pages. What happens in this process only wakes them up, so a slow reader costs one page
and delays nobody. Readers that keep up share the newest events in memory (`tail`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

from carrel.errors import CarrelError, LimitExceeded, PlatformError
from carrel.events.tail import Tail
from carrel.models.events import EVERYTHING, EventDraft, EventFilter, EventKind, StoredEvent, body_of
from carrel.primitives import tasks
from carrel.primitives.backoff import Backoff

log = logging.getLogger("carrel.events")

PAGE = 100
"""The most events that a reader gets at once: what a reader that stops reading costs."""
TAIL_PAGE = 500
ROUND_S = 0.01
"""The shortest time between two looks at the log: a busy context would else wake its readers for every event."""
POLL_S = 0.05
"""How often a server looks for the events of others while somebody reads."""
NUMBER_EVERY_S = 5.0
"""How often a server looks for events that a server staged which was then killed."""
FLUSH_S = 0.02
MAX_BATCH = 2000
MAX_QUEUED = 50_000
DAY_S = 86_400.0


class EventRecords(Protocol):
    """The methods of a store that the log needs; `store.events.EventStore` has and explains them."""

    staged: asyncio.Event
    shared: bool
    polled: bool

    async def open(self) -> None:
        """Make what the log needs."""

    async def append(self, drafts: Sequence[EventDraft]) -> None:
        """Add events that are not part of another change."""

    async def number(self) -> bool:
        """Give staged events their ids; return whether more may be waiting."""

    async def last(self) -> int:
        """Return the newest id."""

    async def removed(self) -> int:
        """Return the id up to which retention removed."""

    async def page(self, wanted: EventFilter, after: int, limit: int, upto: int | None = None) -> list[StoredEvent]:
        """Return the first events after an id."""

    async def forget(self, context_id: str, forgotten: EventDraft) -> None:
        """Remove the events of a context."""

    async def older_than(self, at: float) -> int:
        """Return the newest id before a time."""

    async def beyond(self, size: int) -> int:
        """Return the id after which the events have a size."""

    async def remove(self, upto: int) -> int:
        """Remove the events up to an id."""


class Page(NamedTuple):
    """What a reader gets at once: events, and the id up to which it has seen everything. If the log lacks what it asked
    for, `missing` is the id after which the log begins, and the page has no events.
    """

    events: Sequence[StoredEvent]
    position: int
    missing: int | None = None


class _Append(NamedTuple):
    """Events that are appended together. `stored` is of a caller that waits."""

    drafts: Sequence[EventDraft]
    stored: asyncio.Future[None] | None = None


class EventLog:
    """Writes and reads events. `open` it before use; `close` it at the end."""

    def __init__(
        self,
        store: EventRecords,
        node: str,
        *,
        keep_days: float,
        keep_bytes: int,
        clock: Callable[[], float] = time.time,
    ):
        self.node = node
        self._store = store
        self._keep_s = keep_days * DAY_S
        self._keep_bytes = keep_bytes
        self._clock = clock
        self._queue: deque[_Append] = deque()
        self._size = 0
        self._queued = asyncio.Event()
        self._hurry = asyncio.Event()
        self._readers = 0
        self._read = asyncio.Event()
        self._tail: Tail | None = None
        self._starting = asyncio.Lock()
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Start to write, and number what other servers left behind."""
        await self._store.open()
        while await self._store.number():
            pass
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._write()), loop.create_task(self._follow_log())]

    async def close(self) -> None:
        """Write what waits, and end every reader."""
        if not self._tasks or self._closing:
            return
        self._closing = True
        self._hurry.set()
        self._queued.set()
        writing, following = self._tasks
        await writing
        if self._tail is not None:
            self._tail.extend((), self._tail.last)  # wakes the readers, which see that this ends
        await tasks.cancel([following])
        with suppress(CarrelError):
            while await self._store.number():
                pass

    # writing

    def draft(
        self, kind: EventKind, context_id: str | None, session_id: str | None, values: Mapping[str, object]
    ) -> EventDraft:
        """Make an event of now. The caller has removed secrets from `values`."""
        return EventDraft(self._clock(), kind.value, context_id, session_id, self.node, body_of(values))

    def add(self, drafts: Sequence[EventDraft]) -> None:
        """Append events soon, and do not wait. `PlatformError` when the log is closed, `LimitExceeded` when too many
        wait already: the database is away or too slow.
        """
        self._put(_Append(drafts))

    def tell(self, drafts: Sequence[EventDraft]) -> None:
        """Append events soon, for a caller that goes on without them: if that is impossible, the log says so."""
        try:
            self.add(drafts)
        except CarrelError as error:
            kinds = ", ".join(sorted({draft.kind for draft in drafts}))
            log.warning("%d events (%s) are lost: %s", len(drafts), kinds, error)

    async def append(self, drafts: Sequence[EventDraft]) -> None:
        """Append events and return when they are stored. Those of several callers share a transaction. When this
        raises, none of them is stored.
        """
        group = _Append(drafts, asyncio.get_running_loop().create_future())
        self._put(group)
        self._hurry.set()
        assert group.stored is not None
        await group.stored

    def _put(self, group: _Append) -> None:
        if not self._tasks or self._closing:
            raise PlatformError("the event log is closed", hint="the server is shutting down; ask again later")
        if self._size + len(group.drafts) > MAX_QUEUED:
            raise LimitExceeded("too many events wait to be written", hint="the database is slow; ask again later")
        self._queue.append(group)
        self._size += len(group.drafts)
        self._queued.set()
        if self._size >= MAX_BATCH:
            self._hurry.set()

    async def forget(self, context_id: str) -> None:
        """Remove every event of a deleted context."""
        self._tail = None if self._tail is None else self._emptied(self._tail)
        forgotten = self.draft(EventKind.CONTEXT_FORGOTTEN, None, None, {"context": context_id})
        await self._store.forget(context_id, forgotten)

    @staticmethod
    def _emptied(tail: Tail) -> Tail:
        fresh = Tail(tail.last)
        tail.extend((), tail.last)  # its readers go on with the new one
        return fresh

    async def _write(self) -> None:
        backoff = Backoff(0.1, 2.0)
        while True:
            await self._queued.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._hurry.wait()
            self._hurry.clear()
            while self._queue:
                batch = self._take()
                try:
                    await self._store.append([draft for group in batch for draft in group.drafts])
                except Exception as error:
                    self._failed(batch, error)
                    if self._closing:
                        self._give_up()
                    await asyncio.sleep(backoff.next_pause())
                else:
                    backoff.reset()
                    for group in batch:
                        if group.stored is not None and not group.stored.done():
                            group.stored.set_result(None)
            if self._closing:
                return
            self._queued.clear()

    def _take(self) -> list[_Append]:
        """Return the next groups for one transaction."""
        batch: list[_Append] = []
        size = 0
        while self._queue and (not batch or size + len(self._queue[0].drafts) <= MAX_BATCH):
            batch.append(group := self._queue.popleft())
            size += len(group.drafts)
        self._size -= size
        return batch

    def _failed(self, batch: list[_Append], error: Exception) -> None:
        """Tell those who wait; the other events are tried again."""
        log.warning("events cannot be written: %s", error)
        again = [group for group in batch if group.stored is None]
        self._queue.extendleft(reversed(again))
        self._size += sum(len(group.drafts) for group in again)
        self._refuse(batch)

    def _give_up(self) -> None:
        """Drop what waits: the server ends, and the database is away."""
        left = [*self._queue]
        self._queue.clear()
        self._size = 0
        self._refuse(left)
        lost = sum(len(group.drafts) for group in left if group.stored is None)
        if lost:
            log.warning("%d events are lost: the server ends, and they cannot be written", lost)

    @staticmethod
    def _refuse(groups: Iterable[_Append]) -> None:
        """Tell those who wait that their events are not stored."""
        for group in groups:
            if group.stored is not None and not group.stored.done():
                problem = PlatformError("the event log cannot be written", hint="ask again later")
                group.stored.set_exception(problem)

    # reading

    @property
    def readers(self) -> int:
        """How many follow the log."""
        return self._readers

    async def last(self) -> int:
        """Return the newest id."""
        return await self._store.last()

    async def settled(self) -> int:
        """Return the newest id when everything that is committed has its id."""
        while await self._store.number():
            pass
        return await self._store.last()

    async def follow(
        self, wanted: EventFilter, after: int | None, *, beat_s: float | None = None, until: int | None = None
    ) -> AsyncGenerator[Page, None]:
        """Yield the events after an id, and go on until the server ends. None stands for the newest id.

        The first page comes at once and says the position, and with `beat_s` an empty page comes when nothing happened
        for that time. With `until` it ends when everything up to that id was read.
        """
        loop = asyncio.get_running_loop()
        with self._reading():
            tail = await self._following()
            position = tail.last if after is None else after
            # A reader that comes from another server may have seen more than this one has in memory. If it has seen
            # more than there is, its id is of another database, or of one that was restored.
            if position > tail.last and position > (last := await self._store.last()):
                yield Page((), last, last)
                position = last
            first, told = True, loop.time()
            while not self._closing:
                tail = self._tail or tail
                grown = tail.grown()
                page = await self._page(tail, wanted, position)
                position = page.position
                due = beat_s is not None and loop.time() - told >= beat_s  # others are busy, and nothing is for it
                if first or due or page.events or page.missing is not None:
                    first, told = False, loop.time()
                    yield page
                if until is not None and position >= until:
                    return
                if position >= tail.last and self._tail is tail:
                    try:
                        async with asyncio.timeout_at(None if beat_s is None else told + beat_s):
                            await grown.wait()
                    except TimeoutError:
                        told = loop.time()
                        yield Page((), position)

    async def _page(self, tail: Tail, wanted: EventFilter, position: int) -> Page:
        if position >= tail.start:
            upto = tail.last
            found = [event for event in tail.after(position) if wanted.matches(event)]
            if len(found) > PAGE:
                return Page(found[:PAGE], found[PAGE - 1].id)
            return Page(found, max(position, upto))
        upto = tail.last  # every event up to here is visible by now
        found = await self._store.page(wanted, position, PAGE, upto)
        removed = await self._store.removed()  # after the page: what was removed before it was read is missing in it
        if removed > position:
            return Page((), removed, removed)
        return Page(found, found[-1].id if len(found) == PAGE else upto)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self._readers += 1
        if self._readers == 1:
            self._read.set()
            self._store.staged.set()  # so that the log is looked at often from now on
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._read.clear()
                self._tail = None

    async def _following(self) -> Tail:
        """Return the tail, which the first reader starts."""
        async with self._starting:
            if self._tail is None:
                self._tail = Tail(await self._store.last())
                self._store.staged.set()  # for what was stored in between, which nobody has looked for
            return self._tail

    async def _follow_log(self) -> None:
        """Number what is staged, and read what is new while somebody reads."""
        backoff, numbered = Backoff(0.1, 2.0), 0.0
        staged, shared, polled = self._store.staged, self._store.shared, self._store.polled
        while True:
            if not shared:
                await self._read.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if not polled else POLL_S if self._readers else NUMBER_EVERY_S):
                    await staged.wait()
            due = staged.is_set() or time.monotonic() - numbered > NUMBER_EVERY_S
            staged.clear()
            try:
                if shared and due:
                    while await self._store.number():
                        pass
                    numbered = time.monotonic()
                await self._read_new()
                backoff.reset()
            except Exception as error:
                log.warning("the event log cannot be read: %s", error)
                staged.set()
                await asyncio.sleep(backoff.next_pause())
            await asyncio.sleep(ROUND_S if self._readers else POLL_S)

    async def _read_new(self) -> None:
        tail = self._tail
        if tail is None:
            return
        last = await self._store.last()
        while tail.last < last and self._tail is tail:
            found = await self._store.page(EVERYTHING, tail.last, TAIL_PAGE, last)
            tail.extend(found, found[-1].id if len(found) == TAIL_PAGE else last)

    # retention

    async def sweep(self, delivered: int | None = None) -> int:
        """Remove events that are too old, or too many; those after `delivered` stay, because a bus lacks them."""
        upto = max(
            await self._store.older_than(self._clock() - self._keep_s), await self._store.beyond(self._keep_bytes)
        )
        if delivered is not None and upto > delivered:
            log.warning("%d old events stay until the bus has them", upto - delivered)
            upto = delivered
        return await self._store.remove(upto)
