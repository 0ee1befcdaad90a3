from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest
from tests.support.langgraph_ground import Ground

from carrel.errors import InvalidRequest, PlatformError
from carrel.integrations.langgraph import build_graph, open_checkpointer, pending


def config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


async def test_a_conversation_goes_on_in_another_process(ground: Ground, database: str) -> None:
    for said, count in (("echo one", 4), ("echo two", 8)):
        async with open_checkpointer(database) as checkpoints, checkpoints.running(ground.context):
            graph = build_graph("shell", checkpointer=checkpoints.saver)
            result = await graph.ainvoke(
                {"messages": [("user", said)]}, config(ground.context), context=ground.workspace
            )
            assert (len(result["messages"]), result["messages"][-1].text) == (count, said[5:])


async def test_what_waits_is_seen_by_another_process(ground: Ground, database: str) -> None:
    async with open_checkpointer(database) as one, open_checkpointer(database) as other:
        graph = build_graph("shell", checkpointer=one.saver)
        await graph.ainvoke({"messages": [("user", "touch x")]}, config(ground.context), context=ground.workspace)
        state = await build_graph("shell", checkpointer=other.saver).aget_state(config(ground.context))
        assert [each.summary for each in pending(state).values()] == ["touch x"]


async def test_several_may_make_the_tables_at_once(database: str) -> None:
    async def opened() -> None:
        async with open_checkpointer(database) as checkpoints:
            assert await checkpoints.saver.aget_tuple(config("none")) is None

    await asyncio.gather(*(opened() for _ in range(4)))


async def test_a_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "c.db"
    async with open_checkpointer(f"sqlite:///{path}") as checkpoints, checkpoints.running("t"):
        await checkpoints.saver.aget_tuple(config("t"))
        modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
    assert modes.pop("c.db") == 0o600 == modes.pop("c.db.locks")
    assert set(modes.values()) <= {0o600}


async def test_an_error_of_the_one_who_uses_it_comes_through(database: str) -> None:
    with pytest.raises(FileNotFoundError):
        async with open_checkpointer(database):
            raise FileNotFoundError("theirs")


@pytest.mark.parametrize("where", ["", "sqlite://", "mysql://x/y"])
async def test_what_is_no_database_is_said(where: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        async with open_checkpointer(where):
            pass
    assert caught.value.field == "database"


async def test_what_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "c.db").write_text("this is no database, and long enough to be seen as none" * 10)
    for where in (tmp_path, tmp_path / "c.db", f"postgresql://x:hush@/x?host={tmp_path}"):
        with pytest.raises(PlatformError) as caught:
            async with open_checkpointer(where):
                pass
        assert caught.value.field == "database" and "hush" not in str(caught.value)
