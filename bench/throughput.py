"""Megabytes per second of a command's output and of files down and up, at the socket and through the SDK, compared with
a pipe.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from bench import ground
from bench.measure import BenchFailed, Contender, Progress, Report, Table, median, rounds
from bench.wire import Wire, request
from carrel.client import Client, Sandbox
from carrel.models import MAX_OUTPUT_BYTES

SIZE = MAX_OUTPUT_BYTES
ROUNDS = 4
# Lines of text, as programs write them: zeros would grow sixfold as JSON, and only that would be measured.
TEXT = f"yes {'carrel ' * 11} | head -c {SIZE}"
MB = 1e6


async def run(progress: Progress) -> Report:
    """Measure."""
    content = memoryview(bytes(SIZE))
    async with ground.scratch() as place, ground.sandboxes() as boxes, ground.server() as server:
        wire = Wire(ground.reach(await boxes.start()))
        with Client(server.url, server.token) as client, client.sandbox() as box:
            try:
                # Reading needs an existing file, and all later rounds replace one.
                _upload(wire, content)
                box.files.write("big", content)
                contenders: dict[str, Contender] = {
                    "output, plain pipe": _turn(_pipe),
                    "output, socket": _turn(lambda: _output(wire)),
                    "output, SDK stream": _turn(lambda: _sdk_output(box)),
                    "file copy, plain": _turn(lambda: _copy(place)),
                    "download, socket": _turn(lambda: _download(wire)),
                    "download, SDK": _turn(lambda: _sdk_download(box)),
                    "upload, socket": _turn(lambda: _upload(wire, content)),
                    "upload, SDK": _turn(lambda: _sdk_upload(box, content)),
                }
                _make_source(place)
                samples = await rounds(contenders, ROUNDS, progress=progress)
            finally:
                wire.close()
    table = Table(f"throughput, {SIZE // 2**20} MiB, {ROUNDS} rounds", ("", "median MB/s", "least MB/s"))
    for name, speeds in samples.items():
        table.add(name, median(speeds), min(speeds))
    keys = {
        "throughput_pipe_mbs": "output, plain pipe",
        "throughput_output_socket_mbs": "output, socket",
        "throughput_output_sdk_mbs": "output, SDK stream",
        "throughput_copy_mbs": "file copy, plain",
        "throughput_download_socket_mbs": "download, socket",
        "throughput_download_sdk_mbs": "download, SDK",
        "throughput_upload_socket_mbs": "upload, socket",
        "throughput_upload_sdk_mbs": "upload, SDK",
    }
    return Report({key: median(samples[name]) for key, name in keys.items()}, [table])


def _turn(work: Callable[[], int]) -> Contender:
    async def turn() -> float:
        await asyncio.sleep(0.02)
        began = time.perf_counter()
        moved = work()
        took = time.perf_counter() - began
        if moved != SIZE:
            raise BenchFailed(f"{moved} bytes arrived instead of {SIZE}")
        return moved / took / MB

    return turn


def _pipe() -> int:
    with subprocess.Popen(["sh", "-c", TEXT], stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        got = 0
        while piece := process.stdout.read(1 << 20):
            got += len(piece)
    return got


def _make_source(place: Path) -> None:
    with (place / "source").open("wb") as file:
        file.write(bytes(SIZE))


def _copy(place: Path) -> int:
    # Read and write instead of cloning, as the others do.
    with (place / "source").open("rb") as source, (place / "copy").open("wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
        return copy.tell()


def _output(wire: Wire) -> int:
    body = json.dumps({"command": TEXT, "output_limit": SIZE, "timeout": 60}).encode()
    command = json.loads(wire.call(request("POST", "/commands", body)))["id"]
    _got, tail = wire.drain(request("GET", f"/commands/{command}/output?offset=0&follow=1"), chunked=True)
    # The end frame has the number of bytes written and dropped.
    end = json.loads(tail[tail.rindex(b'{"') : tail.rindex(b"}") + 1])
    wire.call(request("DELETE", f"/commands/{command}"))
    if end["exit_code"] != 0:
        raise BenchFailed(f"the command failed: {end}")
    return int(end["output_bytes"]) - int(end["dropped_bytes"])


def _download(wire: Wire) -> int:
    return wire.drain(request("GET", "/files/content?path=big"), chunked=False)[0]


def _upload(wire: Wire, content: memoryview) -> int:
    info = json.loads(wire.upload(request("PUT", "/files/content?path=big", length=len(content)), content))
    return int(info["size"])


def _sdk_output(box: Sandbox) -> int:
    with box.commands.stream(TEXT, output_limit=SIZE, timeout=60) as stream:
        return sum(len(chunk.data) for chunk in stream)


def _sdk_download(box: Sandbox) -> int:
    return sum(len(piece) for piece in box.files.stream("big"))


def _sdk_upload(box: Sandbox, content: memoryview) -> int:
    return box.files.write("big", content).size
