"""Attacks that use up what the host has: processes, memory, disk, descriptors, output. Every limit here is small."""

import io
import os
import time
import zipfile
from contextlib import suppress

import pytest
from tests.support.places import volumes

from carrel.errors import CarrelError, LimitExceeded, NotFound, TooLarge
from carrel.models import State


@pytest.fixture
def bystander(attacker):
    """Another sandbox on the server, which must not suffer."""
    return attacker.another()


def works(box):
    assert box.commands.run("echo fine", timeout=20).stdout == "fine\n"


def until(condition, seconds=60):
    """Wait for a condition; whether it came true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def workspace(attacker, box):
    return volumes(attacker.server.data_dir) / f"eph-{box.id}"


def size(path):
    """Bytes on disk beneath a path."""
    total = 0
    for folder, _directories, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(f"{folder}/{name}").st_blocks * 512
            except OSError:
                pass
    return total


def test_fork_bomb(attacker, bystander):
    """Fill the host's table of processes."""
    box = attacker.with_limits(processes=64)
    result = box.commands.run("bomb() { bomb | bomb & }; bomb; sleep 1; ls -d /proc/[0-9]* | wc -l", timeout=3)
    assert result.timed_out or result.exit_code is not None
    works(bystander)
    box.commands.start("bomb() { bomb | bomb & }; while :; do bomb; done", timeout=2)
    works(bystander)
    assert until(lambda: not any(command.running for command in box.commands.list()))


def test_number_of_processes(attacker):
    """Have more processes than allowed."""
    box = attacker.with_limits(processes=32)

    def attack():
        import os
        import signal

        children = []
        try:
            for _ in range(200):
                child = os.fork()
                if child == 0:
                    signal.pause()
                children.append(child)
        except OSError:
            pass
        for child in children:
            os.kill(child, signal.SIGKILL)
        return len(children) if len(children) > 32 else None

    attacker.attempt(attack, box=box)
    works(box)


def test_threads(attacker, bystander):
    """Have thousands of threads."""
    box = attacker.with_limits(processes=64)

    def attack():
        import threading

        stop = threading.Event()
        threads = []
        try:
            for _ in range(5000):
                threads.append(threading.Thread(target=stop.wait, daemon=True))
                threads[-1].start()
        except RuntimeError:
            pass
        stop.set()
        return len(threads) if len(threads) > 70 else None

    attacker.attempt(attack, box=box)
    works(bystander)


def test_memory_of_one_process(attacker, bystander):
    """Take more memory than allowed in one process."""
    box = attacker.with_limits(memory_mb=128)

    def attack():
        try:
            held = bytearray(b"x" * (400 * 1024 * 1024))
        except MemoryError:
            return None
        return len(held)

    attacker.attempt(attack, box=box)
    works(box)
    works(bystander)


def test_memory_of_many_processes(attacker, bystander):
    """Take more memory than allowed, a little in each of many processes."""
    box = attacker.with_limits(memory_mb=128, processes=64)
    # They hold it until each has said so or has died, however slowly they start; all at once is what cannot be.
    code = """
import subprocess, sys, time
hold = "held = bytearray(b'x' * 40_000_000); print('held', flush=True); input()"
many = [subprocess.Popen([sys.executable, "-c", hold], stdin=-1, stdout=-1) for _ in range(10)]
said = [each.stdout.readline() for each in many]
print("held at once:", said.count(b"held\\n"), flush=True)
if all(said): time.sleep(60)
for each in many: each.kill()
"""
    result = box.commands.run(["python3", "-c", code], timeout=20)
    works(bystander)
    works(box)
    assert "held at once: 10" not in result.stdout or result.oom_killed, result


