"""The example server runs an agent's CLI in a folder, is killed, and goes on where its client was."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from carrel.client import AsyncClient

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent_cli_server.py"
AGENT = """
import json, os, sys, time
open("made", "w").write(os.getcwd())
for number in range(6):
    while number >= 3 and not os.path.exists("go"):
        time.sleep(0.02)
    sys.stdout.write(json.dumps({"number": number, "prompt": sys.argv[-1], "key": os.environ.get("KEY")}))
    sys.stdout.flush()
    sys.stdout.write(chr(10))
    sys.stdout.flush()
    print("noise", file=sys.stderr, flush=True)
"""


@asynccontextmanager
async def example(server: dict[str, str], *options: str) -> AsyncIterator[httpx.AsyncClient]:
    """The example on a free port, killed at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE), "--port", str(port), *options, "--", "python3", "-c", AGENT,
        env={**os.environ, "CARREL_URL": server["url"], "CARREL_TOKEN": server["token"]},
    )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            while True:
                assert process.returncode is None
                try:
                    await client.get("/")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.05)
            yield client
    finally:
        process.kill()
        await process.wait()


async def read(client: httpx.AsyncClient, path: str, mark: str, count: int) -> tuple[list[dict[str, object]], str]:
    """Up to so many events after a mark, and the mark of the last."""
    found: list[dict[str, object]] = []
    async with client.stream("GET", path, headers={"last-event-id": mark}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                mark = line[4:]
            elif line.startswith("data: "):
                found.append(json.loads(line[6:]))
                if len(found) == count:
                    break
    return found, mark


async def test_lines_go_on_after_a_restart_of_the_server(server: dict[str, str], owner: AsyncClient) -> None:
    folder = Path(server["folders"], "ann")
    async with example(server, "--folders", server["folders"]) as client:
        said = await client.post("/users/ann/runs", content="Fix it")
        assert said.status_code == 201, said.text
        path = f"/users/ann/runs/{said.json()['run']}/events"
        first, mark = await read(client, path, "", 2)
        assert (await client.get("/users/bob/runs/k0123456789/events")).status_code == 404
    assert (folder / "made").read_text() == str(folder)
    async with example(server) as client:
        said = await client.post("/users/bob/runs", content="Fix it")
        (folder / "go").touch()
        later, _ = await read(client, path, mark, 99)
        [other], _ = await read(client, f"/users/bob/runs/{said.json()['run']}/events", "", 1)
    for user in ("ann", "bob"):
        await owner.attach(await owner.find(f"agent-of-{user}")).terminate(delete_files=True)
    *lines, end = [*first, *later]
    assert [each["number"] for each in lines] == [0, 1, 2, 3, 4, 5]
    assert {each["prompt"] for each in (*lines, other)} == {"Fix it"} and end == {"exit_code": 0}
    assert (folder / "made").exists()  # carrel deletes no file of a folder
