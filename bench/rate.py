"""Commands per second with eight clients: on one sandbox and on one each, at the socket and through the API.

The clients are eight connections of a separate, cheap process (`bench.wire`). The peers are single runs, eight at a
time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from bench import ground, peers
from bench.measure import BenchFailed, Contender, Progress, Report, Table, median, paired_ratio, rounds
from bench.wire import Address
from carrel.client import Client

CLIENTS = 8
ROUNDS = 5
WINDOW_S = 0.8
PLAIN_SHELL = ("sh", "-c", "true")


async def run(progress: Progress) -> Report:
    """Measure."""
    peers.require()
    p99s: dict[str, list[float]] = {}
    async with ground.sandboxes() as boxes, ground.server() as server:
        sockets = [ground.reach(await boxes.start()) for _ in range(CLIENTS)]
        with Client(server.url, server.token) as client:
            ids = [client.sandbox(f"rate-{number}").id for number in range(CLIENTS)]
        true_in = [server.run_true(name) for name in ids]
        api = [server.address] * CLIENTS
        contenders: dict[str, Contender] = {
            "plain `sh -c true`": _peer(PLAIN_SHELL),
            "unshare, 7 namespaces": _peer(peers.ONE_SHOTS["unshare, 7 namespaces"]),
            "bubblewrap": _peer(peers.ONE_SHOTS["bubblewrap"]),
            "socket, one sandbox": storm(p99s, "socket", sockets[:1] * CLIENTS, [ground.RUN_TRUE] * CLIENTS),
            "socket, a sandbox each": storm(p99s, "socket_each", sockets, [ground.RUN_TRUE] * CLIENTS),
            "API, one sandbox": storm(p99s, "api", api, true_in[:1] * CLIENTS),
            "API, a sandbox each": storm(p99s, "api_each", api, true_in),
        }
        samples = await rounds(contenders, ROUNDS, progress=progress)
    bwrap = samples["bubblewrap"]
    table = Table(
        f"commands per second, {CLIENTS} clients, {ROUNDS} rounds of {WINDOW_S} s",
        ("", "median /s", "× bubblewrap", "p99 ms"),
    )
    latencies = dict(zip(list(contenders)[3:], p99s.values(), strict=True)) if len(p99s) == 4 else {}
    for name, rates in samples.items():
        p99 = median(latencies[name]) * 1e3 if name in latencies else None
        table.add(name, median(rates), paired_ratio(rates, bwrap), p99)
    report = Report({"rate8_bwrap": median(bwrap), "rate8_subprocess": median(samples["plain `sh -c true`"])}, [table])
    names = {
        "socket": "socket, one sandbox",
        "socket_each": "socket, a sandbox each",
        "api": "API, one sandbox",
        "api_each": "API, a sandbox each",
    }
    for key, name in names.items():
        report.figures[f"rate8_{key}"] = median(samples[name])
        report.figures[f"rate8_{key}_vs_bwrap"] = paired_ratio(samples[name], bwrap)
        report.figures[f"rate8_{key}_p99_ms"] = median(p99s[key]) * 1e3
    return report


def _peer(command: Sequence[str]) -> Contender:
    async def turn() -> float:
        await asyncio.sleep(0.05)
        return peers.rate(command, CLIENTS, WINDOW_S)

    return turn


def storm(p99s: dict[str, list[float]], key: str, addresses: Sequence[Address], requests: list[bytes]) -> Contender:
    """Let clients repeat their requests for a while; return the responses per second. Fills in the p99."""
    orders = json.dumps(
        {"addresses": list(addresses), "requests": [text.decode() for text in requests], "seconds": WINDOW_S}
    ).encode()
    p99s[key] = []

    async def turn() -> float:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench.wire",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            output, _ = await process.communicate(orders)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        answer = json.loads(output or b'{"error": "the load generator died"}')
        if "error" in answer:
            raise BenchFailed(answer["error"])
        p99s[key].append(float(answer["p99"]))
        return float(answer["rate"])

    return turn
