from __future__ import annotations

from typing import Annotated, Any, TypedDict

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from langgraph.runtime import get_runtime
from tests.support.langgraph_ground import Ground, lines_of

from carrel.client import AsyncClient
from carrel.errors import ApprovalNeeded, Conflict, Denied, ServerUnreachable
from carrel.integrations.langgraph import Workspace, answer, build_graph, carrel_tools, pending
from carrel.integrations.langgraph.operation import Attempt, ToolReply, graph_call, refused, run_once


class State(TypedDict):
    messages: Annotated[list[Any], add_messages]


def config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


async def test_things_that_one_node_does_have_ids_of_their_own_and_keep_them(ground: Ground) -> None:
    seen: list[list[str]] = []

    async def node(_state: State) -> State:
        ids: list[str] = []

        async def act(attempt: Attempt, box: Any) -> ToolReply:
            ids.append(attempt.id)
            await box.files.edit("f", "x", "xx", id=attempt.id)
            return ToolReply(text="", artifact={}, error=False)

        workspace = get_runtime(Workspace).context
        for _ in range(2):
            await run_once(graph_call(workspace, None, ground.context, "edit", {}, "edit f", act))
        seen.append(ids)
        if len(seen) == 1:
            raise RuntimeError("died before the node had ended")
        return {"messages": []}

    builder = StateGraph(State, context_schema=Workspace)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=InMemorySaver())
    box = await ground.owner.sandbox(ground.context)
    await box.files.write("f", b"x")
    with pytest.raises(RuntimeError):
        await graph.ainvoke({"messages": []}, config(ground.context), context=ground.workspace)
    # `x` stands in `xx` twice: the second edit was refused, and is not made when the node is run again.
    assert await box.files.read("f") == b"xx" and len(set(seen[0])) == 2
    await graph.ainvoke(None, config(ground.context), context=ground.workspace)
    assert await box.files.read("f") == b"xx" and seen[1] == [], "what was done is not tried again"


async def test_several_calls_in_one_plain_tool_node_run_once_each(ground: Ground) -> None:
    """LangGraph's own node does all calls of a message itself, and all again when it is resumed."""
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"name": "run_command", "args": {"command": command}, "id": f"call_{at}"}
            for at, command in enumerate(["echo a >> ran", "touch b; echo b >> ran", "touch c; echo c >> ran"])
        ],
    }
    builder = StateGraph(State, context_schema=Workspace)
    builder.add_node("tools", ToolNode(carrel_tools()))
    builder.add_edge(START, "tools")
    builder.add_edge("tools", END)
    graph = builder.compile(checkpointer=InMemorySaver())
    here = config(ground.context)
    result = await graph.ainvoke({"messages": [message]}, here, context=ground.workspace)
    for _ in range(6):
        waiting = pending(await graph.aget_state(here))
        if not waiting:
            break
        for each in waiting.values():
            if (await ground.person.approvals.get(each.approval)).state == "pending":
                await ground.person.approvals.approve(each.approval)
        result = await graph.ainvoke(answer(await graph.aget_state(here), "look"), here, context=ground.workspace)
    assert [message.type for message in result["messages"]] == ["ai", "tool", "tool", "tool"]
    assert sorted(await lines_of(ground.owner, ground.context, "ran")) == ["a", "b", "c"]


async def test_a_failure_of_the_platform_is_no_result_and_the_run_goes_on_later(ground: Ground) -> None:
    graph = build_graph("shell", checkpointer=InMemorySaver())
    async with AsyncClient("http://127.0.0.1:9", "carrel_x") as nobody:
        with pytest.raises(ServerUnreachable):
            await graph.ainvoke({"messages": [("user", "echo x")]}, config(ground.context), context=Workspace(nobody))
    result = await graph.ainvoke(None, config(ground.context), context=ground.workspace)
    assert result["messages"][-1].text == "x" and len(result["messages"]) == 4


async def test_an_approval_that_was_used_is_not_used_again_even_if_the_sandbox_forgot(ground: Ground) -> None:
    saver = InMemorySaver()
    here = config(ground.context)
    state = await build_graph("shell", checkpointer=saver).ainvoke(
        {"messages": [("user", "touch x; echo once >> ran")]}, here, context=ground.workspace
    )
    [waits] = pending(state).values()
    await ground.person.approvals.approve(waits.approval)
    box = await ground.agent.sandbox(ground.context)
    # An earlier try did it, and everything that could tell of it is gone.
    command = await box.with_approval(waits.approval).commands.start(
        "touch x; echo once >> ran", output_limit=1, timeout="default"
    )
    await command.wait()
    await (await ground.owner.sandbox(ground.context)).stop()
    result = await build_graph("shell", checkpointer=saver).ainvoke(
        answer(state, "look"), here, context=ground.workspace
    )
    assert "was used already" in result["messages"][-1].text and "not known" in result["messages"][-1].text
    assert await lines_of(ground.owner, ground.context, "ran") == ["once"]


def test_a_refusal_says_why_and_whether_to_try_again() -> None:
    said = refused(Denied("no", hint="use pip", rule="shell(curl:*)", reason="no", retry=False))
    assert said["error"] and said["artifact"]["code"] == "denied_by_policy"
    assert said["text"].splitlines() == [
        "Denied: no (rule shell(curl:*))", "Trying again changes nothing: choose another way.", "Hint: use pip",
    ]  # fmt: skip
    assert "Try again later" in refused(ApprovalNeeded("wait", retry=True, approval="apr-1"))["text"]
    assert "try" not in refused(Conflict("busy"))["text"]
