"""What the hop to the owner adds: the same command and the same download, asked of the server that has the sandbox and
of another one, in turns. Then the same with SPIFFE IDs, where the hop is mutual TLS.

Two servers share a SQLite database. A forwarded request does not use it: the other server remembers the owner.
"""

from __future__ import annotations

import base64
import secrets

from bench import ground
from bench.measure import BenchFailed, Contender, Progress, Report, Table, median, percentile, ratio, rounds, timed
from bench.wire import SUCCESS, Wire, request
from carrel.client import Client

ROUNDS, DOWNLOADS = 1000, 9
MB = 1024 * 1024
SIZE_MB = 256


async def run(progress: Progress) -> Report:
    """Measure."""
    plain, tls = await _hop("none", progress), await _hop("carrel", progress)
    names = {
        "forwarded_exec_added_ms": "forwarded_tls_exec_added_ms",
        "forward_download_mb_s": "forward_tls_download_mb_s",
        "forward_download_vs_direct": "forward_tls_download_vs_direct",
    }
    figures = {**plain.figures, **{name: tls.figures[of] for of, name in names.items()}}
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
            ground.server({**shared, "CARREL_NODE": "b"}) as other,
        ):
            return await _measure(owner, other, "mutual TLS" if source != "none" else "plain HTTP", progress)


async def _measure(owner: ground.Server, other: ground.Server, how: str, progress: Progress) -> Report:
    with Client(owner.url, owner.token) as client:
        box = client.sandbox("forwarded")
        if [node.name for node in client.nodes() if node.sandboxes] != ["a"]:
            raise BenchFailed("the sandbox is not on the server that was asked")
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
    table = Table(
        f"`true` in a running sandbox, {ROUNDS} rounds; {SIZE_MB} MB; {how}", ("", "median ms", "p99 ms", "MB/s")
    )
    for name in commands:
        each = taken[name]
        table.add(name, median(each) * 1e3, percentile(each, 99) * 1e3, SIZE_MB / median(loads[name]))
    figures = {
        "forward_direct_exec_ms": median(taken["direct"]) * 1e3,
        "forward_exec_ms": median(taken["forwarded"]) * 1e3,
        "forwarded_exec_added_ms": (median(taken["forwarded"]) - median(taken["direct"])) * 1e3,
        "forward_direct_download_mb_s": SIZE_MB / median(loads["direct"]),
        "forward_download_mb_s": SIZE_MB / median(loads["forwarded"]),
        "forward_download_vs_direct": ratio(loads["direct"], loads["forwarded"]),
    }
    return Report(dict(figures), [table])


def _big(server: ground.Server, sandbox: str) -> bytes:
    headers = {"authorization": f"Bearer {server.token}"}
    return request("GET", f"/v1/sandboxes/{sandbox}/files/content?path=big", b"", headers)


def _whole(got: tuple[int, bytes]) -> bool:
    return got[0] == SIZE_MB * MB
