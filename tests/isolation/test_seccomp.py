"""The filter as a value (every number, every checked argument) and as the kernel enforces it."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.children import in_child

from carrel.errors import PlatformError, Unsupported
from carrel.isolation import seccomp
from carrel.isolation.seccomp import RET_ALLOW, ArgumentSwitch, Decision, refuse
from carrel.isolation.syscalls import TABLES
from carrel.primitives import libc

ARCHES = sorted(TABLES)
PROGRAMS = {arch: seccomp.build(arch) for arch in ARCHES}
EPERM, ENOSYS = refuse(errno.EPERM), refuse(errno.ENOSYS)
MACHINE = os.uname().machine
WORD = st.integers(0, 2**64 - 1)
ROOT = os.geteuid() == 0
CAPABILITIES = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
# DAC_READ_SEARCH, SYS_MODULE, SYS_CHROOT, SYS_PACCT, SYS_ADMIN, SYS_BOOT, SYS_TIME, MKNOD, SYSLOG
# SUBVOL_CREATE, its second version, SNAP_CREATE_V2, SNAP_DESTROY, QUOTA_CTL, DEFRAG, SUBVOL_SETFLAGS
SUBVOLUMES = (0x5000940E, 0x50009418, 0x50009417, 0x5000940F, 0xC0109428, 0x50009402, 0x4008941A)
PRIVILEGED = all(CAPABILITIES >> bit & 1 for bit in (2, 16, 18, 20, 21, 22, 25, 27, 34))
NO_MODULES = any(path.read_text().strip() == "1" for path in Path("/proc/sys/kernel").glob("modules_disabled"))


def evaluate(program: bytes, arch: str, nr: int, args: Sequence[int] = ()) -> int:
    """Return the action of the program for a call, computed without the kernel; `arch` is a key of AUDIT_ARCH."""
    padded = [argument & 0xFFFFFFFFFFFFFFFF for argument in args] + [0] * (6 - len(args))
    data = struct.pack("=IIQ6Q", nr & 0xFFFFFFFF, seccomp.AUDIT_ARCH[arch], 0, *padded)
    code = list(seccomp._INSTRUCTION.iter_unpack(program))
    accumulator = at = 0
    while True:
        operation, true, false, value = code[at]
        at += 1
        if operation == seccomp._LD:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif operation == seccomp._AND:
            accumulator &= value
        elif operation == seccomp._JA:
            at += value
        elif operation == seccomp._JEQ:
            at += true if accumulator == value else false
        elif operation == seccomp._JGE:
            at += true if accumulator >= value else false
        elif operation == seccomp._RET:
            return int(value)
        else:
            raise AssertionError(f"the filter has an unknown instruction {operation:#x}")


enforced = pytest.mark.skipif(not seccomp.available(), reason="this kernel or machine has no seccomp filters")
each_arch = pytest.mark.parametrize("arch", ARCHES)


def ask(arch: str, name: str, *args: int) -> int:
    return evaluate(PROGRAMS[arch], arch, TABLES[arch][name], args)


def expected(decision: Decision, args: list[int]) -> int:
    """The policy read straight from its values, as the compiled program must read it."""
    while isinstance(decision, ArgumentSwitch):
        value = args[decision.argument] & decision.mask
        decision = next((then for case, then in decision.cases if case == value), decision.otherwise)
    return decision


def test_every_known_call_is_decided_exactly_once_and_on_purpose() -> None:
    groups = (seccomp.ALLOWED, seccomp.DENIED, seccomp.ABSENT, frozenset(seccomp.CHECKED))
    named = [name for group in groups for name in group]
    assert len(named) == len(set(named))
    assert set(named) == {name for table in TABLES.values() for name in table}


# --- the compiled program -------------------------------------------------------------------------------


@each_arch
def test_every_number_gets_the_decision_of_its_name(arch: str) -> None:
    names = {number: name for name, number in TABLES[arch].items()}
    for number in range(1024):
        wanted = seccomp.decision(names[number]) if number in names else ENOSYS
        assert evaluate(PROGRAMS[arch], arch, number) == expected(wanted, [0] * 6), names.get(number, number)


@each_arch
@given(number=st.integers(0, 2**32 - 2), args=st.lists(WORD, min_size=6, max_size=6))
def test_any_call_gets_the_decision_of_the_policy(arch: str, number: int, args: list[int]) -> None:
    names = {number: name for name, number in TABLES[arch].items()}
    wanted = seccomp.decision(names[number]) if number in names else ENOSYS
    assert evaluate(PROGRAMS[arch], arch, number, args) == expected(wanted, args)


@each_arch
@given(data=st.data())
def test_checked_arguments_are_read_as_the_kernel_reads_them(arch: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(seccomp.CHECKED.keys() & TABLES[arch].keys())))
    interesting = st.sampled_from([0, 1, 2, 3, 5, 8, 10, 16, 17, 35, 38, 40, 0x5412, 0x8000, 0x2000, 0x6000, 0x20000])
    args = data.draw(st.lists(interesting | WORD, min_size=6, max_size=6))
    answer = ask(arch, name, *args)
    assert answer == expected(seccomp.CHECKED[name], args)
    high = data.draw(st.integers(1, 2**32 - 1)) << 32
    assert ask(arch, name, *[(arg & 0xFFFFFFFF) | high for arg in args]) == answer


@each_arch
@given(number=st.integers(0, 2**32 - 1), args=st.lists(WORD, min_size=6, max_size=6))
def test_another_architecture_has_no_calls(arch: str, number: int, args: list[int]) -> None:
    for other in seccomp.AUDIT_ARCH.keys() - {arch}:
        assert evaluate(PROGRAMS[arch], other, number, args) == ENOSYS


@given(number=st.sampled_from(sorted(TABLES["x86_64"].values())))
def test_x32_numbers_do_not_exist(number: int) -> None:
    assert evaluate(PROGRAMS["x86_64"], "x86_64", number | 0x40000000) == ENOSYS


@each_arch
def test_a_call_skipped_by_a_tracer_is_left_alone(arch: str) -> None:
    assert evaluate(PROGRAMS[arch], arch, -1) == RET_ALLOW
    assert evaluate(PROGRAMS[arch], arch, -2) == ENOSYS


@each_arch
def test_the_program_is_well_formed_short_and_always_the_same(arch: str) -> None:
    program = PROGRAMS[arch]
    assert seccomp.build(arch) == program
    code = list(seccomp._INSTRUCTION.iter_unpack(program))
    assert len(code) < 256
    for at, (operation, true, false, value) in enumerate(code):
        targets = {0x15: [true, false], 0x35: [true, false], 0x05: [value], 0x06: []}.get(operation, [0])
        assert all(at + 1 + target < len(code) for target in targets)


@each_arch
def test_the_search_is_balanced(arch: str) -> None:
    """The kernel walks the program for every number at each installation."""
    code = list(seccomp._INSTRUCTION.iter_unpack(PROGRAMS[arch]))

    def depth(at: int) -> int:
        operation, true, false, value = code[at]
        if operation == 0x35:
            return 1 + max(depth(at + 1 + true), depth(at + 1 + false))
        if operation == 0x05:
            return 1 + depth(at + 1 + value)
        return 0

    first = next(at for at, one in enumerate(code) if one[0] == 0x35)
    assert depth(first) <= 9


def test_long_programs_reach_their_far_targets() -> None:
    """Many ranges and wide checks, so that targets lie beyond the reach of one conditional jump."""
    wide = seccomp._only(0, range(1000, 1600), RET_ALLOW, EPERM)
    ranges: list[tuple[int, Decision]] = [(0, wide)]
    ranges += [(number, refuse(number % 50 + 1)) for number in range(1, 600)]
    ranges.append((600, wide))
    program = seccomp._Assembler().program(seccomp.AUDIT_ARCH["x86_64"], ranges)
    for number in range(1, 600):
        assert evaluate(program, "x86_64", number) == refuse(number % 50 + 1)
    for number in (0, 600, 10_000):
        assert evaluate(program, "x86_64", number, [1000]) == RET_ALLOW
        assert evaluate(program, "x86_64", number, [1599]) == RET_ALLOW
        assert evaluate(program, "x86_64", number, [999]) == EPERM


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(Unsupported) as caught:
        seccomp.build("pdp11")
    assert caught.value.field == "arch"


# --- the policy in words --------------------------------------------------------------------------------


@each_arch
def test_namespaces_cannot_be_made_but_processes_and_threads_can(arch: str) -> None:
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert ask(arch, "clone", bit | 17) == EPERM
        assert ask(arch, "clone", bit | 17 | 1 << 40) == EPERM
    thread, vfork = 0x3D0F00, 0x4111
    assert {ask(arch, "clone", flags) for flags in (17, thread, vfork, 0x1200011)} == {RET_ALLOW}
    assert ask(arch, "clone3") == ENOSYS
    assert ask(arch, "unshare") == ask(arch, "setns") == EPERM


@each_arch
def test_sockets(arch: str) -> None:
    unsupported, no_protocol = refuse(errno.EAFNOSUPPORT), refuse(errno.EPROTONOSUPPORT)
    flags = socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
        assert ask(arch, "socket", family, socket.SOCK_STREAM | flags) == RET_ALLOW
        assert ask(arch, "socket", family, socket.SOCK_RAW) == EPERM
        assert ask(arch, "socket", family, socket.SOCK_RAW | flags) == EPERM
        assert ask(arch, "socket", family, 10) == EPERM
    assert ask(arch, "socket", socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) == RET_ALLOW
    assert ask(arch, "socket", socket.AF_INET, socket.SOCK_STREAM, 132) == no_protocol
    assert ask(arch, "socket", 16, socket.SOCK_RAW | flags, 0) == RET_ALLOW
    assert {ask(arch, "socket", 16, socket.SOCK_RAW, protocol) for protocol in range(1, 32)} == {no_protocol}
    others = set(range(64)) - {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16}
    assert {ask(arch, "socket", family, 1) for family in others} == {unsupported}
    assert ask(arch, "socketpair", socket.AF_UNIX, socket.SOCK_STREAM | flags) == RET_ALLOW
    assert ask(arch, "socketpair", socket.AF_INET, socket.SOCK_STREAM) == unsupported


@each_arch
def test_devices_terminals_personalities_and_memory_maps(arch: str) -> None:
    for kind, answer in (
        (0, RET_ALLOW),
        (stat.S_IFREG, RET_ALLOW),
        (stat.S_IFIFO, RET_ALLOW),
        (stat.S_IFSOCK, RET_ALLOW),
        (stat.S_IFCHR, EPERM),
        (stat.S_IFBLK, EPERM),
        (stat.S_IFBLK | 1 << 16, EPERM),
    ):
        assert ask(arch, "mknodat", 0, 0, kind | 0o644) == answer
    assert [ask(arch, "ioctl", 0, request) for request in (0x5412, 0x541C, 0x5423)] == [EPERM] * 3
    assert [ask(arch, "ioctl", 0, request) for request in (0x5401, 0x5413, 0x5414)] == [RET_ALLOW] * 3
    assert [ask(arch, "ioctl", 0, request) for request in SUBVOLUMES] == [refuse(errno.ENOTTY)] * len(SUBVOLUMES)
    assert ask(arch, "ioctl", 0, SUBVOLUMES[0] | 1 << 40) == refuse(errno.ENOTTY)
    assert [ask(arch, "ioctl", 0, request) for request in (0x40049409, 0x4020940D, 0xC0189436)] == [RET_ALLOW] * 3
    assert [ask(arch, "ioctl", 0, request) for request in (0x40086602, 0x941F, 0x80049300)] == [
        RET_ALLOW, refuse(errno.ENOTTY), RET_ALLOW,
    ]  # fmt: skip
    assert [ask(arch, "personality", value) for value in (0, 8, 0x20000, 0x20008, 2**32 - 1)] == [RET_ALLOW] * 5
    assert [ask(arch, "personality", value) for value in (0x40000, 0x400000, 7)] == [EPERM] * 3
    assert ask(arch, "prctl", 35) == EPERM
    assert [ask(arch, "prctl", option) for option in (4, 15, 22, 38)] == [RET_ALLOW] * 4


@pytest.mark.parametrize("arch", TABLES)
def test_calls_that_take_from_budgets_of_others(arch: str) -> None:
    assert [ask(arch, name) for name in ("io_setup", "io_submit", "io_destroy")] == [refuse(errno.ENOSYS)] * 3
    assert [ask(arch, "fcntl", 0, command) for command in (1024, 1031)] == [EPERM] * 2
    assert [ask(arch, "fcntl", 0, command) for command in (0, 1, 2, 6, 1025, 1030, 1032, 1033)] == [RET_ALLOW] * 8
    assert [ask(arch, "setsockopt", 0, socket.SOL_SOCKET, option) for option in (26, 50, 51, 52)] == [EPERM] * 4
    assert [ask(arch, "setsockopt", 0, socket.SOL_SOCKET, option) for option in (2, 7, 8, 15, 27)] == [RET_ALLOW] * 5
    assert ask(arch, "setsockopt", 0, socket.IPPROTO_TCP, 26) == RET_ALLOW


@each_arch
@given(mode=st.integers(0, 0o7777), high=st.integers(0, 2**16 - 1))
def test_modes_with_set_ids_are_refused_in_folders(arch: str, mode: int, high: int) -> None:
    program = seccomp.build(arch, more=seccomp.without_set_ids())

    def asked(name: str, *args: int) -> int | None:
        number = TABLES[arch].get(name)
        return None if number is None else evaluate(program, arch, number, args)

    given_mode, wanted = mode | high << 16, {EPERM if mode & 0o6000 else RET_ALLOW}
    new, unnamed = os.O_CREAT | os.O_RDWR, os.O_TMPFILE | os.O_RDWR
    places = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1, "mknod": 1, "mknodat": 2}
    answers = [asked(name, *[0] * at, given_mode) for name, at in places.items()]
    answers += [asked(name, *start, flags, given_mode) for name, start in (("open", [0]), ("openat", [0, 0]))
                for flags in (new, unnamed)]  # fmt: skip
    assert {answer for answer in answers if answer is not None} == wanted
    assert asked("openat", 0, 0, os.O_RDONLY, given_mode) == RET_ALLOW, "the kernel ignores the mode"
    assert asked("mknodat", 0, 0, stat.S_IFCHR | mode) == EPERM
    assert asked("openat2", 0, 0, 0, 24) == asked("openat2", 0, 0, 0, 24, mode, high) == ENOSYS
    assert asked("openat2", 0, 0, 0, 24, *libc.OPEN_BENEATH_WORDS) == RET_ALLOW


# --- enforcement ----------------------------------------------------------------------------------------


def call(name: str, *args: int | bytes | None) -> int:
    """0 when the call succeeds, else its errno."""
    own = ctypes.CDLL(None, use_errno=True)
    values = [ctypes.c_long(arg) if isinstance(arg, int) else ctypes.c_char_p(arg) for arg in args]
    values += [ctypes.c_long(0)] * (6 - len(values))
    ctypes.set_errno(0)
    return ctypes.get_errno() if own.syscall(ctypes.c_long(TABLES[MACHINE][name]), *values) == -1 else 0


# Arguments that cannot do harm where the filter should fail to stop them.
HARMLESS: list[tuple[str, tuple[int | bytes | None, ...], int]] = [
    ("unshare", (0,), errno.EPERM),
    ("setns", (-1, 0), errno.EPERM),
    ("mount", (b"none", b"/nowhere", b"tmpfs"), errno.EPERM),
    ("umount2", (b"/nowhere", 0), errno.EPERM),
    ("pivot_root", (b"/nowhere", b"/nowhere"), errno.EPERM),
    ("chroot", (b"/nowhere",), errno.EPERM),
    ("open_tree", (-1, b"/nowhere", 0), errno.EPERM),
    ("move_mount", (-1, b"/nowhere", -1, b"/nowhere"), errno.EPERM),
    ("fsopen", (b"nothing", 0), errno.EPERM),
    ("mount_setattr", (-1, b"/nowhere", 0, None, 0), errno.EPERM),
    ("keyctl", (-1,), errno.EPERM),
    ("add_key", (None, None), errno.EPERM),
    ("request_key", (None, None), errno.EPERM),
    ("bpf", (-1, None, 0), errno.EPERM),
    ("perf_event_open", (None, 0, -1, -1), errno.EPERM),
    ("io_uring_setup", (0, None), errno.EPERM),
    ("io_uring_enter", (-1,), errno.EPERM),
    ("userfaultfd", (-1,), errno.EPERM),
    ("open_by_handle_at", (-1, None), errno.EPERM),
    ("name_to_handle_at", (-1, b"/nowhere"), errno.EPERM),
    ("finit_module", (-1, b""), errno.EPERM),
    ("delete_module", (b"no_such_module",), errno.EPERM),
    ("reboot", (0, 0, 0), errno.EPERM),
    ("swapon", (b"/nowhere",), errno.EPERM),
    ("clock_settime", (0, None), errno.EPERM),
    ("settimeofday", (None, None), errno.EPERM),
    ("syslog", (10,), errno.EPERM),
    ("fanotify_init", (-1,), errno.EPERM),
    ("quotactl", (-1, None), errno.EPERM),
    ("acct", (b"/nowhere",), errno.EPERM),
    ("kexec_load", (0, 17, None, 0), errno.EPERM),
    ("socket", (40, socket.SOCK_STREAM, 0), errno.EAFNOSUPPORT),
    ("socket", (17, socket.SOCK_RAW, 0), errno.EAFNOSUPPORT),
    ("socket", (38, socket.SOCK_SEQPACKET, 0), errno.EAFNOSUPPORT),
    ("socket", (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP), errno.EPERM),
    ("socket", (16, socket.SOCK_RAW, 12), errno.EPROTONOSUPPORT),
    ("ioctl", (-1, 0x5412), errno.EPERM),
    ("ioctl", (-1, 0x5412 | 1 << 40), errno.EPERM),
    ("ioctl", (-1, 0x541C), errno.EPERM),
    ("ioctl", (-1, 0x5000940E), errno.ENOTTY),
    ("ioctl", (-1, 0x50009418), errno.ENOTTY),
    ("personality", (0x40000,), errno.EPERM),
    ("prctl", (35, 0, 0, 0, 1), errno.EPERM),
    ("mknodat", (-100, b"/nowhere/null", stat.S_IFCHR | 0o666, 0x103), errno.EPERM),
    ("mknodat", (-100, b"/nowhere/disk", stat.S_IFBLK | 0o666, 0x103), errno.EPERM),
    # With CLONE_THREAD but no CLONE_SIGHAND the kernel itself says EINVAL before anything is made.
    ("clone", (0x10000000 | 0x10000,), errno.EPERM),
    ("clone", (0x20000 | 0x10000 | 1 << 40,), errno.EPERM),
    ("clone3", (None, 0), errno.ENOSYS),
]


@enforced
@pytest.mark.parametrize("user", [pytest.param(None, id="self"), pytest.param(65534, id="nobody")])
@pytest.mark.parametrize(("name", "args", "answer"), HARMLESS)
def test_a_refused_call_is_refused_by_the_kernel(
    name: str, args: tuple[int | bytes | None, ...], answer: int, user: int | None
) -> None:
    if name not in TABLES[MACHINE]:
        pytest.skip(f"{MACHINE} has no {name}")
    if user is not None and not ROOT:
        pytest.skip("only root can become somebody else")
    program = seccomp.build()

    def work() -> tuple[int, int]:
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        before = call(name, *args)
        seccomp.install(program)
        return before, call(name, *args)

    answers = in_child(work)
    assert isinstance(answers, list), answers
    before, after = answers
    assert after == answer
    # Full privilege shows that it is the filter that answers: without it the same call fares otherwise,
    # except for socket families, which a kernel may have been built without, and for modules where no more are taken.
    if PRIVILEGED and user is None and name != "socket" and not (name.endswith("_module") and NO_MODULES):
        assert before != answer


@enforced
@pytest.mark.skipif(not ROOT, reason="only root may make a device or a raw socket in the first place")
def test_root_makes_pipes_but_no_devices_and_no_packet_sockets(tmp_path: Path) -> None:
    program = seccomp.build()

    def work() -> list[str]:
        seccomp.install(program)
        done = []
        os.mknod(tmp_path / "pipe", stat.S_IFIFO | 0o600)
        os.mknod(tmp_path / "file", stat.S_IFREG | 0o600)
        for kind in (stat.S_IFCHR, stat.S_IFBLK):
            try:
                os.mknod(tmp_path / f"device{kind}", kind | 0o600, os.makedev(1, 3))
            except PermissionError:
                done.append("device")
        try:
            socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        except PermissionError:
            done.append("raw")
        return done

    assert in_child(work) == ["device", "device", "raw"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


@enforced
def test_the_filter_outlives_exec_and_cannot_be_loosened() -> None:
    script = (
        "import ctypes, errno\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(open('/proc/self/status').read())\n"
        "from carrel.isolation import seccomp\n"
        "import struct\n"
        "seccomp.install(struct.pack('=HBBI', 6, 0, 0, seccomp.RET_ALLOW))\n"
        "print('unshare', libc.unshare(0), ctypes.get_errno() == errno.EPERM)\n"
    )
    done = filtered([sys.executable, "-c", script])
    assert re.search(r"^Seccomp:\s+2$", done, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\s+1$", done, re.MULTILINE)
    assert "unshare -1 True" in done


@enforced
def test_a_broken_program_is_refused_with_words() -> None:
    def work() -> str:
        try:
            seccomp.install(b"\xff" * 8)
        except PlatformError as error:
            return error.detail
        return "installed"

    assert in_child(work) == f"the system call filter was refused: seccomp: {os.strerror(errno.EINVAL)}"


# --- ordinary programs ----------------------------------------------------------------------------------


def filtered(argv: list[str], cwd: Path | None = None) -> str:
    program = seccomp.build()
    done = subprocess.run(
        argv,
        preexec_fn=lambda: seccomp.install(program),
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@enforced
def test_shell_pipelines_run() -> None:
    assert filtered(["sh", "-c", "seq 1 100 | sort -rn | head -1; (sleep 0 & wait)"]) == "100\n"


@enforced
def test_python_threads_processes_and_sockets_run() -> None:
    script = """
