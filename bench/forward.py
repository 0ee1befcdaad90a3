"""What the hop to the owner adds: the same command, the same download of 1 GB and a key in each of 200 open terminals,
asked of the server that has the sandbox and of another one, in turns. Then the same with SPIFFE IDs, where the hop is
mutual TLS.

Two servers share a SQLite database. A forwarded request does not use it: the other server remembers the owner.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from contextlib import AsyncExitStack

from websockets.asyncio.client import ClientConnection, connect

from bench import ground
from bench.measure import BenchFailed, Contender, Progress, Report, Table, median, percentile, ratio, rounds, timed
from bench.wire import SUCCESS, Wire, request
from carrel.client import Client

ROUNDS, DOWNLOADS, KEYS = 1000, 5, 9
MB = 1024 * 1024
SIZE_MB = 1024
TERMINALS, BOXES = 200, 8


async def run(progress: Progress) -> Report:
    """Measure."""
    plain, tls = await _hop("none", progress), await _hop("carrel", progress)
    compared = ("forward_overhead_ms", "forward_download_vs_direct", "forward_terminals_vs_direct")
    figures = {**plain.figures, **{name.replace("_", "_tls_", 1): tls.figures[name] for name in compared}}
    return Report(figures, [*plain.tables, *tls.tables])


async def _hop(source: str, progress: Progress) -> Report:
    async with ground.scratch() as place:
        shared = {
            "CARREL_DATABASE": f"sqlite:///{place}/shared.db",
            "CARREL_ARCHIVE": str(place / "archive"),
            "CARREL_SECRET_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
            "CARREL_SANDBOX_DISK_MB": str(4 * SIZE_MB),
            "CARREL_SPIFFE_SOURCE": source,
        }
        async with (
            ground.server({**shared, "CARREL_NODE": "a"}) as owner,
            ground.server({**shared, "CARREL_NODE": "b", "CARREL_MAX_SANDBOXES": "1"}) as other,
        ):
            return await _measure(owner, other, "plain HTTP" if source == "none" else "mutual TLS", progress)


async def _measure(owner: ground.Server, other: ground.Server, how: str, progress: Progress) -> Report:
    with Client(other.url, other.token) as client:
        client.sandbox("filler")  # it has no room for more
    with Client(owner.url, owner.token) as client:
        async with asyncio.timeout(30):
            while sum(node.sandboxes for node in client.nodes()) != 1:  # until the other has told it
                await asyncio.sleep(0.1)
        box = client.sandbox("forwarded")
        boxes = [client.sandbox(f"terminals-{number}").id for number in range(BOXES)]
        if any(client.find(name).node != "a" for name in (box.id, *boxes)):
            raise BenchFailed("the sandboxes are not on the server that was asked")
        box.commands.run(f"head -c {SIZE_MB * MB} /dev/zero > big", check=True)
        direct, hop = Wire(owner.address), Wire(other.address)
        try:
            commands: dict[str, Contender] = {
                "direct": timed(lambda: direct.call(owner.run_true(box.id)), lambda body: SUCCESS in body),
                "forwarded": timed(lambda: hop.call(other.run_true(box.id)), lambda body: SUCCESS in body),
            }
            taken = await rounds(commands, ROUNDS, warm_up=30, progress=progress)
            downloads: dict[str, Contender] = {
                "direct": timed(lambda: direct.drain(_big(owner, box.id), chunked=False), _whole),
                "forwarded": timed(lambda: hop.drain(_big(other, box.id), chunked=False), _whole),
            }
            loads = await rounds(downloads, DOWNLOADS, warm_up=1)
        finally:
            direct.close()
            hop.close()
    keys = await _terminals({"direct": owner, "forwarded": other}, boxes)
    what = f"`true` in a running sandbox, {ROUNDS} rounds; {SIZE_MB} MB; a key in each of {TERMINALS} terminals"
    table = Table(f"{what}; {how}", ("", "median ms", "p99 ms", "MB/s", "all keys ms"))
    for name in commands:
        each = taken[name]
        table.add(
            name,
            median(each) * 1e3,
            percentile(each, 99) * 1e3,
            SIZE_MB / median(loads[name]),
            median(keys[name]) * 1e3,
        )
    figures = {
        "forward_direct_exec_ms": median(taken["direct"]) * 1e3,
        "forward_exec_ms": median(taken["forwarded"]) * 1e3,
        "forward_overhead_ms": (median(taken["forwarded"]) - median(taken["direct"])) * 1e3,
        "forward_direct_download_mb_s": SIZE_MB / median(loads["direct"]),
        "forward_download_mb_s": SIZE_MB / median(loads["forwarded"]),
        "forward_download_vs_direct": ratio(loads["direct"], loads["forwarded"]),
        "forward_terminals": TERMINALS,
        "forward_terminals_vs_direct": ratio(keys["forwarded"], keys["direct"]),
    }
    return Report(dict(figures), [table])


async def _terminals(servers: dict[str, ground.Server], boxes: list[str]) -> dict[str, list[float]]:
    """Open terminals in turns by each server, and measure how long a key in each of them takes to come back."""
    taken: dict[str, list[float]] = {name: [] for name in servers}
    async with AsyncExitStack() as stack:
        opened: dict[str, list[ClientConnection]] = {}
        for name, server in servers.items():
            base = server.url.replace("http", "ws")
            urls = [f"{base}/v1/sandboxes/{boxes[each % BOXES]}/terminals?command=cat" for each in range(TERMINALS)]
            headers = {"authorization": f"Bearer {server.token}"}
            opened[name] = [
                await stack.enter_async_context(
                    connect(url, additional_headers=headers, proxy=None, compression=None, ping_interval=None)
                )
                for url in urls
            ]
        for number in range(-1, KEYS):
            for name, terminals in opened.items():
                began = time.perf_counter()
                await asyncio.gather(*map(_key, terminals))
                if number >= 0:
                    taken[name].append(time.perf_counter() - began)
    return taken


async def _key(terminal: ClientConnection) -> None:
    await terminal.send(b"x")
    answer = await asyncio.wait_for(terminal.recv(), 60)
    if not isinstance(answer, bytes) or b"x" not in answer:
        raise BenchFailed(f"a terminal answered {answer[:200]!r}")


def _big(server: ground.Server, sandbox: str) -> bytes:
    headers = {"authorization": f"Bearer {server.token}"}
    return request("GET", f"/v1/sandboxes/{sandbox}/files/content?path=big", b"", headers)


def _whole(got: tuple[int, bytes]) -> bool:
    return got[0] == SIZE_MB * MB
