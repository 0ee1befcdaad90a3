"""A ready agent: a model, carrel's tools, and interrupts where policy asks a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware.types import AgentMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool
from langgraph._internal._constants import CONFIG_KEY_DURABILITY
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph.state import CompiledStateGraph

from carrel.integrations.langgraph.models import be_silent, resolve_model
from carrel.integrations.langgraph.tools import carrel_tools
from carrel.integrations.langgraph.workspace import Workspace

SYSTEM_PROMPT = """\
You work in a private Linux workspace through tools. Files stay between commands; paths are relative to the workspace.
What you may do is decided by a policy: a refusal tells you why. Do not try to get around one; choose another way, or
say what you would need. Put what you are asked to deliver into the directory `output`.
"""

Graph = CompiledStateGraph[Any, Any, Any, Any]


def build_graph(
    model: BaseChatModel | str = "shell",
    *,
    checkpointer: BaseCheckpointSaver[Any] | None = None,
    workspace: Workspace | None = None,
    tools: Sequence[BaseTool] = (),
    system_prompt: str | None = None,
    middleware: Sequence[AgentMiddleware[Any, Any]] = (),
) -> Graph:
    """Build a graph that calls the model and its tools in turn until the model is done.

        graph = build_graph("openai:gpt-5.5", checkpointer=checkpoints.saver)
        config = {"configurable": {"thread_id": "conversation-42"}}
        await graph.ainvoke({"messages": [("user", "Plot data.csv")]}, config, context=Workspace(client))

    Every tool call is a task of its own, so calls run in parallel and one that waits for a person blocks no other.
    A step is in the checkpoint before the next begins, so a run can continue in another process.
    Run it with `context=Workspace(client)`, or give a `workspace` for all runs.
    """
    be_silent()
    chosen = resolve_model(model) if isinstance(model, str) else model
    graph = create_agent(
        chosen,
        [*carrel_tools(workspace), *tools],
        system_prompt=SYSTEM_PROMPT if system_prompt is None else system_prompt,
        middleware=middleware,
        context_schema=Workspace,
        checkpointer=checkpointer,
        name="carrel",
    )
    if checkpointer is None:
        return graph
    # The default durability could lose the step that asked for a command when the process is killed.
    return graph.with_config(configurable={CONFIG_KEY_DURABILITY: "sync"})