import asyncio, multiprocessing, socket, subprocess, tempfile, threading, mmap, os, pty
done = []
thread = threading.Thread(target=lambda: done.append(1)); thread.start(); thread.join()
assert done == [1]
assert subprocess.run(["true"]).returncode == 0
assert subprocess.run(["true"], close_fds=False).returncode == 0
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
async def main():
    async def echo(reader, writer):
        writer.write(await reader.read(5)); await writer.drain(); writer.close()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        writer.write(b"hello"); assert await reader.read() == b"hello"
        writer.close(); await writer.wait_closed()
    child = await asyncio.create_subprocess_exec("echo", "ok", stdout=-1)
    assert (await child.communicate())[0] == b"ok\\n"
asyncio.run(main())
assert socket.if_nameindex()
socket.getaddrinfo("localhost", 80)
a, b = socket.socketpair(); a.send(b"x"); assert b.recv(1) == b"x"
mmap.mmap(-1, 4096).close()
os.memfd_create("x"); os.getrandom(4); os.pidfd_open(os.getpid())
main_end, end = pty.openpty(); os.get_terminal_size(end)
with tempfile.TemporaryFile() as f: os.posix_fallocate(f.fileno(), 0, 10)
print("fine")
"""
    assert filtered([sys.executable, "-W", "ignore", "-c", script]) == "fine\n"


@enforced
def test_git_runs(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    filtered(["git", "init", "-q", "."], tmp_path)
    (tmp_path / "file").write_text("text")
    filtered(["git", "add", "."], tmp_path)
    filtered(["git", *who, "commit", "-qm", "first"], tmp_path)
    assert "first" in filtered(["git", "log", "--oneline"], tmp_path)


@enforced
def test_a_compiler_and_what_it_makes_run(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    (tmp_path / "a.c").write_text('#include <stdio.h>\nint main(void) { puts("made"); return 0; }\n')
    filtered(["gcc", "-pipe", "-o", "a", "a.c"], tmp_path)
    assert filtered([str(tmp_path / "a")]) == "made\n"


@enforced
def test_a_tracer_runs_and_may_answer_for_a_call() -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    filtered(["strace", "-f", "-o", "/dev/null", "true"])
    inject = ["strace", "-qq", "-o", "/dev/null", "-e", "inject=getppid:retval=4242"]
    assert filtered([*inject, "sh", "-c", "echo $PPID"]) == "4242\n"


@enforced
def test_a_program_may_filter_itself_further() -> None:
    def work() -> bool:
        seccomp.install(seccomp.build())
        seccomp.install(seccomp.build())
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        return seccomp.available()

    assert in_child(work) is True


def test_only_builds_may_change_their_root() -> None:
    assert seccomp.decision("chroot") == seccomp.refuse(errno.EPERM)
    assert {name: seccomp.decision(name, seccomp.FOR_BUILDS) for name in ("chroot", "mount", "unshare")} == {
        "chroot": seccomp.RET_ALLOW,
        "mount": seccomp.refuse(errno.EPERM),
        "unshare": seccomp.refuse(errno.EPERM),
    }
