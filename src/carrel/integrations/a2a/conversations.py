"""The memory of a context: the thread that each ended task adds its messages to, and each new task begins with.

Tasks run on threads of their own, at once; here they come together, one at a time and each as a whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from weakref import WeakValueDictionary

from langchain_core.messages import BaseMessage, HumanMessage, RemoveMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from carrel.errors import RunsElsewhere
from carrel.integrations.a2a.names import conversation
from carrel.integrations.a2a.shown import messages_in
from carrel.integrations.langgraph import Checkpoints
from carrel.integrations.langgraph.graph import Graph

log = logging.getLogger("carrel.a2a")

MOST_MESSAGES = 100
"""What a conversation remembers; whole tasks are forgotten, the oldest first."""
WAIT_S = 30.0


def trimmed(messages: Sequence[BaseMessage], most: int = MOST_MESSAGES) -> list[BaseMessage]:
    """The last messages, from where somebody asked for something."""
    kept = list(messages[-most:])
    while kept and not isinstance(kept[0], HumanMessage):
        kept.pop(0)
    return kept


class Conversations:
    """The memories of all contexts."""

    def __init__(self, graph: Graph, checkpoints: Checkpoints):
        self._graph = graph
        self._checkpoints = checkpoints
        # Those of this process wait for each other here, which is quicker than looking for a lock again and again.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(self, context: str) -> list[BaseMessage]:
        """What was said so far."""
        state = await self._graph.aget_state(_config(context))
        return trimmed(messages_in(state.values))

    async def add(self, context: str, said: Sequence[BaseMessage]) -> None:
        """Remember the messages of a task that has ended; a task that is added twice is remembered once."""
        if not said:
            return
        thread = conversation(context)
        turn = self._turns.setdefault(thread, asyncio.Lock())
        try:
            async with turn, self._checkpoints.running(thread, wait_s=WAIT_S):
                known = await self.read(context)
                if any(message.id == said[0].id for message in known):
                    return
                messages = [RemoveMessage(id=REMOVE_ALL_MESSAGES), *trimmed([*known, *said])]
                written = await self._graph.aupdate_state(_config(context), {"messages": messages}, as_node="model")
                await self._forget_older(thread, str(written["configurable"]["checkpoint_id"]))
        except RunsElsewhere:
            log.warning("what a task of %s said is not remembered: its thread is being run for too long", context)

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
        """Forget the thread of a task that has ended."""
        await self._checkpoints.saver.adelete_thread(thread)


def _config(context: str) -> RunnableConfig:
    return {"configurable": {"thread_id": conversation(context)}}
