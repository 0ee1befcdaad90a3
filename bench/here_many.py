"""`carrel here` on a repository of many files, where a server runs: the first start, which records every file, and the
next ones. Beside it `git add` and `cp -a` of the same files.

`CARREL_BENCH_FILES` makes the repository smaller. Processor time is shown too: on a busy machine it says more than the
time on the clock. Everything is on the disk before each measurement.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from unittest.mock import patch

from bench.here_start import CARREL, environment, wait_for_end
from bench.measure import Figures, Progress, Report, Table, median
from carrel.cli.here.server import server_for
from carrel.workspaces.checkpoints import CheckpointKind, CheckpointStore

FILES = int(os.environ.get("CARREL_BENCH_FILES", "100000"))
IN_DIRECTORY = 20
AGAIN = 5
STEPS = 5
LARGEST = 200_000
GIT = ["git", "-c", "user.name=bench", "-c", "user.email=bench@example.com", "-c", "gc.auto=0", "-c", "pack.window=0"]


@dataclass
class Times:
    """What one thing took each time: seconds on the clock, and of all processors."""

    clock: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, work: Callable[[], object]) -> None:
        """Do it once more."""
        os.sync()
        cpu, clock = _cpu(), time.perf_counter()
        work()
        self.clock.append(time.perf_counter() - clock)
        self.cpu.append(_cpu() - cpu)


async def run(progress: Progress) -> Report:
    """Measure."""
    with tempfile.TemporaryDirectory(prefix="carrel-bench-", ignore_cleanup_errors=True) as base:
        return await asyncio.to_thread(_run, base, progress)


def _run(base: str, progress: Progress) -> Report:
    folder, data = os.path.join(base, "project"), os.path.join(base, "data")
    _write_files(folder)
    progress(1, STEPS)
    copy, add, first, again = Times(), Times(), Times(), Times()
    copy.measure(lambda: subprocess.run(["cp", "-a", folder, f"{folder}-copy"], check=True))
    shutil.rmtree(f"{folder}-copy")
    add.measure(lambda: _git(folder, ["init", "-q"], ["add", "."]))
    _git(folder, ["commit", "-qm", "Start"], ["repack", "-adq"], ["prune-packed", "-q"])
    progress(2, STEPS)
    store = CheckpointStore(os.path.join(base, "store"), most_bytes=1 << 40)
    store.open()
    first.measure(lambda: store.take("bench", folder, CheckpointKind.START))
    for number in range(AGAIN):
        _change(folder, number)
        again.measure(lambda: store.take("bench", folder, CheckpointKind.START))
    progress(3, STEPS)
    starts: list[float] = []
    wholes = Times()
    env = environment(data)
    try:
        with patch.dict(os.environ, env), server_for(folder):
            for number in range(1 + AGAIN):
                _change(folder, number)
                wholes.measure(lambda: starts.append(_start(folder, env)))
                progress(4, STEPS)
    finally:
        wait_for_end(data)
    figures: Figures = {
        "here_many_files": FILES,
        "here_many_checkpoint_first_s": first.clock[0],
        "here_many_checkpoint_again_s": median(again.clock),
        "here_many_again_vs_first": median(again.clock) / first.clock[0],
        "here_many_again_vs_first_cpu": median(again.cpu) / first.cpu[0],
        "here_many_first_vs_git_add": first.clock[0] / add.clock[0],
        "here_many_first_vs_cp": first.clock[0] / copy.clock[0],
        "here_many_first_start_s": starts[0],
        "here_many_start_s": median(starts[1:]),
        "here_many_whole_s": median(wholes.clock[1:]),
        "here_many_load": os.getloadavg()[0],
    }
    table = Table(f"a folder of {FILES} files, load {os.getloadavg()[0]:.1f}", ("", "seconds", "CPU s"))
    for name, times in (("cp -a", copy), ("git add", add), ("first checkpoint", first), ("checkpoint again", again)):
        table.add(name, median(times.clock), median(times.cpu))
    table.add("carrel here, first start, to the first output", starts[0], None)
    table.add("carrel here, started again, to the first output", median(starts[1:]), None)
    table.add("carrel here, started again, whole command", median(wholes.clock[1:]), None)
    progress(STEPS, STEPS)
    return Report(figures, [table])


def _cpu() -> float:
    used: Iterable[resource.struct_rusage] = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _write_files(folder: str) -> None:
    """Write files of the sizes and compressibility of source code."""
    chance = random.Random(1)
    words = [chance.randbytes(4).hex() for _ in range(4000)]
    for number in range(FILES):
        part, module = divmod(number // IN_DIRECTORY, 100)
        directory = os.path.join(folder, f"part{part}", f"module{module}")
        if number % IN_DIRECTORY == 0:
            os.makedirs(directory)
        size = min(LARGEST, max(40, int(chance.lognormvariate(7.6, 1.2))))
        with open(os.path.join(directory, f"file{number % IN_DIRECTORY}.py"), "w", encoding="utf-8") as file:
            file.write(" ".join(chance.choices(words, k=size // 9 + 1)) + "\n")


def _change(folder: str, number: int) -> None:
    for module in range(10):
        path = os.path.join(folder, "part0", f"module{module}", f"file{number}.py")
        with suppress(FileNotFoundError), open(path, "a", encoding="utf-8") as file:
            file.write(f"changed {number}\n")


def _git(folder: str, *commands: list[str]) -> None:
    for words in commands:
        subprocess.run([*GIT, "-C", folder, *words], check=True)


def _start(folder: str, env: dict[str, str]) -> float:
    """Run a program to its end; return when its first output came."""
    began = time.perf_counter()
    command = [CARREL, "here", "--", "echo", "begun"]
    with subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"b"
        return time.perf_counter() - began
