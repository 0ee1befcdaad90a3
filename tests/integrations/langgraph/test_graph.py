from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import langsmith.utils
import pytest
from langchain_core.messages import ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from tests.support.langgraph_ground import (
    Ground,
    Nursery,
    Served,
    calls,
    graph_of,
    last_results,
    lines_of,
    runs,
    says,
    scripted,
    until,
)

from carrel.client import AsyncClient
from carrel.errors import CarrelError, PlatformError
from carrel.integrations.langgraph import Workspace, answer, build_graph, open_checkpointer, pending


def config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


def said(text: str) -> dict[str, Any]:
    return {"messages": [("user", text)]}


async def test_shell_needs_no_model(ground: Ground) -> None:
    graph = build_graph("shell")
    result = await graph.ainvoke(said("echo $((6*7))"), config(ground.context), context=ground.workspace)
    assert result["messages"][-1].text == "42"


async def test_a_fixed_workspace_serves_runs_that_name_none(ground: Ground) -> None:
    graph = build_graph("shell", workspace=Workspace(ground.agent, ground.context))
    result = await graph.ainvoke(said("echo here"), config("another-thread"))
    assert result["messages"][-1].text == "here"


async def test_many_steps_an_approval_and_a_denial(ground: Ground) -> None:
    def another_way(messages: list[dict[str, Any]]) -> dict[str, Any]:
        [told] = last_results(messages)
        assert "not on my watch" in told and "Trying again changes nothing" in told
        return runs("echo another way > way")

    async with (
        scripted(
            runs("echo one >> ran"),
            runs("touch asked"),
            runs("rm asked"),
            another_way,
            calls(("curl", {})),
            lambda messages: says(f"done: {last_results(messages)[0][:20]}"),
        ) as model,
        graph_of(model, checkpointer=InMemorySaver()) as graph,
    ):
        here, workspace = config(ground.context), ground.workspace
        result = await graph.ainvoke(said("work"), here, context=workspace)
        [waits] = pending(result).values()
        assert (waits.tool, waits.summary, waits.operation) == ("run_command", "touch asked", "shell")
        assert "touch" in waits.reason and waits.context_id == ground.context
        await ground.person.approvals.approve(waits.approval)
        result = await graph.ainvoke(answer(result, "look"), here, context=workspace)
        [waits] = pending(result).values()
        assert waits.summary == "rm asked"
        await ground.person.approvals.deny(waits.approval, message="not on my watch")
        result = await graph.ainvoke(answer(result, "look"), here, context=workspace)
        assert result["messages"][-1].text.startswith("done: Error: curl is not")
    assert await lines_of(ground.owner, ground.context, "ran") == ["one"]
    assert await lines_of(ground.owner, ground.context, "way") == ["another way"]
    assert [await ground.ran(text) for text in ("echo one", "touch asked", "rm asked", "echo another")] == [1, 1, 0, 1]


async def test_calls_side_by_side_each_once_while_one_waits(ground: Ground) -> None:
    async with (
        scripted(
            runs("echo a >> ran", "touch b", "echo c >> ran", "touch d"),
            lambda messages: says(str(last_results(messages, 4))),
        ) as model,
        graph_of(model, checkpointer=InMemorySaver()) as graph,
    ):
        here, workspace = config(ground.context), ground.workspace
        result = await graph.ainvoke(said("work"), here, context=workspace)
        waiting = {each.summary: each.approval for each in pending(result).values()}
        assert set(waiting) == {"touch b", "touch d"}
        assert sorted(await lines_of(ground.owner, ground.context, "ran")) == ["a", "c"]
        await ground.person.approvals.approve(waiting["touch d"])
        result = await graph.ainvoke(answer(result, "look"), here, context=workspace)
        assert [each.summary for each in pending(result).values()] == ["touch b"]
        await ground.person.approvals.deny(waiting["touch b"])
        result = await graph.ainvoke(answer(result, "look"), here, context=workspace)
        told = result["messages"][-1].text
        assert told.count("(no output)") == 3 and "a person denied it" in told
        messages = [message for message in result["messages"] if isinstance(message, ToolMessage)]
        assert [message.status for message in messages].count("error") == 1
    assert sorted(await lines_of(ground.owner, ground.context, "ran")) == ["a", "c"]
    assert [await ground.ran(text) for text in ("echo a", "touch b", "echo c", "touch d")] == [1, 0, 1, 1]


