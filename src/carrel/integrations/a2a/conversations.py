"""Conversations. Each context has a thread to which every ended task adds its messages, and with which new tasks begin.

Tasks of a context run at the same time on their own threads; their messages are added here task by task.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from langchain_core.messages import BaseMessage, HumanMessage, RemoveMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from carrel.errors import ThreadBusy
from carrel.integrations.a2a.messages import messages_in
from carrel.integrations.langgraph import Checkpoints
from carrel.integrations.langgraph.graph import Graph
from carrel.primitives.keyed_lock import KeyedLocks

log = logging.getLogger("carrel.a2a")

MOST_MESSAGES = 100
"""The length of a conversation; the oldest tasks are dropped, each as a whole."""
WAIT_S = 30.0


def trimmed(messages: Sequence[BaseMessage], most: int = MOST_MESSAGES) -> list[BaseMessage]:
    """Keep the last messages, beginning with a message of a user."""
    kept = list(messages[-most:])
    while kept and not isinstance(kept[0], HumanMessage):
        kept.pop(0)
    return kept


class Conversations:
    """The conversations of all contexts."""

    def __init__(self, graph: Graph, checkpoints: Checkpoints):
        self._graph = graph
        self._checkpoints = checkpoints
        # Tasks of this process wait for each other here, which is quicker than polling the lock of the thread.
        self._locks = KeyedLocks()

    async def read(self, context: str) -> list[BaseMessage]:
        """Return the messages so far."""
        state = await self._graph.aget_state(_config(context))
        return trimmed(messages_in(state.values))

    async def add(self, context: str, said: Sequence[BaseMessage]) -> None:
        """Add the messages of a task that has ended. Adding a task twice has no effect."""
        if not said:
            return
        try:
            async with self._locks.of(context), self._checkpoints.running(context, wait_s=WAIT_S):
                known = await self.read(context)
                if any(message.id == said[0].id for message in known):
                    return
                messages = [RemoveMessage(id=REMOVE_ALL_MESSAGES), *trimmed([*known, *said])]
                written = await self._graph.aupdate_state(_config(context), {"messages": messages}, as_node="model")
                await self._forget_older(context, str(written["configurable"]["checkpoint_id"]))
        except ThreadBusy:
            log.warning("the messages of a task are not added to the conversation of %s: its lock is held", context)

    async def _forget_older(self, thread: str, newest: str) -> None:
        saver = self._checkpoints.saver
        if isinstance(saver, AsyncSqliteSaver):
            older = "thread_id = ? AND checkpoint_ns = '' AND checkpoint_id < ?"
            async with saver.lock:
                for table in ("writes", "checkpoints"):
                    await saver.conn.execute(f"DELETE FROM {table} WHERE {older}", (thread, newest))  # noqa: S608
                await saver.conn.commit()
        else:
            await saver.aprune([thread])

    async def drop(self, thread: str) -> None:
        """Delete the thread of a task that has ended."""
        await self._checkpoints.saver.adelete_thread(thread)


def _config(context: str) -> RunnableConfig:
    return {"configurable": {"thread_id": context}}