def test_memory_in_tmp(attacker):
    """Take memory by files in the memory file systems."""
    box = attacker.with_limits(memory_mb=128)
    box.commands.run(
        "for d in /tmp /dev/shm /home/agent; do dd if=/dev/zero of=$d/big bs=1M count=600; done", timeout=30
    )
    works(box)
    held = sum(
        int(line)
        for line in box.commands.run("stat -c %b /tmp/big /dev/shm/big /home/agent/big 2>/dev/null").stdout.split()
    )
    assert held * 512 <= 130 * 1024 * 1024


def test_inodes_in_tmp(attacker):
    """Take kernel memory by millions of empty files."""

    def attack():
        made = 0
        try:
            for number in range(200_000):
                open(f"/tmp/{number}", "w").close()
                made += 1
        except OSError:
            pass
        return made if made > 70_000 else None

    attacker.attempt(attack, timeout=60)


def test_one_large_file(attacker):
    """Fill the host's disk with one file."""
    box = attacker.with_limits(disk_mb=20)
    result = box.commands.run("head -c 300M /dev/zero > big", timeout=30)
    assert not result.ok
    assert size(workspace(attacker, box)) <= 21 * 1024 * 1024


def test_many_files(attacker):
    """Fill the host's disk with many files."""
    box = attacker.with_limits(disk_mb=20)
    command = box.commands.start(
        "i=0; while :; do i=$((i+1)); head -c 4M /dev/zero > f$i; sleep 0.05; done", timeout=60
    )
    # Where the kernel holds the cap the command goes on in vain; elsewhere it is ended.
    assert until(lambda: _ended(command) or not _can_write(box, os.urandom(1 << 20))), "it still writes"
    with suppress(CarrelError):
        command.kill()
    assert size(workspace(attacker, box)) < 2000 * 1024 * 1024
    with pytest.raises(LimitExceeded):
        box.files.write("more", os.urandom(1 << 20))
    box.commands.run("rm -f f* again")
    assert until(lambda: _can_write(box)), "nothing can be written although there is room again"


def _ended(command):
    try:
        return not command.info().running
    except CarrelError:
        return True


def _half_removed(attacker):
    return [name for name in os.listdir(volumes(attacker.server.data_dir)) if name.startswith(".")]


def _can_write(box, data=b"x"):
    try:
        box.files.write("again", data)
    except LimitExceeded:
        return False
    return True


def test_many_small_files(attacker):
    """Use up the inodes of the host's disk."""
    box = attacker.with_limits(disk_mb=20)
    code = "import os\nn=0\nwhile True:\n os.makedirs(f'd{n//1000}', exist_ok=True); open(f'd{n//1000}/{n}', 'w').close(); n += 1"
    command = box.commands.start(["python3", "-c", code], timeout=60)
    assert until(lambda: _ended(command)), "it still makes files"


def test_disk_by_a_daemon(attacker):
    """Fill the host's disk from a process that outlived its command, while nobody asks for anything."""
    box = attacker.with_limits(disk_mb=20)
    loop = "i=0; while :; do i=$((i+1)); head -c 2M /dev/zero > f$i; sleep 0.05; done"
    box.commands.run(["sh", "-c", f"setsid sh -c '{loop}' >/dev/null 2>&1 &"], check=True)
    place = workspace(attacker, box)

    def stopped():
        before = size(place)
        time.sleep(0.5)
        # Where the kernel holds the cap it gets no further than that, and goes on in vain.
        return (before > 15 * 1024 * 1024 and size(place) <= before) or not place.exists()

    assert until(stopped), f"it still writes: {size(place)} bytes"


def test_disk_by_deleted_files(attacker):
    """Fill the host's disk with files that have no name any more."""
    box = attacker.with_limits(disk_mb=20)

    def attack():
        import os
        import time

        held = []
        for number in range(40):
            held.append(os.open(f"gone{number}", os.O_RDWR | os.O_CREAT))
            os.unlink(f"gone{number}")
            os.posix_fallocate(held[-1], 0, 4 * 1024 * 1024)
            time.sleep(0.2)
        time.sleep(10)  # whoever ends it may come late on a busy machine
        return len(held) * 4

    evidence = attacker.run(attack, box=box, timeout=60)
    assert evidence is None, f"{evidence} MB are held on the host's disk where 20 were allowed"


