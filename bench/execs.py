"""A command in a running sandbox: at the supervisor's socket, through the API, and through the SDK.

Compared with `subprocess.run(["sh", "-c", "true"])`, which a framework without a sandbox would use.
"""

from __future__ import annotations

import asyncio

from bench import ground, peers
from bench.measure import Contender, Progress, Report, Table, median, percentile, ratio, rounds, timed
from bench.wire import SUCCESS, Wire
from carrel.client import Client

ROUNDS = 1000
SHELL = ("sh", "-c", "true")


async def run(progress: Progress) -> Report:
    """Measure."""
    async with ground.sandboxes() as boxes, ground.server() as server:
        at_socket = Wire(ground.reach(await boxes.start()))
        with Client(server.url, server.token) as client, client.sandbox() as box:
            at_api, run_true = Wire(server.address), server.run_true(box.id)
            try:
                contenders: dict[str, Contender] = {
                    "plain subprocess": _plain,
                    "carrel, supervisor socket": timed(
                        lambda: at_socket.call(ground.RUN_TRUE), lambda body: SUCCESS in body
                    ),
                    "carrel, API": timed(lambda: at_api.call(run_true), lambda body: SUCCESS in body),
                    "carrel, SDK": timed(lambda: box.commands.run("true"), lambda result: result.exit_code == 0),
                }
                samples = await rounds(contenders, ROUNDS, warm_up=30, progress=progress)
            finally:
                at_api.close()
                at_socket.close()
    plain = samples["plain subprocess"]
    table = Table(
        f"`true` in a running sandbox, {ROUNDS} rounds",
        ("", "median ms", "p99 ms", "p99 / median", "× subprocess"),
    )
    for name, taken in samples.items():
        p99 = percentile(taken, 99)
        table.add(name, median(taken) * 1e3, p99 * 1e3, p99 / median(taken), ratio(taken, plain))
    report = Report({"exec_subprocess_ms": median(plain) * 1e3}, [table])
    for key in ("socket", "api", "sdk"):
        taken = samples[{"socket": "carrel, supervisor socket", "api": "carrel, API", "sdk": "carrel, SDK"}[key]]
        report.figures |= {
            f"exec_{key}_ms": median(taken) * 1e3,
            f"exec_{key}_p99_ms": percentile(taken, 99) * 1e3,
            f"exec_{key}_p99_vs_median": percentile(taken, 99) / median(taken),
            f"exec_{key}_vs_subprocess": ratio(taken, plain),
        }
    report.figures["exec_subprocess_p99_vs_median"] = percentile(plain, 99) / median(plain)
    return report


async def _plain() -> float:
    await asyncio.sleep(0)  # allows an interrupt
    return peers.once(SHELL)
