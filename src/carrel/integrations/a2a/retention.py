"""Deletes tasks that ended long ago with all their data, and conversations that have no task left.

A task that runs or waits is never deleted. Several processes on the same database may do this at the same time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta

from carrel.errors import InvalidRequest, ThreadBusy
from carrel.integrations.a2a.conversations import Conversations
from carrel.integrations.a2a.names import carrel_context, task_thread
from carrel.integrations.a2a.tasks import TaskStore
from carrel.integrations.langgraph import Checkpoints

log = logging.getLogger("carrel.a2a")

KEEP_DAYS = 30.0
MOST_DAYS = 36_500.0
EVERY_S = 3600.0
AT_ONCE = 100


class TaskRetention:
    """Deletes tasks `keep_days` after their end."""

    def __init__(self, kept: TaskStore, conversations: Conversations, checkpoints: Checkpoints, *, keep_days: float):
        if not 0 < keep_days <= MOST_DAYS:
            raise InvalidRequest(
                f"tasks are kept for more than 0 and at most {MOST_DAYS:.0f} days",
                field="keep_days",
                hint="for example 30",
            )
        self._kept = kept
        self._conversations = conversations
        self._checkpoints = checkpoints
        self._keep = timedelta(days=keep_days)

    async def run(self) -> None:
        """Delete old tasks every hour, as long as the agent runs."""
        while True:
            try:
                await self._kept.prune()
                swept = await self.sweep()
                if swept:
                    log.info("deleted %d tasks that ended long ago", swept)
            except Exception as error:  # of either database driver: the next sweep may succeed
                log.warning("old tasks cannot be deleted for now: %s", type(error).__name__)
            await asyncio.sleep(EVERY_S)

    async def sweep(self) -> int:
        """Delete what is old enough; return the number of tasks."""
        swept = 0
        while found := await self._kept.ended(self._keep, AT_ONCE):
            # Delete the rows last: if this is interrupted, the next sweep finds the rest by them.
            for task_id, context_id in found:
                await self._conversations.drop(task_thread(carrel_context(context_id), task_id))
            ids = [task_id for task_id, _ in found]
            for context_id in dict.fromkeys(context_id for _, context_id in found):
                await self._forget_conversation(context_id, ids)
            await self._kept.delete(ids)
            swept += len(found)
        return swept

    async def _forget_conversation(self, context_id: str, ids: Sequence[str]) -> None:
        """Delete the conversation of a context that has no other task than these."""
        thread = carrel_context(context_id)
        try:
            async with self._checkpoints.running(thread):
                if not await self._kept.any_of(context_id, besides=ids):
                    await self._conversations.drop(thread)
        except ThreadBusy:  # a task of it is just ending; the sweep that deletes that task will find it
            return
