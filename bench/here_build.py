"""Everyday work of a developer in the sandbox of `carrel here`, beside the same work done directly, in turns.

Measured inside by the same small script: `git status`, a run of unit tests, and `make` of a small C program. The start
of the sandbox is not part of it; see `here_start`.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from unittest.mock import patch

from bench.here_start import CARREL, environment, wait_for_end
from bench.measure import Contender, Figures, Progress, Report, Table, median, paired_ratio, rounds
from carrel.cli.here.server import server_for

ROUNDS = 9
FILES = 12
JOBS = {
    "git_status": ["git", "status", "--short"],
    "tests": ["python3", "-m", "unittest", "-q"],
    "build": ["make", "-B", "-s"],
}
REPEATED = {"git_status": 10}
TIMING = """
import subprocess, sys, time
began = time.perf_counter()
for _ in range(int(sys.argv[1])):
    subprocess.run(sys.argv[2:], check=True, capture_output=True)
print(time.perf_counter() - began)
"""
TEST = """
import pathlib, subprocess, tempfile, unittest
class Test(unittest.TestCase):
    def test_files(self):
        with tempfile.TemporaryDirectory(dir=".") as place:
            for number in range(300):
                path = pathlib.Path(place, str(number))
                path.write_text("x" * 1000)
                self.assertEqual(len(path.read_text()), 1000)
    def test_programs(self):
        for number in range(20):
            self.assertEqual(subprocess.check_output(["echo", str(number)]), b"%d\\n" % number)
    def test_work(self):
        self.assertEqual(sum(number * number for number in range(300_000)), 8999955000050000)
"""


async def run(progress: Progress) -> Report:
    """Measure."""
    with tempfile.TemporaryDirectory(prefix="carrel-bench-", ignore_cleanup_errors=True) as base:
        folder, data = os.path.join(base, "project"), os.path.join(base, "data")
        _write_project(folder)
        env = environment(data)
        contenders: dict[str, Contender] = {}
        for name, job in JOBS.items():
            words = ["python3", "timing.py", str(REPEATED.get(name, 1)), *job]
            contenders[f"{name}, bare"] = _inside(words, folder, env)
            contenders[name] = _inside([CARREL, "here", "--", *words], folder, env)
        try:
            with patch.dict(os.environ, env), server_for(folder):
                samples = await rounds(contenders, ROUNDS, warm_up=1, progress=progress)
        finally:
            wait_for_end(data)
    table = Table(f"work in `carrel here`, {ROUNDS} rounds", ("", "median ms", "bare ms", "× bare"))
    figures: Figures = {}
    for name in JOBS:
        ours, bare = samples[name], samples[f"{name}, bare"]
        figures[f"here_{name}_vs_bare"] = times = paired_ratio(ours, bare)
        table.add(name, median(ours) * 1e3, median(bare) * 1e3, times)
    return Report(figures, [table])


def _write_project(folder: str) -> None:
    os.mkdir(folder)
    files = {"timing.py": TIMING, "test_project.py": TEST}
    calls = "".join(f"int f{number}(int); " for number in range(FILES))
    total = "+".join(f"f{number}({number})" for number in range(FILES))
    files["main.c"] = f'#include <stdio.h>\n{calls}\nint main(void) {{ printf("%d\\n", {total}); return 0; }}\n'
    for number in range(FILES):
        files[f"f{number}.c"] = f"#include <stdlib.h>\n#include <string.h>\nint f{number}(int x) {{ return abs(x); }}\n"
    objects = " ".join(["main.o", *(f"f{number}.o" for number in range(FILES))])
    files["Makefile"] = f"program: {objects}\n\tcc -o program {objects}\n"
    files[".gitignore"] = "*.o\nprogram\n__pycache__\n"
    for name, text in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    git = ["git", "-c", "user.name=bench", "-c", "user.email=bench@example.com", "-C", folder]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "Start"]):
        subprocess.run([*git, *words], check=True)


def _inside(command: list[str], folder: str, env: Mapping[str, str]) -> Contender:
    async def turn() -> float:
        return float(subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.PIPE).stdout)

    return turn