async def test_an_agent_cannot_approve_itself_and_an_approver_can_for_it(ground: Ground) -> None:
    graph = build_graph("shell", checkpointer=InMemorySaver())
    here = config(ground.context)
    result = await graph.ainvoke(said("touch x"), here, context=ground.workspace)
    result = await graph.ainvoke(answer(result, "approve"), here, context=ground.workspace)
    assert [each.summary for each in pending(result).values()] == ["touch x"], "the answer alone decides nothing"
    itself = Workspace(ground.agent, approver=ground.agent)
    result = await graph.ainvoke(answer(result, "approve"), here, context=itself)
    [waits] = pending(result).values()
    assert waits.problem is not None, "the inbox refused it"
    trusted = Workspace(ground.agent, approver=ground.person)
    result = await graph.ainvoke(answer(result, "approve", message="go"), here, context=trusted)
    assert not pending(result) and await ground.ran("touch x") == 1
    assert (await ground.person.approvals.get(waits.approval)).message == "go"


async def test_two_resumes_at_once_run_it_once(ground: Ground) -> None:
    saver = InMemorySaver()
    here = config(ground.context)
    command = "echo once >> ran; touch x; sleep 0.3; echo ended"
    first = await build_graph("shell", checkpointer=saver).ainvoke(said(command), here, context=ground.workspace)
    [waits] = pending(first).values()
    await ground.person.approvals.approve(waits.approval)
    graphs = [build_graph("shell", checkpointer=saver) for _ in range(4)]
    results = await asyncio.gather(
        *(graph.ainvoke(answer(first, "look"), here, context=ground.workspace) for graph in graphs)
    )
    assert [result["messages"][-1].text for result in results] == ["ended"] * 4
    assert await lines_of(ground.owner, ground.context, "ran") == ["once"]
    assert await ground.ran("echo once") == 1


async def test_killed_in_the_middle_and_resumed_by_other_processes(
    ground: Ground, nursery: Nursery, database: str
) -> None:
    slow = "echo {0} >> ran; while ! test -e go-{0}; do sleep 0.02; done; echo {0} ended"
    asked = "touch asked; " + slow.format("two")

    def ended(messages: list[dict[str, Any]]) -> dict[str, Any]:
        return says(" / ".join(last_results(messages, 2)))

    async def begun(name: str) -> bool:
        try:
            return name in await lines_of(ground.owner, ground.context, "ran")
        except Exception:
            return False

    async def go(name: str) -> None:
        box = ground.owner.attach(await ground.owner.find(ground.context))
        await box.files.write(f"go-{name}", b"")

    async with scripted(runs(slow.format("one")), runs(asked), ended) as model:
        job = {
            "url": ground.url, "token": ground.token, "model": model.url,
            "database": database, "thread": ground.context, "text": "work",
        }  # fmt: skip
        pid = nursery.begin(**job)
        await until(lambda: begun("one"))
        os.kill(pid, signal.SIGKILL)
        assert (await asyncio.to_thread(nursery.end))["status"] == -signal.SIGKILL
        await go("one")
        second = await nursery.run(**job)
        assert second["status"] == 0 and len(second["waiting"]) == 1
        await ground.person.approvals.approve(second["waiting"][0]["approval"])
        pid = nursery.begin(**job)
        await until(lambda: begun("two"))
        os.kill(pid, signal.SIGKILL)
        assert (await asyncio.to_thread(nursery.end))["status"] == -signal.SIGKILL
        await go("two")
        last = await nursery.run(**job)
        assert (last["status"], last.get("text")) == (0, "one ended / two ended"), last
    assert await lines_of(ground.owner, ground.context, "ran") == ["one", "two"]
    assert [await ground.ran("echo one"), await ground.ran("echo two")] == [1, 1]


