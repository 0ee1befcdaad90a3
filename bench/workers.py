"""What several workers add to a server: operations per second and latency. Each client is a process with a connection
and a sandbox of its own.

The servers run side by side and are asked in turns, so that a change of the machine's speed meets all of them. Clients,
sandboxes and workers share the processors: that is what a server's users see.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench import ground
from bench.measure import BenchFailed, Contender, Progress, Report, Table, median, paired_ratio, percentile, rounds
from bench.worker_client import ClientOrders

ROUNDS = 5
MOST_LINE = 1 << 26


@dataclass
class WorkerOptions:
    """What is compared. `counts`: numbers of workers; the first is what the others are compared with."""

    counts: Sequence[int] = (1, 2)
    clients: int = max(8, 2 * (os.cpu_count() or 1))
    seconds: float = 2.0


OPTIONS = WorkerOptions()
"""Set by the command line."""


class _Clients:
    """The clients of one server."""

    def __init__(self) -> None:
        self._processes: list[asyncio.subprocess.Process] = []
        self.took: list[float] = []

    async def start(self, server: ground.Server, name: str, *, mix: bool) -> None:
        host, port = server.address
        for number in range(OPTIONS.clients):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "bench.worker_client",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=MOST_LINE,
            )
            self._processes.append(process)
            orders = ClientOrders(
                address=(str(host), int(port)), token=server.token, context=f"{name}-{number}", mix=mix
            )
            await self._ask(process, json.dumps(orders))

    @staticmethod
    async def _ask(process: asyncio.subprocess.Process, words: str) -> str:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{words}\n".encode())
        await process.stdin.drain()
        answer = await process.stdout.readline()
        if not answer:
            raise BenchFailed("a client died; its error is above")
        return answer.decode()

    async def reconnect(self) -> None:
        await asyncio.gather(*(self._ask(each, "reconnect") for each in self._processes))

    async def run(self) -> float:
        """Let all clients work; return the operations per second."""
        answers = await asyncio.gather(*(self._ask(each, f"run {OPTIONS.seconds}") for each in self._processes))
        taken = [float(each) for answer in answers for each in json.loads(answer)]
        self.took += taken
        return len(taken) / OPTIONS.seconds

    async def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                async with asyncio.timeout(10):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def _turn(clients: _Clients, *, anew: bool = False) -> Contender:
    async def turn() -> float:
        await asyncio.sleep(0.1)
        if anew:
            await clients.reconnect()
        return await clients.run()

    return turn


async def run(progress: Progress) -> Report:
    """Measure."""
    counts = list(OPTIONS.counts)
    tables, figures = [], dict[str, float | int | str]()
    async with AsyncExitStack() as stack:
        contenders: dict[str, Contender] = {}
        clients: dict[str, _Clients] = {}
        for count in counts:
            server = await stack.enter_async_context(ground.server({"CARREL_WORKERS": str(count)}))
            for name, mix, anew in (
                (f"{count}", True, False),
                (f"{count} commands", False, False),
                (f"{count} anew", True, True),
            ):
                clients[name] = each = _Clients()
                stack.push_async_callback(each.close)
                await each.start(server, name.replace(" ", "-"), mix=mix)
                contenders[name] = _turn(each, anew=anew)
        samples = await rounds(contenders, ROUNDS, warm_up=1, progress=progress)
    words = {"": "commands and files", " commands": "only commands", " anew": "commands and files, new connections"}
    base = counts[0]
    for kind, title in words.items():
        table = Table(
            f"{title}, {OPTIONS.clients} clients, {ROUNDS} rounds of {OPTIONS.seconds:g} s",
            ("workers", "median /s", f"× {base}", "median ms", "p99 ms"),
        )
        for count in counts:
            name = f"{count}{kind}"
            took, key = clients[name].took, f"workers{count}{kind.replace(' ', '_')}"
            against = paired_ratio(samples[name], samples[f"{base}{kind}"])
            table.add(count, median(samples[name]), against, median(took) * 1e3, percentile(took, 99) * 1e3)
            figures |= {f"{key}_per_s": median(samples[name]), f"{key}_p99_ms": percentile(took, 99) * 1e3}
            if count != base:
                figures[f"workers{count}_vs_{base}{kind.replace(' ', '_')}"] = against
        tables.append(table)
    return Report(figures | {"workers_clients": OPTIONS.clients}, tables)
