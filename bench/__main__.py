"""`python -m bench [NAME…] [--json]`: runs benchmarks, prints tables, writes the figures to
`bench/results/latest.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import platform
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench import peers, workers
from bench.measure import BenchFailed, Figures, Progress, Report, keep_figures, rounded
from carrel.errors import CarrelError

LATEST = Path(__file__).parent / "results" / "latest.json"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. Its module has the same name and a function `run`."""

    name: str
    about: str
    apart: bool = False
    """Whether it only runs when it is named: not every machine has what it needs."""
    peers: bool = True
    """Whether it needs the peers."""


class Module(Protocol):
    """The interface of a benchmark's module."""

    async def run(self, progress: Progress) -> Report:
        """Measure, and remove everything afterwards."""


BENCHMARKS = {
    each.name: each
    for each in (
        Benchmark("start", "a sandbox, to the end of its first command"),
        Benchmark(
            "image_start", "a sandbox from an image beside one of the host's root, to the end of its first command"
        ),
        Benchmark(
            "gvisor",
            "gVisor sandboxes beside `runsc run` and `runsc exec`: cold start, start from a slot, a command, memory",
        ),
        Benchmark("docker", "containers beside `docker run`: cold, from a slot, a command, memory of a slot"),
        Benchmark(
            "kubernetes",
            "pods beside a bare Sandbox of agent-sandbox and exec through the API (needs a cluster)",
            apart=True,
        ),
        Benchmark("burst", "100 sandboxes at once, 500 alive"),
        Benchmark("execs", "a command in a running sandbox: socket, API, SDK"),
        Benchmark("rate", "commands per second with 8 clients"),
        Benchmark("workers", "operations per second of a server with several workers beside one", peers=False),
        Benchmark(
            "e2b",
            "E2B's Python SDK: create to first output, a command beside ours, 100 created at once",
            apart=True,
            peers=False,
        ),
        Benchmark("forward", "the same command and download by the server that has the sandbox, and by another"),
        Benchmark("ports", "a server in a sandbox by the URL of its port, and the same server directly", peers=False),
        Benchmark("remote", "a command of a supervisor over TCP with mutual TLS beside its Unix socket"),
        Benchmark("python", "a call of Python, a cell, pandas: warm beside cold and ipykernel"),
        Benchmark(
            "jobs", "jobs: from the queue to the work, and 1,000 of 8 clients beside the same commands by the SDK"
        ),
        Benchmark("router", "calls of Python without a context beside the same in contexts, 8 clients"),
        Benchmark("memory", "memory of an idle sandbox"),
        Benchmark("throughput", "output and files, MB/s"),
        Benchmark("snapshots", "snapshot, restore and fork of 1 GB in 20,000 files"),
        Benchmark("usage", "reading the usage of 200 workspaces every 30 s"),
        Benchmark("envs", "a Python environment that lies ready, attached to a running sandbox"),
        Benchmark("images", "unpacking a layer of an image beside GNU tar"),
        Benchmark("resume", "a stopped context, to the end of its first command"),
        Benchmark("redact", "taking 100 secrets out of output, MB/s"),
        Benchmark("policy", "a decision about a command, 60 and 10,000 rules"),
        Benchmark("egress", "the way out beside Squid, and under load"),
        Benchmark("a2a", "a task of the A2A agent beside the same command by the SDK"),
        Benchmark("mcp", "a call of a hosted MCP server's tool beside the same server over pipes"),
        Benchmark("events", "the event log: appending, 200 readers of one context"),
        Benchmark("traces", "a command without traces and with them"),
        Benchmark("audit", "appending to the audit log, searching a million records, verifying"),
        Benchmark("here_start", "what `carrel here` adds to the start of a program"),
        Benchmark("here_many", "`carrel here` on a folder of 100,000 files: first start, later ones, checkpoints"),
        Benchmark("here_build", "git, tests and make in `carrel here` beside the same done directly"),
    )
}


def module_of(name: str) -> Module:
    """Import the module of a benchmark."""
    return importlib.import_module(f"bench.{name}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    listing = "\n".join(f"  {each.name:<12}{each.about}" for each in BENCHMARKS.values())
    made = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure carrel beside its peers on this machine.",
        epilog=f"benchmarks:\n{listing}\n\nThe figures are kept in bench/results/latest.json.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "names", nargs="*", metavar="NAME", help="benchmarks to run; all but `kubernetes` when none is named"
    )
    made.add_argument(
        "--workers", metavar="N,N", default="1,2", help="numbers of workers that `workers` compares with the first"
    )
    made.add_argument("--clients", metavar="N", type=int, help="clients of `workers`, each a process")
    made.add_argument("--seconds", metavar="S", type=float, help="length of a round of `workers`")
    made.add_argument("--json", action="store_true", help="print the figures of this run as one JSON object")
    return made


def chosen(names: list[str]) -> list[str]:
    """Return the chosen benchmarks, each once."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise BenchFailed(f"no benchmark is named '{unknown[0]}'; there are: {', '.join(BENCHMARKS)}")
    return list(dict.fromkeys(names)) or [each.name for each in BENCHMARKS.values() if not each.apart]


def machine() -> Figures:
    """Describe the machine, on which the figures depend."""
    return {
        "machine_cores": os.cpu_count() or 0,
        "machine_kernel": platform.release(),
        "machine_python": platform.python_version(),
        "machine_bubblewrap": peers.bwrap_version() if shutil.which("bwrap") else "none",
        "machine_user": "root" if os.geteuid() == 0 else "ordinary",
        "machine_load_before": os.getloadavg()[0],
    }


def shown_progress(name: str) -> Progress:
    """Show the number of rounds on standard error, if it is a terminal."""
    last = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if sys.stderr.isatty() and (now - last > 0.2 or done == total):
            last = now
            print(f"\r{name}: {max(done, 0)}/{total} ", end="", file=sys.stderr, flush=True)

    return progress


async def measure(names: list[str], *, as_json: bool) -> Figures:
    """Run the benchmarks one after the other. Figures are written as soon as they are known."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    if any(BENCHMARKS[name].peers for name in names):
        peers.require()
    figures = rounded(machine())
    for name in names:
        print(f"{name}: {BENCHMARKS[name].about} …", file=sys.stderr, flush=True)
        began = time.monotonic()
        report = await module_of(name).run(shown_progress(name))
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        figures |= rounded(report.figures)
        keep_figures(LATEST, figures)
        if not as_json:
            for table in report.tables:
                print("\n" + "\n".join(table.lines()), flush=True)
            print(flush=True)
    return figures


def _options_of_workers(options: argparse.Namespace) -> workers.WorkerOptions:
    made = workers.WorkerOptions()
    words = options.workers.split(",")
    if len(words) < 2 or not all(word.isdigit() and 0 < int(word) <= 64 for word in words):
        raise BenchFailed(f"--workers takes two numbers or more, such as 1,2, and not '{options.workers}'")
    made.counts = [int(word) for word in words]
    made.clients = options.clients or made.clients
    made.seconds = options.seconds or made.seconds
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = parser().parse_args(arguments)
    try:
        names = chosen(options.names)
        workers.OPTIONS = _options_of_workers(options)
    except BenchFailed as error:
        print(error, file=sys.stderr)
        return 2
    try:
        figures = asyncio.run(measure(names, as_json=options.json))
    except (BenchFailed, CarrelError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except ExceptionGroup as group:
        known, unknown = group.split((BenchFailed, CarrelError))
        if known is None or unknown is not None:
            raise
        print(f"failed, {len(known.exceptions)} times: {known.exceptions[0]}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped; nothing is left behind", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(figures, indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
