"""Conversations of agents over several servers: begun on one, approved on a second, finished on a third."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.a2a_ground import POLICY, answer, caller, state
from tests.support.fleet import TOKEN, Fleet
from tests.support.langgraph_ground import graph_of, last_results, lines_of, runs, says, scripted
from tests.support.postgres import Postgres

from carrel.client import AsyncClient
from carrel.integrations.a2a import AgentSettings, RunningAgent, running
from carrel.integrations.a2a.tasks import TERMINAL
from carrel.integrations.langgraph import Workspace, open_checkpointer, pending, resolve_model
from carrel.integrations.langgraph import answer as resumed_with

ALL = ("a", "b", "c")


@dataclass
class Place:
    """Three servers, their clients by token, and a database for checkpoints."""

    fleet: Fleet
    checkpoints: str
    context: str
    owner: dict[str, AsyncClient]
    agent: dict[str, AsyncClient]
    person: dict[str, AsyncClient]
    agent_token: str

    async def runs_of(self, command: str) -> int:
        """How often a command was started, by the audit log of all servers."""
        records = self.owner["b"].audit.search(context_id=self.context, name="start_command", result="ok")
        return sum([command in str(record.arguments) async for record in records])


@pytest.fixture(scope="module")
def fleet(postgres: Postgres, carrel_forks: None) -> Iterator[Fleet]:
    schema = f"agents_{secrets.token_hex(4)}"
    asyncio.run(postgres.execute(f"CREATE SCHEMA {schema}"))
    fleet = Fleet(postgres.url(search_path=schema), CARREL_POOL_SIZE="0", CARREL_LEASE_S="3")
    for name in ALL:
        fleet.start(name)
        fleet.ready(name)
    yield fleet
    fleet.close()


@pytest.fixture
async def place(fleet: Fleet, postgres: Postgres) -> AsyncIterator[Place]:
    schema, context = f"checkpoints_{secrets.token_hex(4)}", f"talk-{secrets.token_hex(4)}"
    await postgres.execute(f"CREATE SCHEMA {schema}")
    async with AsyncExitStack() as stack:

        async def clients(token: str) -> dict[str, AsyncClient]:
            return {name: await stack.enter_async_context(AsyncClient(fleet.url(name), token)) for name in ALL}

        owner = await clients(TOKEN)
        await owner["a"].policy(context).put(settings=POLICY)
        agent = await owner["b"].tokens.create(f"agent-{context}", kind="agent", scopes=["operate"])
        person = await owner["c"].tokens.create(f"person-{context}", kind="person", scopes=["approve"])
        yield Place(
            fleet,
            postgres.url(options=f"-csearch_path={schema}"),
            context,
            owner,
            await clients(agent.token),
            await clients(person.token),
            agent.token,
        )
        await owner["b"].forget(context)
    await postgres.execute(f"DROP SCHEMA {schema} CASCADE")


async def test_a_conversation_begun_on_one_server_approved_on_another_finished_on_a_third(place: Place) -> None:
    """The first server is stopped in between."""
    thread: Any = {"configurable": {"thread_id": place.context}}
    script = (
        runs("echo one >> ran"),
        runs("touch asked"),
        runs("echo two >> ran"),
        lambda messages: says(f"done: {len(last_results(messages, 9))} results"),
    )
    place.fleet.start("first")
    await asyncio.to_thread(place.fleet.ready, "first")
    first = AsyncClient(place.fleet.url("first"), place.agent_token)
    async with scripted(*script) as model, first:
        # Each stage has connections and a checkpointer of its own, as a process of its own would.
        async with open_checkpointer(place.checkpoints) as one, graph_of(model, checkpointer=one.saver) as graph:
            async with one.running(place.context):
                workspace = Workspace(first, place.context)
                begun = await graph.ainvoke({"messages": [("user", "work")]}, thread, context=workspace)
            [waits] = pending(begun).values()
            assert (waits.summary, waits.context_id) == ("touch asked", place.context)
        [asked] = [each async for each in place.person["b"].approvals.list(state="pending", context_id=place.context)]
        assert asked.id == waits.approval
        await place.person["b"].approvals.approve(waits.approval)
        assert (await place.owner["b"].find(place.context)).node == "first"
        await asyncio.to_thread(place.fleet.stop, "first")
        async with (
            open_checkpointer(place.checkpoints) as two,
            graph_of(model, checkpointer=two.saver) as graph,
            two.running(place.context),
        ):
            known = await graph.aget_state(thread)
            workspace = Workspace(place.agent["c"], place.context)
            done = await graph.ainvoke(resumed_with(known, "look"), thread, context=workspace)
        assert done["messages"][-1].text == "done: 3 results"
    assert (await place.owner["b"].find(place.context)).node in ALL
    assert await lines_of(place.owner["b"], place.context, "ran") == ["one", "two"]
    assert [await place.runs_of(text) for text in ("echo one", "touch asked", "echo two")] == [1, 1, 1]


async def test_a_task_is_approved_on_another_server_and_goes_on_at_another_agent(place: Place) -> None:
    """Two A2A agents on one database of tasks, each with a server of its own. The first ends while its task waits."""
    async with scripted(runs("touch asked"), says("done")) as model:
        chat: Any = resolve_model("scripted", base_url=model.url)

        def agent_of(name: str) -> AbstractAsyncContextManager[RunningAgent]:
            url = place.fleet.url(name)
            return running(AgentSettings(carrel_url=url, database=place.checkpoints, port=0, model="scripted"), chat)

        async with agent_of("a") as first, caller(first.url, place.agent_token) as talk:
            task = await talk.send("work", context=place.context)
            assert state(task) == "input_required"
            asked = [each async for each in place.person["c"].approvals.list(state="pending")]
        async with agent_of("b") as second, caller(second.url, place.agent_token) as talk:
            assert state(await talk.get(task.id)) == "input_required"
            await place.person["c"].approvals.approve(asked[0].id)
            done = await talk.pause(task.id, states=TERMINAL)
            assert (state(done), answer(done)) == ("completed", "done")
        await chat.root_async_client.close()
    assert await place.runs_of("touch asked") == 1
