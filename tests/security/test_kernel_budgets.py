"""Attacks on budgets of the kernel that belong to the whole machine or to the server's user.

One sandbox takes as much of a budget as the kernel lets it, and holds it. Another sandbox and a program of the host must
still get theirs.
"""

import contextlib
import subprocess

import pytest
from tests.support.servers import ROOT, as_user

# Takes up to so many of a budget, says how many it got and waits to be told to end.
TAKE = r"""
import ctypes, errno, fcntl, os, signal, socket, sys, tempfile

kind, most = sys.argv[1], int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
arm = os.uname().machine == "aarch64"
NUMBERS = {"timer_create": (222, 107), "io_setup": (206, 0)}
held = []


def checked(answer, what):
    if answer < 0:
        raise OSError(ctypes.get_errno(), what)
    return answer


def call(name, *arguments):
    return checked(libc.syscall(ctypes.c_long(NUMBERS[name][arm]), *arguments), name)


def inotify_instances(number):
    return checked(libc.inotify_init1(0), "inotify_init1")


def inotify_watches(number):
    # A file counts once for each instance that watches it.
    if number % 2000 == 0:
        instances.append(checked(libc.inotify_init1(0), "inotify_init1"))
    return checked(libc.inotify_add_watch(instances[-1], files[number % 2000], 0x200), "inotify_add_watch")


def pending_signals(number):
    libc.sigqueue.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    return checked(libc.sigqueue(os.getpid(), signal.SIGRTMIN + 1, number), "sigqueue")


def timers(number):
    timer = ctypes.c_int()
    return call("timer_create", 1, None, ctypes.byref(timer))


def asynchronous_requests(number):
    context = ctypes.c_ulong()
    return call("io_setup", 1024, ctypes.byref(context))


def large_pipes(number):
    ends = os.pipe()
    fcntl.fcntl(ends[0], 1031, 1024 * 1024)  # F_SETPIPE_SZ
    return ends


def leases(number):
    file = tempfile.TemporaryFile()
    fcntl.fcntl(file, 1024, fcntl.F_WRLCK)  # F_SETLEASE
    return file


def socket_filters(number):
    code = ctypes.create_string_buffer(b"\x06\0\0\0\xff\xff\0\0")  # return 0xffff

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.setsockopt(socket.SOL_SOCKET, 26, bytes(Program(1, ctypes.addressof(code))))  # SO_ATTACH_FILTER
    return one


if kind == "inotify_watches":
    instances, folder = [], tempfile.TemporaryDirectory()
    files = [os.fsencode(f"{folder.name}/{number}") for number in range(2000)]
    for file in files:
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN + 1])
why = "-"
for number in range(most):
    try:
        held.append(globals()[kind](number))
    except OSError as error:
        why = errno.errorcode[error.errno]
        break
print("held", len(held), why, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holding(box, kind, most):
    """Take from a budget inside a sandbox and hold it; gives how many it got."""
    command = box.commands.start(["/usr/bin/python3", "-I", "-c", TAKE, kind, str(most)], timeout=60, interactive=True)
    try:
        words = ""
        for chunk in command.stream():
            words += chunk.text
            if words.endswith("\n"):
                break
        assert words.startswith("held"), words
        yield int(words.split()[1])
    finally:
        command.kill()


def taken_inside(box, kind, most):
    """How many another sandbox gets."""
    result = box.commands.run(["/usr/bin/python3", "-I", "-c", TAKE, kind, str(most)], timeout=60)
    assert result.stdout.startswith("held"), result
    return int(result.stdout.split()[1])


def taken_on_the_host(attacker, kind, most):
    """How many a program of the host gets that runs as the server's user."""
    command = ["/usr/bin/python3", "-I", "-c", TAKE, kind, str(most)]
    if attacker.setting.startswith("user") and ROOT:
        command = as_user(command)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout.split()[1])


