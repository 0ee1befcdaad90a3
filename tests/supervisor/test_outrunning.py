"""Processes that one look at the list of processes misses: a deadline or a DELETE ends them all the same."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.support.sandboxes import Box, until

from carrel.supervisor.reaper import processes

# Each says that it runs, and holds its end of a pipe for as long as one process of it lives.
BEGIN = "import ctypes, os, threading, time\nbeat = os.open('beat', os.O_WRONLY)\nos.write(beat, b'runs')\n"
EXIT_OF_A_THREAD = "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)\n"
HEADLESS = f"threading.Thread(target=time.sleep, args=(7777,)).start()\n{EXIT_OF_A_THREAD}"
HOPS = (
    "if os.fork(): time.sleep(7777)\nwhile True:\n  try:\n    if os.fork(): os._exit(0)\n    {}\n  except OSError: pass"
)
ELUSIVE = {
    "forks and ends": HOPS.format("pass"),
    "and leaves its session": HOPS.format("os.setsid()"),
    "has no first thread any more": HEADLESS,
    "has a parent without one": f"if os.fork() == 0: time.sleep(7777)\n{HEADLESS}",
}


@pytest.fixture
def beat(box: Box) -> Iterator[int]:
    """The end of a pipe in the workspace that tells whether anybody has the other."""
    os.mkfifo(box.workspace / "beat")
    (box.workspace / "beat").chmod(0o666)
    descriptor = os.open(box.workspace / "beat", os.O_RDONLY | os.O_NONBLOCK)
    yield descriptor
    os.close(descriptor)


def heard(beat: int) -> bytes | None:
    try:
        return os.read(beat, 64)
    except BlockingIOError:
        return None


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("kind", ELUSIVE)
async def test_what_is_hard_to_see_is_ended(box: Box, beat: int, kind: str, beside: bool) -> None:
    supervisor = box.supervisor
    other = await supervisor.start("sleep 8888") if beside else None
    for deadline in (0.5, 60, 60):
        command = await supervisor.start(["python3", "-c", BEGIN + ELUSIVE[kind]], timeout=deadline)
        if deadline == 60:
            await until(lambda: heard(beat), what="a first word")
            await supervisor.ask("DELETE", f"/commands/{command}")
        else:
            assert (await supervisor.result(command))["timed_out"]
        await until(lambda: heard(beat) == b"", what="the end of all of it")
    if other:
        assert (await supervisor.info(other))["running"]


def test_a_process_without_its_first_thread_is_one() -> None:
    pid = os.fork()
    if pid == 0:
        os.execlp("python3", "python3", "-c", f"import ctypes, os, threading, time\n{HEADLESS}")
    try:
        while True:
            with open(f"/proc/{pid}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] == b"Z":
                    break
        assert processes()[pid] == os.getpid()
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
