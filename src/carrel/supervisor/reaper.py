"""Finds the processes of a command, and kills whole process trees.

The kernel gives orphans to the nearest ancestor that is a reaper. The supervisor is one (PID 1, or a child subreaper);
a runner is another, forked when a second command runs beside the first. A reaper has the processes of one command at a
time, so a walk down from it finds them all, whatever they do (double forks, `setsid`, ignored signals).
"""

from __future__ import annotations

import _posixsubprocess
import fcntl
import gc
import os
import signal
import socket
import struct
import sys
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from carrel.primitives import libc
from carrel.primitives.kernel_files import read, read_if_there, stat_fields

# Python ignores these; a program started by it expects the defaults.
RESET_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP)
# Those of them that the function of `subprocess` leaves as they are.
_NOT_RESTORED = tuple(set(RESET_SIGNALS) - {signal.SIGPIPE, signal.SIGXFSZ})
# It is not public, and its parameters differ between versions.
_FORKS_AND_EXECUTES = sys.version_info < (3, 15)
_LONGEST_FAILURE = 4096
# Signals of a terminal, which the leader of its session ignores.
_TERMINAL_SIGNALS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
OOM_SCORE_OF_COMMANDS, OOM_SCORE_OF_SUPERVISOR = b"500", b"0"
SHELL = "/bin/sh"


Stdio = tuple[int, int, int]
"""Descriptors for standard input, output and error."""


@dataclass(frozen=True)
class ProgramStart:
    """A program to start, with descriptors for its three standard streams or the name of a terminal for all of them.

    A `job` is a process group of its own in the session of its reaper. So the keys that stop a program work: the kernel
    never stops a group whose parents are all outside of its session.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    stdio: Stdio | None
    terminal: str | None = None
    job: bool = False


def set_oom_score(descriptor: int, score: bytes) -> None:
    """Set the OOM score of the supervisor, which its children inherit; -1 where the kernel does not use scores."""
    if descriptor >= 0:
        os.pwrite(descriptor, score, 0)


def find_program(name: str, path: str, directory: int) -> str | None:
    """Return the path of a program, found as `execvp` does, or None."""
    if "/" in name:
        return name
    for folder in path.split(":"):
        candidate = f"{folder or '.'}/{name}"
        try:
            if os.access(candidate, os.X_OK, dir_fd=directory):
                return candidate
        except (OSError, ValueError):
            continue
    return None


def spawn(program: ProgramStart, directory: int) -> int:
    """Start a program in its own session. Raises `OSError` when it cannot be executed.

    The child shares memory with the caller until the exec; a fork of a Python process costs several times more. It gets
    the working directory of the caller, who changes its own, which is safe with a single thread.
    """
    os.fchdir(directory)
    if program.stdio is None or not _FORKS_AND_EXECUTES or _ignores_signals():
        return _posix_spawn(program)
    failed, report = os.pipe2(os.O_CLOEXEC)
    try:
        pid = _fork_and_execute(program, program.stdio, failed, report)
        os.close(report)
        report = -1
        if words := os.read(failed, _LONGEST_FAILURE):
            os.waitpid(pid, 0)
            code = int(words.split(b":")[1], 16)
            raise OSError(code, os.strerror(code))
        return pid
    finally:
        os.close(failed)
        if report >= 0:
            os.close(report)


def _fork_and_execute(program: ProgramStart, stdio: Stdio, failed: int, report: int) -> int:
    """Start a program by the function of `subprocess`. It says through `report` why a program cannot be executed.

    In gVisor this takes three quarters of the time of `posix_spawn`, whose child makes more system calls.
    """
    argv = [os.fsencode(word) for word in program.argv]
    env = [os.fsencode(f"{name}={value}") for name, value in program.env.items()]
    streams = (stdio[0], -1, -1, stdio[1], -1, stdio[2])
    restore_signals = new_session = True
    words: list[Any] = [argv, (argv[0],), False, (), None, env, *streams, failed, report, restore_signals, new_session]
    words += [-1, None, None, None, -1, None]  # process group, groups, users, umask, function: none is changed
    if sys.version_info < (3, 14):
        words.append(True)  # it may share memory
    return int(_posixsubprocess.fork_exec(*words))


def _ignores_signals() -> bool:
    """Whether this process ignores a signal that its children would ignore too."""
    return any(signal.getsignal(number) is signal.SIG_IGN for number in _NOT_RESTORED)


def _posix_spawn(program: ProgramStart) -> int:
    if program.stdio is not None:
        actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate(program.stdio)
        ]
    else:  # opened by the leader of a new session, so that it becomes the controlling terminal
        actions = [(os.POSIX_SPAWN_OPEN, 0, program.terminal or "", os.O_RDWR, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]
    return os.posix_spawn(
        program.argv[0],
        program.argv,
        program.env,
        file_actions=actions,
        setsid=True,
        setsigdef=RESET_SIGNALS,
        setsigmask=(),
    )


def _start_job(program: ProgramStart, directory: int) -> int:
    """Start a program as the foreground job of a terminal; the caller becomes the leader of the terminal's session.

    The child makes itself the foreground group before it executes the program, so it can read from the terminal.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    for number in _TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    terminal = os.open(program.terminal or "", os.O_RDWR | os.O_CLOEXEC)  # becomes the controlling terminal
    failed, report = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                os.tcsetpgrp(terminal, os.getpid())
                for target in range(3):
                    os.dup2(terminal, target)
                for number in (*_TERMINAL_SIGNALS, *RESET_SIGNALS):
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                os.fchdir(directory)
                os.execve(program.argv[0], program.argv, program.env)  # noqa: S606 - the agent's program
            except OSError as error:
                os.write(report, struct.pack("=i", error.errno or 0))
            finally:
                os._exit(127)
        os.close(report)
        report = -1
        if code := os.read(failed, 4):
            os.waitpid(pid, 0)
            number = struct.unpack("=i", code)[0]
            raise OSError(number, os.strerror(number))
        return pid
    finally:
        os.close(terminal)
        os.close(failed)
        if report >= 0:
            os.close(report)


