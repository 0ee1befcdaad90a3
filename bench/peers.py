"""The peers: a plain process, `unshare` with seven namespaces, bubblewrap. Each is started as cheaply as possible."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence

from bench.measure import BenchFailed

TRUE = "/bin/true"
PLAIN = ("/bin/true",)
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--net", "--ipc", "--uts", "--cgroup")
BWRAP = (
    *("bwrap", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
    *("--unshare-all", "--die-with-parent"),
)
ONE_SHOTS: dict[str, tuple[str, ...]] = {
    "plain subprocess": PLAIN,
    "unshare, 7 namespaces": (*UNSHARE, TRUE),
    "bubblewrap": (*BWRAP, TRUE),
}


def require() -> None:
    """Check that the peers are installed: a ratio needs both sides."""
    for program, package in (("bwrap", "bubblewrap"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            raise BenchFailed(f"'{program}' is not installed; get it with `apt-get install {package}`")
    for name, command in ONE_SHOTS.items():
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
        if tried.returncode != 0:
            raise BenchFailed(f"{name} does not work on this host: {tried.stderr.strip()[:300]}")


def bwrap_version() -> str:
    """Return the version of bubblewrap, on which the ratios depend."""
    return subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]


def once(command: Sequence[str]) -> float:
    """Return the seconds of one run, from the call to the exit."""
    began = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - began


def at_once(command: Sequence[str], count: int) -> float:
    """Return the seconds until `count` processes, all started before any is waited for, have ended successfully."""
    running: list[subprocess.Popen[bytes]] = []
    began = time.perf_counter()
    try:
        for _ in range(count):
            running.append(subprocess.Popen(command))  # noqa: PERF401 - each must be known if the next fails
        failed = sum(process.wait() != 0 for process in running)
        took = time.perf_counter() - began
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    if failed:
        raise BenchFailed(f"{failed} of {count} '{command[0]}' failed")
    return took


def rate(command: Sequence[str], clients: int, seconds: float) -> float:
    """Return the runs per second with `clients` of them always running.

    One loop of spawn and wait instead of threads, so that the driver costs the peer almost nothing.
    """
    program = shutil.which(command[0])
    if program is None:
        raise BenchFailed(f"'{command[0]}' is not installed")
    running: set[int] = set()
    done = 0
    try:
        began = time.perf_counter()
        ends = began + seconds
        for _ in range(clients):
            running.add(os.posix_spawn(program, [*command], os.environ))
        while running:
            pid, status = os.waitpid(-1, 0)
            if pid not in running:
                continue
            running.discard(pid)
            if status != 0:
                raise BenchFailed(f"'{command[0]}' failed under load with status {status}")
            done += 1
            if time.perf_counter() < ends:
                running.add(os.posix_spawn(program, [*command], os.environ))
        return done / (time.perf_counter() - began)
    finally:
        for pid in running:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
