"""Waits until approvals are decided, with one stream of approvals for each caller, however many of their tasks wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from carrel.client import AsyncClient
from carrel.errors import CarrelError, PlatformError
from carrel.integrations.a2a.background import Background
from carrel.integrations.a2a.callers import A2aCaller, Callers
from carrel.models import ApprovalState
from carrel.primitives.backoff import Backoff

log = logging.getLogger("carrel.a2a")

LONGEST_PAUSE_S = 30.0
LOOK_S = 2.0


class _InboxWatch:
    """The approvals that are awaited with one caller's token."""

    def __init__(self) -> None:
        self.waiting: dict[str, set[asyncio.Event]] = {}
        self.shown: set[str] = set()
        """Approvals that the stream has shown as pending; it will report their change."""
        self.lost = False
        self.task: asyncio.Task[None] | None = None

    def tell(self, approval: str) -> None:
        for event in self.waiting.get(approval, ()):
            event.set()

    def tell_all(self) -> None:
        for approval in self.waiting:
            self.tell(approval)


class Inbox:
    """Waits for approvals. It decides none."""

    def __init__(self, callers: Callers, background: Background, *, pause_s: float = 0.5):
        self._callers = callers
        self._background = background
        self._pause_s = pause_s
        self._watches: dict[str, _InboxWatch] = {}

    async def decided(self, caller: A2aCaller, approvals: Iterable[str]) -> None:
        """Wait until one of the approvals is no longer pending, or cannot be read any more."""
        watch = self._watches.get(caller.token)
        if watch is None or watch.lost:
            watch = self._watches[caller.token] = _InboxWatch()
        event, names = asyncio.Event(), list(approvals)
        for name in names:
            watch.waiting.setdefault(name, set()).add(event)
        if watch.task is None:
            watch.task = self._background.start(self._follow(caller, watch), f"inbox of {caller!r}")
        try:
            async with self._callers.client(caller) as client:
                if await self._any_decided(client, names):  # it may have happened before the stream began
                    return
            await event.wait()
        finally:
            for name in names:
                watch.waiting[name].discard(event)
                if not watch.waiting[name]:
                    del watch.waiting[name]
            if not watch.waiting:
                if self._watches.get(caller.token) is watch:
                    del self._watches[caller.token]
                if watch.task is not None:
                    watch.task.cancel()

    async def _any_decided(self, client: AsyncClient, names: Iterable[str]) -> bool:
        for name in names:
            try:
                if (await client.approvals.get(name)).state is not ApprovalState.PENDING:
                    return True
            except PlatformError:
                return False
            except CarrelError:  # it is gone or not readable: the task has to check it
                return True
        return False

    async def _follow(self, caller: A2aCaller, watch: _InboxWatch) -> None:
        backoff = Backoff(self._pause_s, LONGEST_PAUSE_S)
        while True:
            try:
                async with self._callers.client(caller) as client, asyncio.TaskGroup() as group:
                    looking = group.create_task(self._look(client, watch))
                    await self._read(client, watch)
                    looking.cancel()
                backoff.reset()
            except* PlatformError as errors:
                log.info("approvals cannot be watched for now: %s", errors.exceptions[0])
            except* CarrelError as errors:
                log.info("approvals cannot be watched by %r: %s", caller, errors.exceptions[0])
                watch.lost = True
            if watch.lost:
                watch.tell_all()
                return
            await asyncio.sleep(backoff.next_pause())

    async def _read(self, client: AsyncClient, watch: _InboxWatch) -> None:
        watch.shown.clear()
        async for info in client.approvals.watch():
            if info.state is ApprovalState.PENDING:
                watch.shown.add(info.id)
            else:
                watch.shown.discard(info.id)
                watch.tell(info.id)

    async def _look(self, client: AsyncClient, watch: _InboxWatch) -> None:
        """Check the approvals that the stream has not shown: they may have been decided before it began."""
        while True:
            for name in [name for name in watch.waiting if name not in watch.shown]:
                if await self._any_decided(client, [name]):
                    watch.tell(name)
            await asyncio.sleep(LOOK_S)