async def test_killed_at_any_point_everything_happens_once(ground: Ground, nursery: Nursery, tmp_path: Path) -> None:
    script = (runs("echo 1 >> ran", "echo 2 >> ran"), runs("touch a; echo 3 >> ran"), says("done"))
    async with scripted(*script) as model:
        kinds: set[str] = set()

        async def through(thread: str, die_at: list[int]) -> int:
            """Run a thread to its end with a kill at each of these points; how many points an agent passed at most."""
            await ground.owner.policy(thread).put(settings=(await ground.owner.policy(ground.context).get()).settings)
            token = (await ground.owner.tokens.create(thread, kind="agent", scopes=["operate"])).token
            job = {
                "url": ground.url, "token": token, "model": model.url,
                "database": str(tmp_path / "c.db"), "thread": thread, "text": "work",
            }  # fmt: skip
            points = 0
            for _ in range(40):
                ended = await nursery.run(**job, die_at=die_at.pop(0) if die_at else None)
                points = max(points, ended.get("points", 0))
                kinds.update(ended.get("kinds", ()))
                for waits in ended.get("waiting", ()):
                    info = await ground.person.approvals.get(waits["approval"])
                    if info.state == "pending":
                        await ground.person.approvals.approve(info.id)
                if "text" in ended:
                    break
            assert ended.get("text") == "done", ended
            assert sorted(await lines_of(ground.owner, thread, "ran")) == ["1", "2", "3"], thread
            await ground.owner.attach(await ground.owner.find(thread)).terminate(delete_files=True)
            return points

        points = await through(f"{ground.context}-whole", [])
        assert points > 20 and kinds == {"send", "aput", "aput_writes"}
        for at in range(3, points, 8):
            await through(f"{ground.context}-{at}", [at, at // 2 + 1])


async def test_the_server_is_killed_and_comes_back(tmp_path: Path) -> None:
    first = Served(tmp_path / "data")
    here, graph = config("kept"), build_graph("shell", checkpointer=InMemorySaver())
    command = "echo x >> ran; while ! test -e go; do sleep 0.02; done; cat ran"

    async def begun() -> bool:
        try:
            async with AsyncClient(first.url, first.token) as client:
                return bool(await lines_of(client, "kept", "ran"))
        except CarrelError:
            return False

    async with AsyncClient(first.url, first.token) as client:
        run = asyncio.ensure_future(graph.ainvoke(said(command), here, context=Workspace(client)))
        await until(begun)
        first.kill()
        with pytest.raises(PlatformError):
            await run
    second = Served(tmp_path / "data", int(first.url.rpartition(":")[2]))
    try:
        async with AsyncClient(second.url, second.token) as client:
            box = await client.sandbox("kept")
            await box.files.write("go", b"")
            result = await graph.ainvoke(None, here, context=Workspace(client))
            assert result["messages"][-1].text == "x"
            await box.terminate(delete_files=True)
    finally:
        second.close()


async def test_nothing_is_traced_whatever_the_environment_says(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:
        outside.setblocking(False)
        monkeypatch.setenv("LANGSMITH_TRACING", "true")
        monkeypatch.setenv("LANGSMITH_API_KEY", "lsv2_x")
        monkeypatch.setenv("LANGSMITH_ENDPOINT", f"http://127.0.0.1:{outside.getsockname()[1]}")
        langsmith.utils.get_env_var.cache_clear()
        try:
            graph = build_graph("shell")
            assert not langsmith.utils.tracing_is_enabled()
            await graph.ainvoke(said("echo x"), config(ground.context), context=ground.workspace)
            with pytest.raises(BlockingIOError):
                outside.accept()
        finally:
            langsmith.utils.get_env_var.cache_clear()


async def test_a_step_is_kept_before_the_next_begins(ground: Ground, tmp_path: Path) -> None:
    """With LangGraph's own default the step that asks for a command might be lost, and the command run twice."""
    async with open_checkpointer(tmp_path / "c.db") as checkpoints:
        graph = build_graph("shell", checkpointer=checkpoints.saver)
        put, order = checkpoints.saver.aput, []

        async def slow(*args: Any) -> Any:
            await asyncio.sleep(0.05)
            result = await put(*args)
            order.append("kept")
            return result

        checkpoints.saver.aput = slow  # type: ignore[method-assign]
        async for chunk in graph.astream(
            said("echo x"), config(ground.context), context=ground.workspace, stream_mode="updates"
        ):
            order.extend(chunk)
    # The input is kept, then each step before the next has anything to say.
    assert order.index("operation") > [at for at, what in enumerate(order) if what == "kept"][1]
