"""A LangGraph agent that works in a carrel workspace and asks a person where the policy says so.

    carrel serve                                                # in another terminal
    python examples/langgraph_agent.py 'echo hello > note; cat note'
    python examples/langgraph_agent.py --model openai:gpt-5.5 'Draw a sine wave into output/sine.svg'
    python examples/langgraph_agent.py --model qwen3 --base-url http://127.0.0.1:11434/v1 'What is in the workspace?'

The default model is `shell`, which is none: what you say is the command. The conversation is kept in a file: stop the
program whenever you like, even by force, and start it again without a text; it goes on where it was, and what ran does
not run again. A command that waits for a person is decided by whoever may: `carrel approve ID`, `carrel deny ID`.
"""

import argparse
import asyncio
import sys
from typing import Any

from carrel import AsyncClient
from carrel.errors import CarrelError
from carrel.integrations.langgraph import (
    ModelMetrics,
    PendingApproval,
    Workspace,
    answer,
    at_rest,
    build_graph,
    open_checkpointer,
    pending,
    resolve_model,
)


async def decided(client: AsyncClient, waiting: list[PendingApproval]) -> None:
    """Show what waits, until one of it is decided."""
    for each in waiting:
        print(
            f"? {each.summary}\n  {each.reason}\n  carrel approve {each.approval}   or   carrel deny {each.approval}",
            flush=True,
        )
    while True:
        for each in waiting:
            if (await client.approvals.get(each.approval)).state != "pending":
                return
        await asyncio.sleep(0.5)


def show(update: dict[str, Any]) -> None:
    """Show a step of the graph."""
    for message in (update.get("model") or {}).get("messages", []):
        for call in message.tool_calls:
            print(f"> {call['name']} {call['args']}")
        if message.text:
            print(message.text)


async def main(options: argparse.Namespace) -> None:
    """Bring the conversation to a rest, say something, and bring it to a rest again."""
    metrics = ModelMetrics()
    model = resolve_model(options.model, base_url=options.base_url, metrics=metrics)
    config: Any = {"configurable": {"thread_id": options.thread}}
    async with (
        AsyncClient() as client,
        open_checkpointer(options.database) as checkpoints,
        checkpoints.running(options.thread),  # no other process runs this conversation meanwhile
    ):
        graph = build_graph(model, checkpointer=checkpoints.saver)
        text = options.text
        while True:
            state = await graph.aget_state(config)
            given: Any = None  # go on
            if waiting := list(pending(state).values()):
                await decided(client, waiting)
                given = answer(state, "look")
            elif at_rest(state):
                if not text:
                    break
                given, text = {"messages": [("user", text)]}, None
            workspace = Workspace(client, template=options.template)
            async for update in graph.astream(given, config, context=workspace, stream_mode="updates"):
                show(update)
    if options.metrics:
        print(metrics.render().decode(), file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An agent in a carrel workspace.")
    parser.add_argument("text", nargs="?", help="what you say; without it the conversation goes on where it was")
    parser.add_argument("--model", default="shell")
    parser.add_argument("--base-url", help="of an OpenAI-compatible endpoint")
    parser.add_argument("--thread", default="langgraph-example", help="the conversation, and the context in carrel")
    parser.add_argument("--template", help="of the context, if it is new")
    parser.add_argument("--database", default="agent.db", help="a file, or a postgresql:// URL")
    parser.add_argument("--metrics", action="store_true", help="show latency and tokens of the model at the end")
    try:
        asyncio.run(main(parser.parse_args()))
    except CarrelError as error:
        sys.exit(f"error: {error}")
