"""What `carrel here` adds to the start of a program: without a server, and where one runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from statistics import median

from carrel.cli.here_server import server_for

ROUNDS = 15


def measure() -> dict[str, float]:
    """Return the medians of `carrel here -- true` minus `true`, in milliseconds."""
    with tempfile.TemporaryDirectory(prefix="carrel-bench-", ignore_cleanup_errors=True) as base:
        folder = os.path.join(base, "project")
        os.mkdir(folder)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CARREL_")}
        env = {**kept, "CARREL_DATA_DIR": os.path.join(base, "data")}
        here = [os.path.join(os.path.dirname(sys.executable), "carrel"), "here", "--", "true"]
        bare = [_once(["true"], folder, env) for _ in range(ROUNDS)]
        _once(here, folder, env)  # makes the data directory
        cold = [_once(here, folder, env) for _ in range(ROUNDS // 3)]
        os.environ["CARREL_DATA_DIR"] = env["CARREL_DATA_DIR"]
        with server_for(folder):
            _once(here, folder, env)
            warm = [_once(here, folder, env) for _ in range(ROUNDS)]
    return {
        "here_start_added_ms": round((median(cold) - median(bare)) * 1000, 1),
        "here_start_warm_added_ms": round((median(warm) - median(bare)) * 1000, 1),
    }


def _once(command: list[str], folder: str, env: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, env=env, check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    print(measure())