def test_descriptors(attacker, bystander):
    """Use up the host's open files."""

    def attack():
        import os

        held = []
        try:
            while len(held) < 100_000:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        return len(held) if len(held) > 10_000 else None

    attacker.attempt(attack)
    works(bystander)


def test_huge_output(attacker, bystander):
    """Fill the server's memory with output."""
    result = attacker.box.commands.run("head -c 300M /dev/zero", output_limit=1024 * 1024, timeout=30)
    assert result.truncated
    assert len(result.stdout_bytes) <= 1024 * 1024
    assert result.dropped_bytes + len(result.stdout_bytes) == 300 * 1024 * 1024
    works(bystander)


def test_endless_output_without_newline(attacker, bystander):
    """Keep the server reading for ever."""
    result = attacker.box.commands.run("cat /dev/zero", output_limit=65536, timeout=1)
    assert result.timed_out
    assert result.truncated
    works(bystander)


def test_endless_stream_that_nobody_reads(attacker, bystander):
    """Fill the server's memory with a stream whose reader has stopped."""
    stream = attacker.box.commands.stream("yes", timeout=3)
    next(iter(stream))
    works(bystander)
    stream.close()
    works(attacker.box)


def test_many_outputs(attacker, bystander):
    """Fill the memory with the outputs of many commands, each below its own cap."""
    box = attacker.with_limits(memory_mb=256)
    for _ in range(30):
        command = box.commands.start("yes | head -c 8M", timeout=60, output_limit=8 * 1024 * 1024)
        assert until(lambda command=command: _ended(command))
    with suppress(NotFound):  # it may have been forgotten to make room for others
        command.wait()  # one is fetched: to fetch them all, one after the other, only takes long
    works(box)
    works(bystander)


def test_deep_directories(attacker):
    """Make a tree too deep to be removed."""
    box = attacker.with_limits(disk_mb=100)

    def attack():
        import os

        for _ in range(4_500):  # longer than any path, deeper than Python recurses or 4,096 descriptors reach
            os.mkdir("d")
            os.chdir("d")

    attacker.run(attack, box=box)
    place = workspace(attacker, box)
    assert place.exists()
    box.terminate()
    assert until(lambda: not place.exists())
    assert until(lambda: not _half_removed(attacker))


def test_files_that_forbid_removal(attacker):
    """Leave files that cannot be removed."""
    box = attacker.new()
    box.commands.run(
        "mkdir -p a/b; touch a/b/c; chmod 0 a/b; chmod 0 a; mkdir -p 'n\n' \"$(printf '\\377')\"; mkfifo p; ln -s / l; chmod 0 ."
    )
    place = workspace(attacker, box)
    box.terminate()
    assert not place.exists()
    assert until(lambda: not _half_removed(attacker))  # also what the test before has left to be removed


def test_zip_bomb(attacker):
    """Upload a small archive that grows beyond the disk when it is unpacked."""
    box = attacker.with_limits(disk_mb=20)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(20):
            archive.writestr(f"part{number}", b"\0" * 15_000_000)
    assert len(data.getvalue()) < 1_000_000
    box.files.write("bomb.zip", data.getvalue())
    code = "import zipfile, time; z = zipfile.ZipFile('bomb.zip')\nfor n in z.namelist(): z.extract(n); time.sleep(0.2)"
    command = box.commands.start(["python3", "-c", code], timeout=60)
    assert until(lambda: _ended(command))
    assert size(workspace(attacker, box)) < 290_000_000


def test_large_upload(attacker):
    """Fill the host's disk by an upload larger than the workspace may be."""
    box = attacker.with_limits(disk_mb=20)

    with pytest.raises(CarrelError):
        box.files.write("big", (b"\0" * 1_000_000 for _ in range(200)))
    assert size(workspace(attacker, box)) < 21 * 1024 * 1024
    works(box)


