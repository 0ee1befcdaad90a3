"""The memory of a context: tasks that ended at once are all remembered, each as a whole."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from carrel.integrations.a2a.conversations import MOST_MESSAGES, Conversations, trimmed
from carrel.integrations.langgraph import build_graph, open_checkpointer


def turn(name: str) -> list[BaseMessage]:
    return [HumanMessage(f"ask {name}", id=f"task-{name}"), AIMessage(f"answer {name}", id=f"said-{name}")]


async def test_tasks_that_end_at_once_are_all_remembered(database: str) -> None:
    async with open_checkpointer(database) as checkpoints, open_checkpointer(database) as others:
        one = Conversations(build_graph("shell", checkpointer=checkpoints.saver), checkpoints)
        other = Conversations(build_graph("shell", checkpointer=others.saver), others)
        assert await one.read("c") == []
        await asyncio.gather(*(each.add("c", turn(f"{i}")) for i, each in enumerate([one, other] * 4)))
        await one.add("c", turn("0"))
        await one.add("c", [])
        said = await other.read("c")
        assert len(said) == 16
        pairs = {(said[i].text, said[i + 1].text) for i in range(0, 16, 2)}
        assert pairs == {(f"ask {i}", f"answer {i}") for i in range(8)}
        assert await one.read("another") == []
        kept = [each async for each in checkpoints.saver.alist({"configurable": {"thread_id": "c"}})]
        assert len(kept) == 1
        await one.drop("c")
        assert await one.read("c") == []


@given(st.lists(st.booleans(), max_size=MOST_MESSAGES * 2), st.integers(1, 20))
def test_what_is_kept_begins_with_a_question(kinds: list[bool], most: int) -> None:
    messages: list[BaseMessage] = [HumanMessage("q") if asks else AIMessage("a") for asks in kinds]
    kept = trimmed(messages, most)
    assert len(kept) <= most
    assert not kept or isinstance(kept[0], HumanMessage)
    assert kept == messages[len(messages) - len(kept) :]
