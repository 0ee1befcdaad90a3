"""Calls of Python without a context, compared with the same calls in contexts: one after the other through the SDK, and
with eight clients of mixed environments.

Half of the clients use the system's Python, the others two environments of a small package each; without a network all
use the system's Python. The clients are eight connections of a separate, cheap process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from bench import ground
from bench.measure import Contender, Progress, Report, Table, median, paired_ratio, percentile, ratio, rounds, timed
from bench.rate import CLIENTS, storm
from bench.wire import request
from carrel.client import Client
from carrel.errors import CarrelError

CALLS = 200
ROUNDS = 5
PACKAGES = ("six", "idna")
CODE = "print(1)"


async def run(progress: Progress) -> Report:
    """Measure."""
    async with ground.server() as server:
        with Client(server.url, server.token, timeout=600) as client:
            envs = await asyncio.to_thread(_environments, client)
            report = await _one(client, progress)
            boxes = [client.sandbox(f"router-{number}") for number in range(CLIENTS)]
            tokens = [_token(client, number) for number in range(CLIENTS)]
            report = await _many(server, [box.id for box in boxes], tokens, envs, report, progress)
    return report


async def _one(client: Client, progress: Progress) -> Report:
    with client.sandbox() as box:
        contenders: dict[str, Contender] = {
            "in a context": timed(lambda: box.python.run(CODE).stdout, lambda output: output == "1\n"),
            "without a context": timed(lambda: client.python.run(CODE).output, lambda output: output == "1\n"),
        }
        samples = await rounds(contenders, CALLS, warm_up=10, progress=progress)
    within, without = samples.values()
    table = Table(f"a call of Python through the SDK, {CALLS} rounds", ("", "median ms", "p99 ms", "× in a context"))
    for name, taken in samples.items():
        table.add(name, median(taken) * 1e3, percentile(taken, 99) * 1e3, ratio(taken, within))
    figures = {
        "router_call_ms": median(without) * 1e3,
        "router_call_p99_ms": percentile(without, 99) * 1e3,
        "router_call_vs_context": ratio(without, within),
    }
    return Report({**figures}, [table])


async def _many(
    server: ground.Server,
    boxes: Sequence[str],
    tokens: Sequence[str],
    envs: Sequence[str | None],
    report: Report,
    progress: Progress,
) -> Report:
    p99s: dict[str, list[float]] = {}
    addresses = [server.address] * CLIENTS
    within = [
        _request(server.token, f"/v1/sandboxes/{box}/python", env=env) for box, env in zip(boxes, envs, strict=True)
    ]
    callers = [_request(token, "/v1/execute", env_name=env) for token, env in zip(tokens, envs, strict=True)]
    alone = [_request(server.token, "/v1/execute", env_name=env) for env in envs]
    contenders = {
        "in a context each": storm(p99s, "contexts", addresses, within),
        "without, eight callers": storm(p99s, "callers", addresses, callers),
        "without, one caller": storm(p99s, "caller", addresses, alone),
    }
    samples = await rounds(contenders, ROUNDS, warm_up=2, progress=progress)
    base = samples["in a context each"]
    mixed = f"{len(set(envs))} environments"
    table = Table(
        f"calls of Python per second, {CLIENTS} clients, {mixed}, {ROUNDS} rounds",
        ("", "median /s", "× in contexts", "p99 ms"),
    )
    for (name, rates), late in zip(samples.items(), p99s.values(), strict=True):
        table.add(name, median(rates), paired_ratio(rates, base), median(late[-ROUNDS:]) * 1e3)
    report.tables.append(table)
    report.figures |= {
        "router8_contexts_per_s": median(base),
        "router8_callers_per_s": median(samples["without, eight callers"]),
        "router8_callers_p99_ms": median(p99s["callers"][-ROUNDS:]) * 1e3,
        "router8_caller_per_s": median(samples["without, one caller"]),
        "router8_vs_contexts": paired_ratio(samples["without, eight callers"], base),
        "router8_environments": len(set(envs)),
    }
    return report


def _environments(client: Client) -> list[str | None]:
    """Return the environment of each client."""
    try:
        with client.sandbox() as box:
            names = [box.envs.attach([package]).name for package in PACKAGES]
    except CarrelError:
        return [None] * CLIENTS
    return [None if number % 2 else names[number // 2 % len(names)] for number in range(CLIENTS)]


def _token(client: Client, number: int) -> str:
    return client.tokens.create(f"router-{number}", kind="agent", scopes=["operate"]).token


def _request(token: str, path: str, **more: str | None) -> bytes:
    body = {"code": CODE, **{name: value for name, value in more.items() if value is not None}}
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    return request("POST", path, json.dumps(body).encode(), headers)
