"""Sends tasks to an A2A agent of carrel with the official client: one that runs, and one that a person has to approve.

carrel serve                                                # in one terminal
python examples/a2a_client.py                               # in another; needs the extra `a2a`

It starts an agent of its own. One that runs already (`carrel agent`) is named with `--url http://127.0.0.1:7073`.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from a2a.client import Client, ClientConfig, ClientFactory
from a2a.types.a2a_pb2 import Message, Part, Role, SendMessageRequest, SubscribeToTaskRequest, TaskState

from carrel import AsyncClient
from carrel.errors import CarrelError

POLICY = {
    "permissions": {
        "allow": [
            "shell(echo:*)",
            "shell(mkdir:*)",
            "shell(cat:*)",
            "file(read:${WORKSPACE}/**)",
            "file(write:${WORKSPACE}/**)",
        ]
    }
}


async def tell(caller: Client, context: str, text: str) -> str:
    """Send a message, show what comes back, and give the id of the task."""
    print(f"\n> {text}")
    message = Message(role=Role.ROLE_USER, message_id=uuid.uuid4().hex, context_id=context, parts=[Part(text=text)])
    task_id = ""
    async for event in caller.send_message(SendMessageRequest(message=message)):
        task_id = event.task.id or task_id
        show(event)
    return task_id


def show(event) -> None:  # type: ignore[no-untyped-def]
    """One event of a stream."""
    kind = event.WhichOneof("payload")
    if kind == "artifact_update":
        part = event.artifact_update.artifact.parts[0]
        print(f"  {event.artifact_update.artifact.name}: {part.text or part.raw or part.url}")
    else:
        status = event.task.status if kind == "task" else event.status_update.status
        print(f"  [{TaskState.Name(status.state).removeprefix('TASK_STATE_').lower()}]")
        for part in status.message.parts:
            if part.text:
                print("  " + part.text.replace("\n", "\n  "))


@contextmanager
def agent(url: str | None) -> Iterator[str]:
    """The agent at a URL, or one that is started for this."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "carrel", "agent", "--port", "0", "--database", f"{place}/agent.db"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                said = process.stdout.readline()
                if not said:
                    sys.exit("the agent did not start, and has said why")
                yield said.split()[-1]
            finally:
                process.terminate()


async def main() -> None:
    """Run the example."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--url", help="an agent that runs already")
    given = options.parse_args()
    with agent(given.url) as url:
        await converse(url, f"example-a2a-{uuid.uuid4().hex[:6]}")


async def converse(url: str, context: str) -> None:
    """A task that runs, and one that waits."""
    async with AsyncClient(administrator=True) as carrel:
        await carrel.policy(context).put(settings=POLICY)
        sender = await carrel.tokens.create("a2a-caller", kind="agent", scopes=["operate"], contexts=[context])
        person = await carrel.tokens.create("a2a-person", kind="person", scopes=["approve"])
        headers = {"authorization": f"Bearer {sender.token}"}
        async with (
            httpx.AsyncClient(headers=headers, timeout=60) as http,
            AsyncClient(carrel.url, person.token) as inbox,
        ):
            caller = await ClientFactory(ClientConfig(httpx_client=http)).create_from_url(url)
            await tell(caller, context, "mkdir -p output && echo 42 > output/sum.txt && echo done")
            waits = await tell(caller, context, "uname -s")
            print("\n  … and a person looks into the inbox:")
            async for approval in inbox.approvals.list(state="pending", context_id=context):
                print(f"  approving {approval.summary}")
                await inbox.approvals.approve(approval.id, message="go ahead")
            async for event in caller.subscribe(SubscribeToTaskRequest(id=waits)):
                show(event)
        await carrel.attach(await carrel.find(context)).terminate(delete_files=True)
        await carrel.policy(context).delete()
        for token in (sender, person):
            await carrel.tokens.revoke(token.id)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except CarrelError as error:
        sys.exit(f"error: {error}")
