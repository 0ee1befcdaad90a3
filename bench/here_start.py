"""What `carrel here` adds to the start of a program: without a server, and where one runs.

Measured: from the call to the first byte that the program prints, in turns with the bare program. `whole` is until the
command has ended: then the sandbox has ended too, and the folder is recorded.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from unittest.mock import patch

from bench.measure import Contender, Figures, Progress, Report, Table, median, rounds
from carrel.cli.here.server import server_for

ROUNDS = 9
PROGRAM = ["echo", "begun"]
CARREL = os.path.join(os.path.dirname(sys.executable), "carrel")


async def run(progress: Progress) -> Report:
    """Measure."""
    with tempfile.TemporaryDirectory(prefix="carrel-bench-", ignore_cleanup_errors=True) as base:
        folder = os.path.join(base, "project")
        os.mkdir(folder)
        cold, warm = environment(os.path.join(base, "cold")), environment(os.path.join(base, "warm"))
        wholes: dict[str, list[float]] = {"bare": [], "cold": [], "warm": []}
        here = [CARREL, "here", "--", *PROGRAM]
        contenders: dict[str, Contender] = {
            "bare": _begin(PROGRAM, folder, warm, wholes["bare"]),
            "cold": _begin(here, folder, cold, wholes["cold"], before=lambda: wait_for_end(os.path.join(base, "cold"))),
            "warm": _begin(here, folder, warm, wholes["warm"]),
        }
        try:
            with patch.dict(os.environ, warm), server_for(folder):
                starts = await rounds(contenders, ROUNDS, warm_up=2, progress=progress)
        finally:
            for name in ("cold", "warm"):
                wait_for_end(os.path.join(base, name))
    table = Table(f"`carrel here` beside the bare program, {ROUNDS} rounds", ("", "first output ms", "whole ms"))
    for name, taken in starts.items():
        table.add(name, median(taken) * 1e3, median(wholes[name][2:]) * 1e3)
    added = {name: (median(taken) - median(starts["bare"])) * 1e3 for name, taken in starts.items()}
    whole = {name: (median(taken[2:]) - median(wholes["bare"][2:])) * 1e3 for name, taken in wholes.items()}
    figures: Figures = {
        "here_start_added_ms": added["cold"],
        "here_start_warm_added_ms": added["warm"],
        "here_whole_added_ms": whole["cold"],
        "here_whole_warm_added_ms": whole["warm"],
    }
    return Report(figures, [table])


def environment(data_dir: str) -> dict[str, str]:
    """Return the variables of a user whose servers use this data directory."""
    left_out = ("CARREL_", "PYTHONDONTWRITEBYTECODE")  # a user's Python keeps what it has compiled
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**kept, "CARREL_DATA_DIR": data_dir}


def wait_for_end(data_dir: str) -> None:
    """Wait until no server uses a data directory."""
    path = f"{data_dir}-here/lock"
    if os.path.exists(path):
        with open(path, "rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)


def _begin(
    command: list[str],
    folder: str,
    env: Mapping[str, str],
    whole: list[float],
    before: Callable[[], None] = lambda: None,
) -> Contender:
    async def turn() -> float:
        before()
        began = time.perf_counter()
        with subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.read(1) == b"b"
            took = time.perf_counter() - began
        whole.append(time.perf_counter() - began)
        return took

    return turn
