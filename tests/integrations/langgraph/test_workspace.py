from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import TypeAdapter
from tests.support.langgraph_ground import Ground, lines_of, until
from tests.support.slow_way import slow_way

from carrel.client import AsyncClient
from carrel.errors import InvalidRequest, ServerUnreachable
from carrel.integrations.langgraph import Workspace, build_graph
from carrel.integrations.langgraph.workspace import own_id
from carrel.models import OwnId

texts = st.none() | st.text(alphabet=st.characters(exclude_categories=[]))


@given(st.lists(texts, min_size=1))
def test_an_id_is_the_same_every_time_and_one_that_carrel_takes(parts: list[str | None]) -> None:
    assert own_id(*parts) == own_id(*parts) == TypeAdapter(OwnId).validate_python(own_id(*parts))
    assert own_id(*parts) != own_id(*parts, "x")


async def test_a_run_without_thread_or_context_is_refused_in_words() -> None:
    async with AsyncClient("http://127.0.0.1:9", "carrel_x") as client:
        with pytest.raises(InvalidRequest, match="no context"):
            Workspace(client).context(None)
        assert Workspace(client, "one").context("two") == "one" and Workspace(client).context("two") == "two"
        with pytest.raises(InvalidRequest, match="no workspace"):
            await build_graph("shell").ainvoke({"messages": [("user", "true")]}, {"configurable": {"thread_id": "t"}})


async def test_a_sandbox_at_hand_is_not_asked_for_again(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    box = await ground.owner.sandbox(ground.context)
    async with AsyncClient("http://127.0.0.1:9", "carrel_x") as nowhere:
        workspace = Workspace(nowhere)
        with pytest.raises(ServerUnreachable):
            await workspace.sandbox(ground.context)
        workspace.reuse_soon(box)
        assert await workspace.sandbox(ground.context) is box
        with pytest.raises(ServerUnreachable):
            await workspace.sandbox("another")
        monkeypatch.setattr("carrel.integrations.langgraph.workspace.AT_HAND_S", 0.0)
        workspace.reuse_soon(box)
        with pytest.raises(ServerUnreachable):
            await workspace.sandbox(ground.context)


async def test_a_run_that_is_cancelled_for_good_takes_its_command_with_it(ground: Ground) -> None:
    graph, workspace = build_graph("shell", checkpointer=InMemorySaver()), ground.workspace
    here: Any = {"configurable": {"thread_id": ground.context}}
    command = "echo begun > begun; sleep 1000"
    run = asyncio.ensure_future(graph.ainvoke({"messages": [("user", command)]}, here, context=workspace))

    async def begun() -> bool:
        try:
            return bool(await lines_of(ground.owner, ground.context, "begun"))
        except Exception:
            return False

    await until(begun)
    await workspace.kill()
    result = await run
    assert "[killed by SIGKILL]" in result["messages"][-1].text


async def test_a_run_that_only_stops_goes_on_with_the_same_command(ground: Ground) -> None:
    graph = build_graph("shell", checkpointer=InMemorySaver())
    here: Any = {"configurable": {"thread_id": ground.context}}
    command = "echo begun >> begun; while ! test -e go; do sleep 0.02; done; echo over"
    run = asyncio.ensure_future(graph.ainvoke({"messages": [("user", command)]}, here, context=ground.workspace))

    async def begun() -> bool:
        try:
            return bool(await lines_of(ground.owner, ground.context, "begun"))
        except Exception:
            return False

    await until(begun)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    box = ground.owner.attach(await ground.owner.find(ground.context))
    await box.files.write("go", b"")
    result = await graph.ainvoke(None, here, context=ground.workspace)
    assert result["messages"][-1].text == "over"
    assert await lines_of(ground.owner, ground.context, "begun") == ["begun"]


async def test_a_run_that_is_cancelled_while_its_command_is_being_started_takes_it_too(ground: Ground) -> None:
    graph = build_graph("shell", checkpointer=InMemorySaver())
    here: Any = {"configurable": {"thread_id": ground.context}}
    box = await ground.agent.sandbox(ground.context)
    async with slow_way(ground.url, "/commands/start") as way, AsyncClient(way.url, ground.token) as client:
        workspace = Workspace(client)
        run = asyncio.ensure_future(graph.ainvoke({"messages": [("user", "sleep 1000")]}, here, context=workspace))
        await asyncio.wait_for(way.held.wait(), 30)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        way.release.set()
        await asyncio.wait_for(workspace.kill(), 30)
        await asyncio.wait_for(way.answered.wait(), 30)

        async def over() -> bool:
            [command] = await box.commands.list()
            return not command.running

        await until(over)
