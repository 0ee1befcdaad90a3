"""Agents in processes of their own: forks one for each job that comes on standard input, and says how it ended.

An agent can be told to die at any point where it speaks with carrel or with the database of its checkpoints.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver

from carrel.client import AsyncClient
from carrel.client._async.connection import AsyncConnection
from carrel.integrations.langgraph import (
    Workspace,
    answer,
    at_rest,
    build_graph,
    open_checkpointer,
    pending,
    resolve_model,
)


def say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class Doom:
    """Ends the process at the `at`th point that is passed."""

    def __init__(self, at: int | None):
        self.at = at
        self.passed = 0
        self.kinds: set[str] = set()

    def point(self) -> None:
        self.passed += 1
        if self.passed == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: type, name: str) -> None:
        inner = getattr(owner, name)

        async def outer(this: Any, *args: Any, **more: Any) -> Any:
            self.point()
            result = await inner(this, *args, **more)
            self.point()
            self.kinds.add(name)
            return result

        setattr(owner, name, outer)


async def agent(job: dict[str, Any]) -> None:
    doom = Doom(job.get("die_at"))
    carrel = job["url"]
    doom.around(AsyncConnection, "send")
    model = resolve_model("scripted", base_url=job["model"]) if "model" in job else "shell"
    config: Any = {"configurable": {"thread_id": job["thread"]}}
    async with AsyncClient(carrel, job["token"]) as client, open_checkpointer(job["database"]) as checkpoints:
        saver: type[BaseCheckpointSaver[Any]] = type(checkpoints.saver)
        doom.around(saver, "aput")
        doom.around(saver, "aput_writes")
        graph = build_graph(model, checkpointer=checkpoints.saver)
        async with checkpoints.running(job["thread"], wait_s=10):
            state = await graph.aget_state(config)
            given: Any = None
            if not state.values:
                given = {"messages": [("user", job["text"])]}
            elif pending(state):
                given = answer(state, job.get("decision", "look"))
            elif at_rest(state):
                say({"text": state.values["messages"][-1].text})
                return
            result = await graph.ainvoke(given, config, context=Workspace(client))
        waiting = [each.model_dump() for each in pending(result).values()]
        passed = {"points": doom.passed, "kinds": sorted(doom.kinds)}
        say({"waiting": waiting, **passed} if waiting else {"text": result["messages"][-1].text, **passed})


def main() -> None:
    build_graph(resolve_model("warm", base_url="http://127.0.0.1:9/v1"))  # imports what agents would import each
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 1
            try:
                say({"pid": os.getpid()})
                asyncio.run(agent(json.loads(line)))
                code = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        say({"status": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main()
