"""Python in a running sandbox through the SDK: a call compared with starts of the interpreter, a cell compared with
ipykernel, and pandas warm compared with cold.

ipykernel and pandas come from a virtual environment that `uv` makes for the run, or from the one in
`CARREL_BENCH_VENV`. Without either (no network), the benchmarks that need them are left out.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import ground
from bench.measure import Contender, Progress, Report, Table, median, ratio, rounds, timed
from carrel.client import Client, Sandbox

ROUNDS = 200
FEW = 20
CLIENTS, CALLS = 8, 40
PYTHON = "/usr/bin/python3"
JUPYTER = """
import sys, time
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="python3")

def cell(code):
    began = time.perf_counter()
    name, idle, replied = client.execute(code), False, False
    while not idle:
        told = client.get_iopub_msg(timeout=30)
        mine = told["parent_header"].get("msg_id") == name
        idle = mine and told["msg_type"] == "status" and told["content"]["execution_state"] == "idle"
    while not replied:
        replied = client.get_shell_msg(timeout=30)["parent_header"].get("msg_id") == name
    return time.perf_counter() - began

print("ready", flush=True)
for line in sys.stdin:
    print(cell(line.strip()), flush=True)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


async def run(progress: Progress) -> Report:
    """Measure."""
    async with ground.scratch() as place, ground.server() as server:
        with Client(server.url, server.token) as client:
            with client.sandbox() as box:
                report = await _calls(box, progress)
                report.figures["python_calls_per_s_8_clients"] = await _throughput(server, box)
            venv = await asyncio.to_thread(_venv, place)
            if venv is not None:
                with client.sandbox() as box:
                    await _cells(box, venv, report, progress)
                with client.sandbox(limits={"disk_mb": 4096}) as box:
                    await _pandas(box, venv, report)
    return report


async def _calls(box: Sandbox, progress: Progress) -> Report:
    contenders: dict[str, Contender] = {
        "python3 -S -c pass": timed(lambda: _python("-S", "-c", "pass")),
        "python3 -c 'print(1)'": timed(lambda: _python("-c", "print(1)")),
        "carrel, print(1)": timed(lambda: box.python.run("print(1)"), lambda result: result.stdout == "1\n"),
    }
    samples = await rounds(contenders, ROUNDS, warm_up=10, progress=progress)
    bare, cold, warm = samples.values()
    table = Table(f"a call of Python, {ROUNDS} rounds", ("", "median ms", "× bare start"))
    for name, taken in samples.items():
        table.add(name, median(taken) * 1e3, ratio(taken, bare))
    figures = {
        "python_warm_ms": median(warm) * 1e3,
        "python_warm_vs_bare_start": ratio(warm, bare),
        "python_warm_vs_cold": ratio(warm, cold),
    }
    return Report({**figures}, [table])


async def _throughput(server: ground.Server, box: Sandbox) -> float:
    def one(number: int) -> None:
        with Client(server.url, server.token) as client:
            mine = client.attach(client.find(box.id))
            for _ in range(CALLS):
                assert mine.python.run(f"print({number})").stdout == f"{number}\n"

    def all_of_them() -> float:
        with ThreadPoolExecutor(CLIENTS) as threads:
            began = time.perf_counter()
            list(threads.map(one, range(CLIENTS)))
            return CLIENTS * CALLS / (time.perf_counter() - began)

    return await asyncio.to_thread(all_of_them)


async def _cells(box: Sandbox, venv: Path, report: Report, progress: Progress) -> None:
    context = box.python.context("bench")
    context.run("1")
    with subprocess.Popen(
        [venv / "bin" / "python", "-c", JUPYTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as kernel:
        assert kernel.stdin is not None and kernel.stdout is not None
        assert await asyncio.to_thread(kernel.stdout.readline) == "ready\n"
        contenders = {
            "ipykernel, jupyter_client": _jupyter(kernel),
            "carrel, SDK": timed(lambda: context.run("1 + 1"), lambda result: result.text == "2"),
        }
        samples = await rounds(contenders, ROUNDS, warm_up=10, progress=progress)
        kernel.stdin.close()
    theirs, ours = samples.values()
    table = Table(f"a cell, `1 + 1`, {ROUNDS} rounds", ("", "median ms", "× ipykernel"))
    for name, taken in samples.items():
        table.add(name, median(taken) * 1e3, ratio(taken, theirs))
    report.tables.append(table)
    report.figures |= {"cell_ms": median(ours) * 1e3, "cell_vs_ipykernel": ratio(ours, theirs)}


async def _pandas(box: Sandbox, venv: Path, report: Report) -> None:
    archive = await asyncio.to_thread(_archive, venv)
    box.files.write("venv.tar", archive)
    unpacked = box.commands.run("tar xf venv.tar && rm venv.tar && .venv/bin/python -c 'import pandas'", timeout=300)
    assert unpacked.exit_code == 0, unpacked
    code = "import pandas; print(pandas.Series([1]).sum())"
    assert box.python.run(code).stdout == "1\n"
    contenders: dict[str, Contender] = {
        "python -c 'import pandas'": timed(
            lambda: box.commands.run([".venv/bin/python", "-c", code]), lambda result: result.exit_code == 0
        ),
        "carrel, warm": timed(lambda: box.python.run(code), lambda result: result.stdout == "1\n"),
    }
    samples = await rounds(contenders, FEW, warm_up=2)
    cold, warm = samples.values()
    table = Table(f"pandas imported and used, {FEW} rounds", ("", "median ms", "× cold"))
    for name, taken in samples.items():
        table.add(name, median(taken) * 1e3, ratio(taken, cold))
    report.tables.append(table)
    report.figures |= {"pandas_warm_ms": median(warm) * 1e3, "pandas_speedup": ratio(cold, warm)}


def _venv(place: Path) -> Path | None:
    """Make a virtual environment with ipykernel and pandas; None if that is not possible."""
    named = os.environ.get("CARREL_BENCH_VENV")
    if named:
        return Path(named)
    target = place / "venv"
    uv = [sys.executable, "-m", "uv", "--quiet"]
    packages = ["ipykernel", "jupyter_client", "pandas"]
    steps = (
        [*uv, "venv", "--python", PYTHON, str(target)],
        [*uv, "pip", "install", "--python", str(target / "bin" / "python"), *packages],
    )
    for step in steps:
        if subprocess.run(step, capture_output=True, check=False).returncode != 0:
            return None
    return target


def _archive(venv: Path) -> bytes:
    """Pack the environment as a tar archive that unpacks to `.venv`, with pandas to be imported ahead."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.add(venv, ".venv", filter=lambda each: None if "/debugpy" in each.name else each)
        wanted = json.dumps({"imports": ["pandas"]}).encode()
        entry = tarfile.TarInfo(".venv/carrel-env.json")
        entry.size = len(wanted)
        archive.addfile(entry, io.BytesIO(wanted))
    return made.getvalue()


def _python(*words: str) -> None:
    subprocess.run([PYTHON, *words], stdout=subprocess.DEVNULL, check=True)


def _jupyter(kernel: subprocess.Popen[str]) -> Contender:
    async def turn() -> float:
        assert kernel.stdin is not None and kernel.stdout is not None
        kernel.stdin.write("1 + 1\n")
        kernel.stdin.flush()
        return float(kernel.stdout.readline())

    return turn
