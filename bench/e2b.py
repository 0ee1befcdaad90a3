"""E2B's Python SDK as published against a server of carrel: create to first output, a command beside our SDK's, and a
burst of 100 sandboxes. The client and the server share the machine.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time

from tests.support import e2b_sdks

from bench import ground
from bench.measure import BenchFailed, Progress, Report, Table, median, percentile
from carrel import Client

SAMPLES, ROUNDS, AT_ONCE = 15, 6, 100
_CREATE = """
import json, time
from e2b import Sandbox
taken = []
for _ in range(%d):
    began = time.perf_counter()
    box = Sandbox.create()
    assert box.commands.run("echo out").stdout == "out\\n"
    taken.append(time.perf_counter() - began)
    box.kill()
print(json.dumps(taken[2:]))
"""
_COMMANDS = """
import json, sys, time
from e2b import Sandbox
box = Sandbox.create()
box.commands.run("true")
for line in sys.stdin:
    taken = []
    for _ in range(10):
        began = time.perf_counter()
        box.commands.run("true")
        taken.append(time.perf_counter() - began)
    print(json.dumps(taken), flush=True)
box.kill()
"""
_BURST = """
import asyncio, json, time
from e2b import AsyncSandbox

async def one(began):
    box = await AsyncSandbox.create()
    assert (await box.commands.run("echo out")).stdout == "out\\n"
    return box, time.perf_counter() - began

async def main():
    began = time.perf_counter()
    found = await asyncio.gather(*(one(began) for _ in range(%d)))
    print(json.dumps([seconds for _, seconds in found]))
    await asyncio.gather(*(box.kill() for box, _ in found))

asyncio.run(main())
"""


async def run(progress: Progress) -> Report:
    """Measure."""
    python = str(await asyncio.to_thread(e2b_sdks.python))
    async with ground.server({"CARREL_MAX_SANDBOXES": str(2 * AT_ONCE)}) as server:
        environment = e2b_sdks.variables(server.url, server.token)

        def measured(program: str) -> list[float]:
            done = e2b_sdks.made([python, "-c", program], environment)
            if done.returncode:
                raise BenchFailed(done.stderr[-2000:])
            return list(json.loads(done.stdout))

        create = await asyncio.to_thread(measured, _CREATE % (SAMPLES + 2))
        progress(1, 3)
        theirs, ours = await asyncio.to_thread(_in_turns, [python, "-c", _COMMANDS], environment, server)
        progress(2, 3)
        burst = await asyncio.to_thread(measured, _BURST % AT_ONCE)
    progress(3, 3)
    table = Table("E2B's Python SDK on carrel, one client on the same machine", ("", "median ms", "p95 ms"))
    for name, taken in (
        ("create to first output", create),
        ("`commands.run`", theirs),
        ("a command by carrel's SDK", ours),
        (f"{AT_ONCE} at once, to the first output of each", burst),
    ):
        table.add(name, 1000 * median(taken), 1000 * percentile(taken, 95))
    return Report(
        {
            "e2b_create_first_output_ms": 1000 * median(create),
            "e2b_exec_vs_sdk": median(theirs) / median(ours),
            "burst100_tti_median_ms": 1000 * median(burst),
            "burst100_tti_p95_ms": 1000 * percentile(burst, 95),
        },
        [table],
    )


def _in_turns(
    command: list[str], environment: dict[str, str], server: ground.Server
) -> tuple[list[float], list[float]]:
    """Return the seconds of a command by E2B's SDK and by ours, taken in turns."""
    theirs: list[float] = []
    ours: list[float] = []
    with (
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client,
        Client(server.url, server.token) as carrel,
    ):
        assert client.stdin is not None and client.stdout is not None
        box = carrel.sandbox("beside")
        for _ in range(ROUNDS):
            client.stdin.write("go\n")
            client.stdin.flush()
            theirs += json.loads(client.stdout.readline())
            for _ in range(10):
                began = time.perf_counter()
                box.commands.run("true")
                ours.append(time.perf_counter() - began)
        box.terminate(delete_files=True)
    return theirs, ours