def _leave_terminal() -> None:
    """Give up the controlling terminal, so that the next one can be opened."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # its other side was closed, which has done the same
    fcntl.ioctl(terminal, termios.TIOCNOTTY)
    os.close(terminal)


def processes() -> dict[int, int]:
    """Return every visible process with its parent, without zombies."""
    found = {pid: _parent(pid) for pid in _listed()}
    return {pid: parent for pid, parent in found.items() if parent is not None}


def _listed() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int | None:
    """Return the parent of a process of which at least one thread is alive, else None."""
    fields = stat_fields(f"/proc/{pid}")
    # The state is that of the first thread, which stays a zombie as long as there are other threads.
    if len(fields) <= _THREADS or (fields[0] in {b"Z", b"X"} and int(fields[_THREADS]) <= 1):
        return None
    return int(fields[1])


def tasks_below(*roots: tuple[int, Sequence[int]]) -> list[int]:
    """Count the threads below each process, as the kernel's process limit does; given subtrees are left out.

    Zombies are counted too, because the kernel counts them until their parent waits for them.
    """
    found = {pid: fields for pid in _listed() if len(fields := stat_fields(f"/proc/{pid}")) > _THREADS}
    parents = {pid: int(fields[1]) for pid, fields in found.items()}
    return [sum(max(1, int(found[pid][_THREADS])) for pid in descendants(root, parents, stop)) for root, stop in roots]


_KILL = 1 << (signal.SIGKILL - 1)
_PR_SET_CHILD_SUBREAPER = 36
_THREADS = 17  # the index of the number of threads among the fields of `stat` after the name
MOST_LOOKS = 32
"""How often the list of processes is read for one signal."""


def descendants(root: int, parents: dict[int, int], stop: Sequence[int] = ()) -> list[int]:
    """Return the processes below `root`, without the subtrees of those in `stop`."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    pending = [root]
    while pending:
        for pid in children.get(pending.pop(), ()):
            if pid not in stop:
                found.append(pid)
                pending.append(pid)
    return found


def children(pid: int) -> list[int]:
    """Return the children of a process with one thread. Raises `OSError` where the kernel does not list them."""
    return [int(child) for child in read(f"/proc/{pid}/task/{pid}/children", 65536).split()]


def is_ending(pid: int) -> bool:
    """Whether a process has ended, or was killed and has not been reported as ended yet."""
    status = read_if_there(f"/proc/{pid}/status", 8192)
    if not status or b"\nState:\tZ" in status or b"\nState:\tX" in status:
        return True
    pending = [status.partition(name)[2][:16] for name in (b"\nSigPnd:\t", b"\nShdPnd:\t")]
    return any(mask and int(mask, 16) & _KILL for mask in pending)


def kill_below(root: int, stop: Sequence[int] = ()) -> int:
    """Kill the processes below `root`; return how many. A killed process cannot fork, so repeating this reaches 0."""
    return signal_below(root, signal.SIGKILL, stop)


def signal_below(root: int, number: int, stop: Sequence[int] = ()) -> int:
    """Send a signal to the processes below `root`; return to how many, 0 only when there were none.

    A process that forks and exits at once has another PID at each scan. So the list is read again until it has no new
    processes; processes whose parent ended meanwhile are read again too, as they have another parent now. A parent gets
    the signal before its children: otherwise a shell that waits for a killed child could still report its exit code.
    """
    parents: dict[int, int] = {}
    seen: set[int] = set()
    signalled: set[int] = set()
    lost: dict[int, int] = {}
    for _ in range(MOST_LOOKS):
        new = set(_listed()) - seen
        if not new:
            return len(signalled)
        seen |= new
        for pid in sorted(new, reverse=True):  # the youngest may be gone soon
            if (parent := _parent(pid)) is not None:
                parents[pid] = parent
        for pid, parent in parents.items():
            if parent not in parents and lost.get(pid) != parent:  # twice the same parent: it is hidden from us
                lost[pid] = parent
                seen.discard(pid)
        for pid in descendants(root, parents, stop):
            if pid in signalled:
                continue
            signalled.add(pid)
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                pass
    return len(signalled) or 1


