"""Outbound network (egress) compared with Squid: the same transfers and the same new connections through both, in
turns; and carrel's proxy under load.

Both proxies carry tunnels (CONNECT) to one server on loopback. carrel's proxy also decides about every connection,
checks the request inside, and logs it; Squid only carries the tunnel, and its log is off.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from bench import ground
from bench.measure import BenchFailed, Contender, Progress, Report, Table, median, paired_ratio, rounds
from bench.origin import LARGE_NAME
from bench.tunnels import Findings, connect_head, open_tunnel, small_request
from bench.wire import answer_size, request

LARGE = 512 << 20
TRANSFERS = 7
CONNECTS = 400
IDLE = 500
RATE = 1000
LOAD_S = 10.0

Address = tuple[str, int]

_SQUID = """
http_port 127.0.0.1:{port}
http_access allow all
cache deny all
cache_mem 0 MB
access_log none
cache_log {place}/cache.log
pid_filename {place}/squid.pid
coredump_dir {place}
visible_hostname bench
pinger_enable off
shutdown_lifetime 0 seconds
max_filedescriptors 16384
{user}
"""


async def run(progress: Progress) -> Report:
    """Measure."""
    with _server("bench.origin", str(LARGE)) as origin, _server("bench.outward", str(origin[1])) as ours:
        async with _squid() as squid:
            ways: dict[str, Address | None] = {"direct": None, "squid": squid, "carrel": ours}
            transfers = await rounds(
                {name: _transfer(way, origin) for name, way in ways.items()}, TRANSFERS, warm_up=1, progress=progress
            )
            connects = await rounds(
                {name: _connect(way, origin) for name, way in ways.items()}, CONNECTS, warm_up=20, progress=progress
            )
        load = await _load(ours, origin)
    return _report(transfers, connects, load)


def _report(transfers: dict[str, list[float]], connects: dict[str, list[float]], load: Findings) -> Report:
    added = {name: median(connects[name]) - median(connects["direct"]) for name in ("squid", "carrel")}
    table = Table(
        f"the way out: {LARGE >> 20} MB, {TRANSFERS} rounds; a new tunnel and a small request, {CONNECTS} rounds",
        ("", "MB/s", "× squid", "new tunnel ms", "added ms", "× squid"),
    )
    for name, speeds in transfers.items():
        table.add(
            name,
            median(speeds),
            paired_ratio(speeds, transfers["squid"]),
            median(connects[name]) * 1e3,
            added[name] * 1e3 if name in added else None,
            added[name] / added["squid"] if name in added else None,
        )
    under = Table(
        f"carrel with {IDLE} idle tunnels and {RATE} new ones a second for {LOAD_S:.0f} s",
        ("requests", "per second", "median ms", "p99 ms"),
    )
    under.add(str(load["requests"]), load["rate"], load["median_ms"], load["p99_ms"])
    return Report(
        {
            "egress_throughput_mb_per_s": median(transfers["carrel"]),
            "egress_throughput_vs_squid": paired_ratio(transfers["carrel"], transfers["squid"]),
            "egress_connect_ms": added["carrel"] * 1e3,
            "egress_connect_vs_squid": added["carrel"] / added["squid"],
            "egress_requests_per_s": load["rate"],
            "egress_p50_ms": load["median_ms"],
            "egress_p99_ms": load["p99_ms"],
        },
        [table, under],
    )


def _transfer(proxy: Address | None, origin: Address) -> Contender:
    """Return the megabytes per second of one large download."""

    async def turn() -> float:
        return await asyncio.to_thread(_download, proxy, origin)

    return turn


def _download(proxy: Address | None, origin: Address) -> float:
    began = time.perf_counter()
    with _reach(proxy, origin) as connection:
        connection.sendall(request("GET", LARGE_NAME).replace(b"127.0.0.1", f"{origin[0]}:{origin[1]}".encode()))
        head = connection.recv(65536, socket.MSG_PEEK)
        if (left := answer_size(head.lower())) is None or not head.startswith(b"HTTP/1.1 200"):
            raise BenchFailed(f"the download failed: {head[:300].decode(errors='replace')}")
        buffer = bytearray(1 << 20)
        while left > 0:
            got = connection.recv_into(buffer)
            if not got:
                raise BenchFailed(f"the download ended with {left} bytes left")
            left -= got
    return (LARGE >> 20) / (time.perf_counter() - began)


def _connect(proxy: Address | None, origin: Address) -> Contender:
    """Return the seconds from a new connection to the response of a small request."""
    message = small_request(*origin)

    async def turn() -> float:
        await asyncio.sleep(0.002)  # let the previous contender clean up
        began = time.perf_counter()
        with _reach(proxy, origin) as connection:
            connection.sendall(message)
            data = b""
            while (size := answer_size(data.lower())) is None or len(data) < size:
                more = connection.recv(65536)
                if not more:
                    raise BenchFailed("a small request was not answered")
                data += more
            return time.perf_counter() - began

    return turn


def _reach(proxy: Address | None, origin: Address) -> socket.socket:
    if proxy is None:
        return socket.create_connection(origin)
    return open_tunnel(proxy, connect_head(*origin))


async def _load(proxy: Address, origin: Address) -> Findings:
    orders = {"proxy": proxy, "origin": origin, "idle": IDLE, "rate": RATE, "seconds": LOAD_S}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.tunnels", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        output, _ = await process.communicate(json.dumps(orders).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found: Findings = json.loads(output or b'{"error": "the load generator failed"}')
    if "error" in found:
        raise BenchFailed(found["error"])
    return found


@contextmanager
def _server(module: str, *arguments: str) -> Iterator[Address]:
    """Run a program of `bench` that prints its port and ends with its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise BenchFailed(f"{module} did not start")
        yield "127.0.0.1", int(line)
    finally:
        process.stdin.close()
        process.stdout.close()
        ground.wait_or_kill(process, 10)


@asynccontextmanager
async def _squid() -> AsyncIterator[Address]:
    """Run Squid with all its files in its own directory."""
    program = shutil.which("squid", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise BenchFailed("'squid' is not installed; get it with `apt-get install squid`")
    place = Path(tempfile.mkdtemp(prefix="carrel-bench-squid-"))
    process = None
    name = f"bench{os.getpid()}"  # prefix of its files in /dev/shm
    try:
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            port = int(reserved.getsockname()[1])
        place.chmod(0o777)
        user = "cache_effective_user nobody" if os.geteuid() == 0 else ""
        (place / "squid.conf").write_text(_SQUID.format(port=port, place=place, user=user))
        with (place / "out.log").open("wb") as log:
            command = [program, "-N", "-n", name, "-f", str(place / "squid.conf")]
            # In its own session, like carrel's proxy: the kernel shares processors by session, so a proxy in
            # the session of the measuring process would get more processor time.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 30
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                said = "".join(path.read_text(errors="replace")[-1000:] for path in place.glob("*.log"))
                raise BenchFailed(f"Squid did not start:\n{said}")
            await asyncio.sleep(0.05)
        yield "127.0.0.1", port
    finally:
        if process is not None:
            process.kill()
            process.wait()
        shutil.rmtree(place, ignore_errors=True)
        for left in Path("/dev/shm").glob(f"{name}-*"):
            left.unlink(missing_ok=True)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
