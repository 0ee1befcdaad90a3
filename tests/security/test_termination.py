"""Attacks that try to live on: past a deadline, past the end of the sandbox, past the end of the server."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.support.places import volumes

from carrel.errors import CarrelError
from carrel.providers import groups

HARD_TO_KILL = """
import os, signal, sys, time

for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
for _ in range(2):
    if os.fork(): os._exit(0)
    os.setsid()
open("pid", "w").write(str(os.getpid()))
beat = open("beat", "a")
while True:
    beat.write("x"); beat.flush(); time.sleep(0.01)
"""


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Marked:
    """The processes of an attacker that have a marker among their words."""

    def __init__(self, attacker):
        self.marker = f"marker-{attacker.setting.replace(' ', '-')}-{os.urandom(6).hex()}"
        self.own_kernel = attacker.own_kernel

    def alive(self, box):
        """They. With a kernel of their own they are seen inside, and once that has ended, what is left around it."""
        if not self.own_kernel:
            return self._on_the_host()
        if not (left := around(box)):
            return []
        pattern = f"[{self.marker[0]}]{self.marker[1:]}"
        try:
            return box.commands.run(f"grep -las '{pattern}' /proc/[0-9]*/cmdline; true", timeout=60).stdout.split()
        except CarrelError:
            return left

    def _on_the_host(self):
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if self.marker in path.read_text(errors="replace"):
                    found.append(path.parent.name)
            except OSError:
                continue
        return found

    def daemon(self, box):
        """Start a process that leaves its session, its parent and every signal behind."""
        box.commands.run(["/usr/bin/python3", "-c", HARD_TO_KILL, self.marker], check=True)
        wait_for(lambda: box.files.exists("beat"))
        assert self.alive(box)


def around(box):
    """The processes on the host of a sandbox with a kernel of its own."""
    return [str(pid) for group, _ in groups.find(box.id) for pid in groups.processes(group)]


@pytest.fixture
def marked(attacker):
    return Marked(attacker)


def test_daemon_after_terminate(attacker, marked):
    """Live on as a daemon after the sandbox was terminated."""
    marked.daemon(attacker.box)
    attacker.box.terminate()
    assert marked.alive(attacker.box) == []


def test_daemon_after_a_deadline(attacker, marked):
    """Live on as a daemon after the command's deadline."""
    code = HARD_TO_KILL.replace("if os.fork(): os._exit(0)", "if os.fork(): time.sleep(60)")
    seconds = 10 if attacker.own_kernel else 1  # an emulated machine needs some of them to begin
    result = attacker.box.commands.run(["/usr/bin/python3", "-c", code, marked.marker], timeout=seconds)
    assert result.timed_out
    wait_for(lambda: marked.alive(attacker.box) == [])


def test_daemon_after_kill(attacker, marked):
    """Live on as a daemon after its command was killed."""
    attacker.box.commands.start("sleep 60")  # so that it runs beside another command
    command = attacker.box.commands.start(
        ["/usr/bin/python3", "-c", HARD_TO_KILL.replace("os._exit(0)", "time.sleep(60)"), marked.marker]
    )
    wait_for(lambda: attacker.box.files.exists("beat"))
    command.kill()
    wait_for(lambda: marked.alive(attacker.box) == [])


def test_write_after_the_end(attacker, marked):
    """Keep writing to the workspace after the sandbox has ended."""
    box = attacker.another(f"ending-{marked.marker}")
    marked.daemon(box)
    place = next(volumes(attacker.server.data_dir).glob(f"ctx-ending-{marked.marker}"))
    box.terminate()
    before = (place / "beat").stat().st_size
    assert marked.alive(box) == []
    time.sleep(0.3)
    assert (place / "beat").stat().st_size == before > 0


def test_next_session_of_the_context(attacker, marked):
    """Meet the next sandbox of the same context with a process of the one before."""
    box = attacker.another(f"again-{marked.marker}")
    marked.daemon(box)
    box.terminate()
    again = attacker.another(f"again-{marked.marker}")
    assert marked.alive(box) == []
    size = again.files.stat("beat").size
    assert again.commands.run("ps ax 2>/dev/null | grep -c [m]arker-").stdout.strip() in ("0", "")
    assert again.files.stat("beat").size == size


def test_stopped_processes(attacker, marked):
    """Live on by being stopped when the end comes."""
    attacker.box.commands.start(["sh", "-c", f"kill -STOP $$; : {marked.marker}"])
    wait_for(lambda: marked.alive(attacker.box))
    attacker.box.terminate()
    assert marked.alive(attacker.box) == []


def test_traced_processes(attacker, marked):
    """Live on by being held by a debugger when the end comes."""

    def attack(marker):
        import os
        import time

        from inside import call

        if os.fork() == 0:
            call("ptrace", 0, 0, 0, 0)
            os.kill(os.getpid(), 19)
        time.sleep(60)

    attacker.box.commands.start(attacker.words(attack, marker=marked.marker))
    wait_for(lambda: len(marked.alive(attacker.box)) == 2)
    attacker.box.terminate()
    assert marked.alive(attacker.box) == []


def test_fork_storm_at_the_end(attacker, marked):
    """Outrun the killing by forking all the time."""
    box = attacker.with_limits(processes=100)
    # A generation is gone before it can be looked at: the first stays to be seen, the others say that they run.
    storm = "while True:\n  try:\n    if os.fork(): os._exit(0)\n    os.write(beat, b'x')\n  except OSError: pass"
    code = f"import os, signal\nbeat = os.open('beat', 65)\nif os.fork(): signal.pause()\n{storm}"
    box.commands.start(["python3", "-c", code, marked.marker])
    wait_for(lambda: marked.alive(box) and box.files.exists("beat") and box.files.stat("beat").size > 10)
    box.terminate()
    wait_for(lambda: marked.alive(box) == [])
    assert not any(marked.alive(box) for _ in range(20)), "some of it forks on"


def test_terminal_after_hang_up(attacker, marked):
    """Live on after the terminal was closed."""
    with attacker.box.terminal() as terminal:
        terminal.send(f"trap '' HUP TERM; sh -c 'trap \"\" HUP TERM; : {marked.marker}; while :; do sleep 1; done'\n")
        wait_for(lambda: marked.alive(attacker.box))
    wait_for(lambda: marked.alive(attacker.box) == [])


def test_supervisor_killed_from_outside(attacker, marked):
    """Live on when the supervisor dies: with PID 1 the whole sandbox must go."""
    marked.daemon(attacker.box)
    if attacker.own_kernel:  # there PID 1 is none of the host's, and what is around it goes together
        pids = around(attacker.box)
        os.kill(int(pids[0]), signal.SIGKILL)
        wait_for(lambda: not set(pids) & set(around(attacker.box)))
        return
    first = _first_of_sandbox(int(marked.alive(attacker.box)[0]))
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: marked.alive(attacker.box) == [])


def _first_of_sandbox(pid):
    """The PID 1 of the PID namespace a process lives in."""
    while True:
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        if fields["NSpid"].split()[-1] == "1":
            return int(pid)
        pid = int(fields["PPid"])