def resume(pid: int) -> None:
    """Continue a process that may have been stopped by a signal."""
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def memory_file(data: bytes) -> int:
    """Return a descriptor of an anonymous file with these bytes, positioned at the start."""
    memory = os.memfd_create("carrel", os.MFD_CLOEXEC)
    with open(memory, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(memory, 0, os.SEEK_SET)
    return memory


class Reaper:
    """The supervisor's view of a process that has the processes of one command below it and reports about them.

    `on_event` is called with `started`, then `ended`, then `clean`; with `dead` when the reaper itself has ended.
    """

    pid: int
    socket: socket.socket
    on_event: Callable[[Reaper, str, int], None]

    def on_readable(self) -> None:
        """Called when the process has sent something."""
        while True:
            try:
                message = self.socket.recv(64)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if len(message) != 16:
                self.on_event(self, "dead", 0)
                return
            kind, value = struct.unpack("=8sq", message)
            self.on_event(self, kind.rstrip(b"\0").decode(), value)

    def kill_below(self) -> int:
        """Kill the processes below the reaper; return how many. One of them may have stopped it, so it is continued."""
        resume(self.pid)
        return kill_below(self.pid)

    def close(self) -> None:
        self.socket.close()
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def gone(self) -> None:
        """Called once, when the process has ended for any reason."""


class Runner(Reaper):
    """A reaper that is forked from the supervisor and starts one program at a time."""

    def __init__(self, on_event: Callable[[Reaper, str, int], None], oom_score_fd: int):
        self.on_event = on_event
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The descriptor always means the supervisor's own score, so the runner has to inherit its score.
        set_oom_score(oom_score_fd, OOM_SCORE_OF_COMMANDS)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                try:
                    _run(theirs, ours)
                finally:
                    os._exit(1)
        except OSError:
            ours.close()
            raise
        finally:
            set_oom_score(oom_score_fd, OOM_SCORE_OF_SUPERVISOR)
            theirs.close()
        ours.setblocking(False)
        self.socket = ours

    def start(self, program: ProgramStart, directory: int) -> None:
        fds = [directory, *(program.stdio or ())]
        fields = [program.terminal or "", "job" if program.job else "", str(len(program.argv)), *program.argv]
        fields += [f"{key}={value}" for key, value in program.env.items()]
        payload = b"\0".join(field.encode(errors="surrogateescape") for field in fields)
        # It may be larger than a packet, so it is sent as an anonymous file.
        memory = memory_file(payload)
        try:
            socket.send_fds(self.socket, [b"start"], [memory, *fds])
        finally:
            os.close(memory)


def _run(orders: socket.socket, other_end: socket.socket) -> None:
    """Run as the runner process: a child subreaper that starts a program and waits for it and all its descendants."""
    # The runner's collector must not write to the pages it shares with the supervisor. Freezing before the fork would
    # do the same in the supervisor, where frozen objects that become garbage later are never collected.
    gc.freeze()
    other_end.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.closerange(3, orders.fileno())
    os.closerange(orders.fileno() + 1, 2**31 - 1)

    def report(kind: bytes, value: int) -> None:
        orders.send(struct.pack("=8sq", kind, value))

    while True:
        word, fds, _flags, _address = socket.recv_fds(orders, 64, 8)
        for descriptor in fds:  # `recv_fds` ignores its flags, so MSG_CMSG_CLOEXEC would do nothing
            os.set_inheritable(descriptor, False)
        if word != b"start":
            return
        fields = os.pread(fds[0], os.fstat(fds[0]).st_size, 0).decode(errors="surrogateescape").split("\0")
        count = int(fields[2])
        env = dict(field.partition("=")[::2] for field in fields[3 + count :])
        stdio = (fds[2], fds[3], fds[4]) if len(fds) == 5 else None
        program = ProgramStart(tuple(fields[3 : 3 + count]), env, stdio, fields[0] or None, fields[1] == "job")
        try:
            main = _start_job(program, fds[1]) if program.job else spawn(program, fds[1])
        except OSError as error:
            report(b"failed", error.errno or 0)
            main = 0
        else:
            report(b"started", main)
        for descriptor in fds:
            os.close(descriptor)
        os.chdir("/")
        while True:
            try:
                pid, status = os.waitpid(-1, os.WUNTRACED if program.job else 0)
            except ChildProcessError:
                break
            if pid == main:
                report(b"stopped" if os.WIFSTOPPED(status) else b"ended", status)
        if program.job:
            _leave_terminal()
        report(b"clean", 0)