def most_notifications(attacker, name):
    """What the kernel lets a sandbox have: as root all that any user may have, else an eighth of what its user may."""
    with open(f"/proc/sys/user/{name}", encoding="ascii") as file:
        of_user = int(file.read())
    return of_user if attacker.setting.startswith("root") else max(8, of_user * 3 // 4 // 6)


@pytest.mark.parametrize(
    ("kind", "tried", "needed", "bound"),
    [
        ("inotify_instances", 400, 8, "max_inotify_instances"),
        ("inotify_watches", 32_000, 1000, "max_inotify_watches"),
        ("pending_signals", 100_000, 100, 1024),
        ("timers", 100_000, 100, 1024),
    ],
)
def test_one_sandbox_cannot_use_up_a_budget_of_others(attacker, kind, tried, needed, bound):
    """Take all that the kernel gives of a budget."""
    most = most_notifications(attacker, bound) if isinstance(bound, str) else bound
    if attacker.own_kernel:  # it may have all of that kernel's
        most = tried
    other = attacker.another()
    with holding(attacker.box, kind, tried) as held:
        if attacker.own_kernel:  # it may give less to one process
            needed = min(needed, held)
        assert needed <= held <= min(most, tried)
        assert taken_inside(other, kind, needed) == needed
        assert taken_on_the_host(attacker, kind, needed) == needed


@pytest.mark.parametrize("kind", ["asynchronous_requests", "large_pipes", "leases", "socket_filters"])
def test_budgets_that_nothing_divides_are_refused(attacker, kind):
    """Take from a budget that the kernel keeps for the whole machine, or for all of a user's programs."""
    assert taken_on_the_host(attacker, kind, 1) == 1, "the attack works where nothing refuses it"
    assert taken_inside(attacker.box, kind, 1) == 0


def test_all_sandboxes_together_leave_a_part_to_the_host(attacker):
    """Take a budget with many sandboxes at once."""
    with contextlib.ExitStack() as stack:
        for _ in range(9):
            stack.enter_context(holding(attacker.another(), "inotify_instances", 400))
        assert taken_on_the_host(attacker, "inotify_instances", 16) == 16


def test_sandbox_has_no_real_time_priority_and_no_lower_nice_value(attacker):
    """Run before all other programs of the machine."""

    def attack():
        import os
        import resource

        assert resource.getrlimit(resource.RLIMIT_RTPRIO) == (0, 0)
        assert resource.getrlimit(resource.RLIMIT_NICE) == (0, 0)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        return "a real-time priority"

    attacker.attempt(attack)


# Takes shared memory by steps of 8 MB and says after each how many megabytes it has; then waits.
SHARE = r"""
import ctypes, mmap, os, socket, sys, time

kind, most = sys.argv[1], int(sys.argv[2])
step = 8 * 1024 * 1024
held = []
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p


def anonymous_maps():
    area = mmap.mmap(-1, step)
    area.write(b"x" * step)
    held.append(area)


def forgotten_maps():  # pages that no process has in its tables
    anonymous_maps()
    held[-1].madvise(mmap.MADV_DONTNEED)


def memory_files():
    held.append(os.memfd_create("share"))
    os.write(held[-1], b"x" * step)


def mapped_memory_files():
    file = os.memfd_create("share")
    os.write(file, b"x" * step)
    libc.mmap(None, ctypes.c_size_t(step), 3, 1, file, ctypes.c_long(0))
    os.close(file)


def segments():
    found = libc.shmget(0, ctypes.c_size_t(step), 0o1600)
    if found < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    ctypes.memset(libc.shmat(found, None, 0), 1, step)
    libc.shmctl(found, 0, None)  # IPC_RMID: it goes with the last process that has it


def sockets():
    filled = 0
    while filled < step:
        pair = socket.socketpair()
        held.append(pair)
        for one in pair:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * 1024 * 1024)
            one.setblocking(False)
            try:
                while True:
                    filled += one.send(b"x" * 65536)
            except BlockingIOError:
                pass


for done in range(8, most + 1, 8):
    globals()[kind]()
    print(done, flush=True)
    time.sleep(0.02)
time.sleep(3)
print("kept", flush=True)
"""


@pytest.mark.parametrize(
    "kind", ["anonymous_maps", "forgotten_maps", "memory_files", "mapped_memory_files", "segments", "sockets"]
)
def test_shared_memory_counts_towards_the_limit(attacker, kind):
    """Hold memory that is no process's own."""
    box = attacker.with_limits(memory_mb=128, processes=64)
    result = box.commands.run(["/usr/bin/python3", "-I", "-c", SHARE, kind, "1024"], timeout=60)
    told = result.stdout.split()
    assert "kept" not in told, "1 GB was held where 128 MB were allowed"
    assert int(told[-1]) <= 512, told
    after = box.commands.run("echo fine", timeout=20)
    assert after.stdout == "fine\n", after


def test_shared_memory_within_the_limit_is_left_alone(attacker):
    """Not an attack: several processes that share memory count it once."""
    box = attacker.with_limits(memory_mb=256, processes=64)
    code = """
import mmap, os, time
area = mmap.mmap(-1, 64 * 1024 * 1024)
area.write(b"x" * len(area))
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        assert area.find(b"y") == -1  # reads all of it
        time.sleep(3)
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""
    result = box.commands.run(["/usr/bin/python3", "-I", "-c", code], timeout=60)
    assert result.stdout == f"{[0] * 8}\n", result
