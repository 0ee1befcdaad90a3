"""Code that goes wrong in every way there is, as a call, as a cell and as a call without a sandbox of one's own: each is
answered for what it is, and the next one works.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import pytest
from tests.support.servers import SMALL, Server

from carrel.client import Client, Sandbox

Way = Literal["call", "cell", "stateless"]
WAYS: tuple[Way, ...] = ("call", "cell", "stateless")


@dataclass
class Outcome:
    """What came of a code, whichever way it ran."""

    way: Way
    stdout: str
    stderr: str
    exit_code: int | None
    signal: str | None
    timed_out: bool
    truncated: bool
    oom_killed: bool
    status: str

    @property
    def out_of_memory(self) -> bool:
        """Killed for it, or refused more and told so."""
        return self.oom_killed or "MemoryError" in self.stderr


@dataclass
class Place:
    """Where codes run in one way."""

    way: Way
    server: Server
    opened: list[Sandbox] = field(default_factory=list)

    def run(self, code: str, timeout: float = 20) -> Outcome:
        if self.way == "stateless":
            got = self.server.client.python.run(code, template=SMALL, timeout=timeout)
            ended = (got.exit_code, got.signal, got.timed_out, got.truncated, got.oom_killed)
            return Outcome(self.way, got.output, got.stderr, *ended, status="ok")
        if not self.opened:
            self.opened.append(self.server.client.sandbox(template=SMALL))
        box = self.opened[0]
        if self.way == "call":
            done = box.python.run(code, timeout=timeout)
            ended = (done.exit_code, done.signal, done.timed_out, done.truncated, done.oom_killed)
            return Outcome(self.way, done.stdout, done.stderr, *ended, status="ok")
        cell = box.python.context("work").run(code, timeout=timeout)
        said = cell.stderr + (cell.error.traceback if cell.error else "")
        ended = (cell.exit_code, cell.signal, cell.timed_out, cell.truncated, cell.oom_killed)
        return Outcome(self.way, cell.stdout, said, *ended, status=cell.status)


Judge = Callable[[Outcome], bool]


def _deadline(got: Outcome) -> bool:
    ended = got.status == "interrupted" if got.way == "cell" else got.signal == "SIGKILL"
    return got.timed_out and ended and got.stdout == "up\n"


def _left(got: Outcome) -> bool:
    return got.exit_code == 7 and got.status == ("died" if got.way == "cell" else "ok")


def _killed(got: Outcome) -> bool:
    """It may be quicker than what it killed, or not."""
    return "survived" in got.stdout or got.signal == "SIGKILL" or got.status == "died"


FAULTS: dict[str, tuple[str, float, Judge]] = {
    "deadline": ("import time; print('up', flush=True); time.sleep(60)", 1.0, _deadline),
    "memory bomb": (
        "def bomb():\n    held = []\n    while True: held.append(bytearray(1 << 24))\nbomb()",
        20.0,
        lambda got: got.out_of_memory and not got.timed_out,
    ),
    "endless output": (
        "while True: print('y' * 1000)",
        1.0,
        lambda got: got.timed_out and got.truncated and len(got.stdout) >= 1 << 20,
    ),
    "fork bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        1.0,
        lambda got: got.timed_out or got.oom_killed,  # many small ones are much together
    ),
    "os._exit": ("import os; os._exit(7)", 20.0, _left),
    "closed streams": (
        "import os, sys; sys.stdout.flush(); os.close(1); os.close(2); print('nowhere')",
        20.0,
        lambda got: got.stdout == "" and not got.timed_out,
    ),
    "broken UTF-8": (
        r"import sys; sys.stdout.buffer.write(b'\xff\xfe\xc3ok'); sys.stdout.flush()",
        20.0,
        lambda got: got.stdout.endswith("ok") and got.status == "ok",
    ),
    "a result of 100 MB": (
        "import sys\nfor _ in range(100): sys.stdout.write('x' * 1_000_000)\n'z' * 100_000_000",
        20.0,
        lambda got: got.truncated and len(got.stdout) == 1 << 20 and not got.timed_out,
    ),
    "kills its host": (
        "import os; os.kill(os.getppid(), 9); print('survived', flush=True)",
        20.0,
        _killed,
    ),
    "kills its interpreter": (
        "import os\nstat = open(f'/proc/{os.getppid()}/stat').read()\n"
        "os.kill(int(stat.rpartition(')')[2].split()[1]), 9); print('survived', flush=True)",
        20.0,
        _killed,
    ),
    "kills all": ("import os; os.kill(-1, 9); print('survived', flush=True)", 20.0, _killed),
    "stops itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", 1.0, lambda got: got.timed_out),
    "stops its host": (
        "import os, signal; print('up', flush=True); os.kill(os.getppid(), signal.SIGSTOP)",
        1.0,
        lambda got: got.stdout == "up\n" and (got.timed_out or got.way == "cell"),
    ),
    "starves its host": (
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3))",
        20.0,
        lambda got: got.status == "ok" and got.stderr == "",
    ),
    "a null pointer": ("import ctypes; ctypes.string_at(0)", 20.0, lambda got: got.signal == "SIGSEGV"),
}


@pytest.fixture(scope="module")
def places() -> Iterator[dict[tuple[int, Way], Place]]:
    """A sandbox for all faults of one way: whatever one leaves, the next must not notice."""
    made: dict[tuple[int, Way], Place] = {}
    yield made
    for each in made.values():
        for box in each.opened:
            box.terminate()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_each_is_answered_and_the_next_call_works(
    scientific: Server, places: dict[tuple[int, Way], Place], way: Way, fault: str
) -> None:
    place = places.setdefault((scientific.pid, way), Place(way, scientific))
    code, timeout, judge = FAULTS[fault]
    got = place.run(code, timeout)
    if timeout < 20 and got.timed_out and not judge(got):
        got = place.run(code, 20)  # on a machine that stood still, the short deadline may come before the fault
    assert judge(got), got
    for number in range(2):
        after = place.run(f"import json; print(json.dumps({number}))")
        assert (after.stdout, after.stderr, after.timed_out) == (f"{number}\n", "", False), after


FILL = """
import os, signal, time
full = []
while True:
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(600)
    full.append(pid)
print("full", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
for pid in full:
    os.kill(pid, signal.SIGKILL)
"""


def test_calls_that_find_no_process_left_wait_for_some_to_end(scientific: Server) -> None:
    url = json.loads((scientific.data_dir / "server.json").read_text())["url"]
    token = (scientific.data_dir / "token").read_text().strip()
    with Client(url, token) as client, ThreadPoolExecutor(6) as callers:
        box = client.sandbox(template=SMALL)
        try:
            box.files.write("fill.py", FILL)
            assert box.python.run("print(1)").stdout == "1\n"
            with box.commands.start("python3 fill.py").stream() as filled:
                assert next(filled).text == "full\n"
            calls = [callers.submit(box.python.run, f"print({number})") for number in range(6)]
            box.files.write("go", b"")
            assert [call.result().stdout for call in calls] == [f"{number}\n" for number in range(6)]
        finally:
            box.terminate()
