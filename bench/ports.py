"""What a URL of a port adds: the same server, asked directly on this machine's loopback and by the URL of its port in a
sandbox, in turns. A small answer, 1 GB, and 200 requests at once. The direct connection is kept alive; the URL's inner
one is new for each request.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from bench import ground
from bench.measure import Contender, Progress, Report, Table, median, percentile, ratio, rounds, timed
from bench.wire import Address, Wire, dial, request
from carrel.client import Client

ROUNDS, DOWNLOADS, BURSTS = 500, 3, 5
AT_ONCE = 200
SIZE_MB = 1024
MB = 1024 * 1024
SERVER = f"""
import asyncio, sys
async def serve(reader, writer):
    try:
        while head := await reader.readuntil(b"\\r\\n\\r\\n"):
            if head.startswith(b"GET /big"):
                writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: {SIZE_MB * MB}\\r\\n\\r\\n")
                piece = bytes(1 << 20)
                for _ in range({SIZE_MB}):
                    writer.write(piece)
                    await writer.drain()
            else:
                writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 5\\r\\n\\r\\nhello")
            if b"connection: close" in head.lower():
                break
    except (OSError, asyncio.IncompleteReadError):
        pass
    writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]), backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


async def run(progress: Progress) -> Report:
    """Measure."""
    async with ground.server() as server:
        with Client(server.url, server.token) as client, _direct() as near:
            box = client.sandbox("ported")
            box.files.write("server.py", SERVER.encode())
            box.commands.start("exec /usr/bin/python3 server.py 8000")
            box.ports.wait(8000)
            path = box.ports.share(8000).path
            return await _measure(near, server.address, path, progress)


@contextmanager
def _direct() -> Iterator[Address]:
    """Run the same server on this machine."""
    command = ["/usr/bin/python3", "-c", SERVER, "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield "127.0.0.1", int(process.stdout.readline())
        finally:
            process.terminate()


async def _measure(near: Address, far: Address, path: str, progress: Progress) -> Report:
    direct, ported = Wire(near), Wire(far)
    try:
        small: dict[str, Contender] = {
            "direct": timed(lambda: direct.call(request("GET", "/")), lambda body: body == b"hello"),
            "url": timed(lambda: ported.call(request("GET", path)), lambda body: body == b"hello"),
        }
        taken = await rounds(small, ROUNDS, warm_up=30, progress=progress)
        large: dict[str, Contender] = {
            "direct": timed(lambda: direct.drain(request("GET", "/big"), chunked=False), _whole),
            "url": timed(lambda: ported.drain(request("GET", f"{path}big"), chunked=False), _whole),
        }
        loads = await rounds(large, DOWNLOADS, warm_up=1)
    finally:
        direct.close()
        ported.close()
    bursts: dict[str, Contender] = {
        "direct": timed(lambda: _burst(near, "/"), lambda count: count == AT_ONCE),
        "url": timed(lambda: _burst(far, path), lambda count: count == AT_ONCE),
    }
    crowds = await rounds(bursts, BURSTS, warm_up=1)
    what = f"a small answer, {ROUNDS} rounds; {SIZE_MB} MB; {AT_ONCE} requests at once"
    table = Table(what, ("", "median ms", "p99 ms", "MB/s", "all at once ms"))
    for name in small:
        each = taken[name]
        table.add(
            name,
            median(each) * 1e3,
            percentile(each, 99) * 1e3,
            SIZE_MB / median(loads[name]),
            median(crowds[name]) * 1e3,
        )
    figures = {
        "port_direct_ms": median(taken["direct"]) * 1e3,
        "port_url_ms": median(taken["url"]) * 1e3,
        "port_overhead_ms": (median(taken["url"]) - median(taken["direct"])) * 1e3,
        "port_download_mb_s": SIZE_MB / median(loads["url"]),
        "port_download_vs_direct": ratio(loads["direct"], loads["url"]),
        "port_burst_ms": median(crowds["url"]) * 1e3,
    }
    return Report(dict(figures), [table])


def _burst(address: Address, path: str) -> int:
    """Open many connections, send a request on each, and count the right answers."""
    message = request("GET", path, b"", {"connection": "close"})
    opened = [dial(address) for _ in range(AT_ONCE)]
    right = 0
    try:
        for each in opened:
            each.settimeout(60)
            each.sendall(message)
        for each in opened:
            data = b""
            while more := each.recv(65536):
                data += more
            right += data.startswith(b"HTTP/1.1 200") and data.endswith(b"hello")
    finally:
        for each in opened:
            each.close()
    return right


def _whole(got: tuple[int, bytes]) -> bool:
    return got[0] == SIZE_MB * MB