def test_giant_body(attacker, bystander):
    """Fill the server's memory with a request."""
    with pytest.raises(CarrelError) as caught:
        attacker.box.commands.run("true", stdin="x" * (40 * 1024 * 1024))
    assert isinstance(caught.value, TooLarge)
    works(bystander)


def test_many_commands(attacker, bystander):
    """Start commands without end."""
    box = attacker.with_limits(processes=400)
    with pytest.raises(LimitExceeded):
        for _ in range(200):
            box.commands.start("sleep 60")
    works(bystander)


def test_cpu(attacker, bystander):
    """Keep every processor busy."""
    attacker.box.commands.start("for i in 1 2 3 4 5 6 7 8; do while :; do :; done & done; wait", timeout=4)
    works(bystander)


def test_limits_of_the_supervisor(attacker):
    """Take the supervisor's open files away."""

    def attack():
        import resource

        try:
            resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))
        except OSError:
            return None
        return "the limits of PID 1 were changed"

    attacker.attempt(attack)


def test_sandbox_that_ends_itself(attacker, bystander):
    """Break one's own sandbox in a way that takes the server along."""

    def attack():
        import os
        import resource

        for which in range(16):
            try:
                resource.prlimit(1, which, (0, 0))
            except (OSError, ValueError):
                pass
        os.system("kill -9 -1")

    try:
        attacker.start(attack)
        attacker.box.commands.run("true", timeout=5)
        attacker.box.files.list(".")
    except CarrelError as error:
        assert error.detail
    works(bystander)
    assert bystander.info().state is State.RUNNING


BOMBS = {
    "processes": "while True:\n  try: os.fork()\n  except OSError: full()",
    "sessions": "while True:\n  try:\n    if os.fork() == 0: os.setsid()\n  except OSError: full()",
    "threads": (
        "try:\n  while True: _thread.start_new_thread(time.sleep, (7777,))\nexcept RuntimeError: full()\ntime.sleep(7777)"
    ),
    "zombies": "try:\n  while os.fork(): pass\n  os._exit(0)\nexcept OSError: full()\ntime.sleep(7777)",
}
BOMB = "import _thread, os, time\nfull = lambda: os.close(os.open('full', os.O_CREAT))\n"


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.parametrize("beside", [False, True])
def test_a_bomb_left_by_an_ended_command_does_not_starve_the_next(attacker, kind, beside):
    """Leave a fork bomb in the background, so that no later command of the sandbox can start."""
    box = attacker.with_limits(processes=64)
    other = box.commands.start("sleep 7777") if beside else None
    left = box.commands.run(f'nohup setsid python3 -c "{BOMB}{BOMBS[kind]}" >/dev/null 2>&1 & echo left')
    assert left.stdout == "left\n"
    assert until(lambda: (workspace(attacker, box) / "full").exists())
    for _ in range(3):
        done = box.commands.run("echo one | cat; (echo two)", timeout=60)
        assert (done.stdout, done.stderr, done.signal) == ("one\ntwo\n", "", None)
    assert other is None or other.info().running


def test_python_runs_beside_a_bomb_left_by_an_ended_command(attacker):
    box = attacker.with_limits(processes=64)
    box.commands.run(f'nohup setsid python3 -c "{BOMB}{BOMBS["processes"]}" >/dev/null 2>&1 &')
    assert until(lambda: (workspace(attacker, box) / "full").exists())
    assert box.python.run("print(6 * 7)").stdout == "42\n"


def test_what_was_left_behind_stays_while_there_is_room(attacker):
    box = attacker.with_limits(processes=64)
    box.commands.run("for each in 1 2 3 4 5 6 7 8; do setsid sleep 7777 & done")
    for _ in range(3):
        works(box)
    assert box.commands.run("ps -e -o args= | grep -c '^sleep 7777'").stdout == "8\n"
