"""Commands and terminals of one sandbox: start, stream, signal, kill at a deadline, remember.

The process tree of a command is everything below its reaper (see `reaper`). Runs on one event loop, without threads.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime

from carrel.errors import AlreadyExists, LimitExceeded, NotFound, NotRunning
from carrel.primitives.backoff import Backoff
from carrel.supervisor import command_input
from carrel.supervisor.command import Order, SupervisedCommand, signal_number
from carrel.supervisor.output import STDERR, STDOUT, ByteBudget, CommandOutput, read_some
from carrel.supervisor.reaper import (
    OOM_SCORE_OF_COMMANDS,
    OOM_SCORE_OF_SUPERVISOR,
    SHELL,
    ProgramStart,
    Reaper,
    Runner,
    Stdio,
    children,
    find_program,
    kill_below,
    memory_file,
    processes,
    set_oom_score,
    signal_below,
    spawn,
    tasks_below,
)

CAPACITY = 64
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_./+-]+")
REMEMBERED = 128
READ_SIZE = 256 * 1024
LAST_DRAIN = 1024 * 1024
IDLE_RUNNERS = 8
RUNNER_REST_S = 10.0
ROOM_S = 25.0
ATTACHED_LIMIT = 1024 * 1024
"""Unread output at which an attached command has to wait for its reader."""
OUTPUT_BUDGET = 128 * 1024 * 1024


class Commands:
    """All commands of a sandbox."""

    _loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self.oom_score_fd = -1
        self._budget = ByteBudget(0)
        self._commands: dict[str, SupervisedCommand] = {}
        self._count = 0
        self._pid = 0
        self._direct: SupervisedCommand | None = None  # runs with the supervisor itself as its reaper
        self._last_direct: SupervisedCommand | None = None  # may have left processes below the supervisor
        self._by_pid: dict[int, SupervisedCommand] = {}
        self._childless = False  # nothing was started since the kernel said that there is no child
        self._runners: dict[int, Reaper] = {}
        self._idle: list[Reaper] = []
        self._hosting: dict[Reaper, SupervisedCommand] = {}
        self._rest: asyncio.TimerHandle | None = None
        self._null = -1
        self._sweeps = 0  # while one is running, nothing may be started directly below the supervisor
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle the end of child processes. Done before the fork, because it is not cheap."""
        loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def configure(self, loop: asyncio.AbstractEventLoop, oom_score_fd: int, budget: int) -> None:
        """Take charge of a sandbox: its loop, its PID and its descriptors are known only now."""
        self._loop = loop
        self.oom_score_fd = oom_score_fd
        self._budget = ByteBudget(budget)
        self._pid = os.getpid()
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._null)
        self._loop.remove_signal_handler(signal.SIGCHLD)

    @property
    def running(self) -> int:
        return sum(command.running for command in self._commands.values())

    @property
    def left_behind(self) -> bool:
        """Whether processes of commands that have ended still run."""
        return bool(self._hosting or self._sweeps) or self._leftovers()

    def all(self) -> list[SupervisedCommand]:
        """Return the remembered commands, oldest first."""
        return list(self._commands.values())

    def get(self, name: str) -> SupervisedCommand:
        try:
            return self._commands[name]
        except KeyError:
            raise NotFound(
                f"no command {name[:40]!r} in this sandbox",
                hint=f"the last {REMEMBERED} commands are remembered; list them to see their ids",
            ) from None

    def require_new(self, name: str | None) -> None:
        """Raise `AlreadyExists` if a command has this id."""
        if name in self._commands:
            raise AlreadyExists(f"there is a command '{name}'", field="id", hint="ask for its result by its id")

    # starting

    async def make_room(self) -> None:
        """Kill the processes that ended commands left behind, if they use most of the sandbox's process limit.

        Call this before starting a command: otherwise a fork bomb that was left behind would keep every later command
        from starting. Running commands are never touched.
        """
        if not self._crowded():
            return
        doomed: list[SupervisedCommand] = []
        try:
            async with asyncio.timeout(ROOM_S):
                while any(command.killing for command in doomed) or (doomed := self._ended_hosts()):
                    for command in doomed:
                        self.kill(command)
                    await asyncio.sleep(0.005)  # until all are gone: half a fork bomb soon grows again
        except TimeoutError:
            pass  # the new command reports why it cannot start

    def _crowded(self) -> bool:
        if not (ended := self._ended_hosts()):
            return False
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if limit == resource.RLIM_INFINITY:
            return False
        roots = [(each.runner.pid, ()) if each.runner else (self._pid, tuple(self._runners)) for each in ended]
        total, *left = tasks_below((self._pid, ()), *roots)
        return total > limit * 3 // 4 and sum(left) > total // 2

    def _ended_hosts(self) -> list[SupervisedCommand]:
        """Return the commands that have ended and may have left processes behind."""
        found = [command for command in self._hosting.values() if not command.running]
        direct = self._last_direct
        if direct is not None and not direct.running and direct.runner is None and self._leftovers():
            found.append(direct)
        return found

    def start(self, order: Order) -> SupervisedCommand:
        """Start a command. A program that cannot be found or executed is a result (127, 126), as in a shell."""
        argv = _argv(order.command)
        program = find_program(argv[0], order.env.get("PATH", ""), order.directory)

        def launch(command: SupervisedCommand, stdio: Stdio | None) -> None:
            if program is None:
                raise FileNotFoundError(errno.ENOENT, "")
            terminal = os.ttyname(command.slave_fd) if order.terminal else None
            job = order.attached and terminal is not None
            self._launch(command, ProgramStart((program, *argv[1:]), order.env, stdio, terminal, job))

        return self._begin(order, argv[0], launch)

    def start_on(self, order: Order, reaper: Reaper, hand_over: Callable[[Stdio], None]) -> SupervisedCommand:
        """Start a command in a process that waits below an adopted reaper; `hand_over` gives the work to it."""

        def launch(command: SupervisedCommand, stdio: Stdio | None) -> None:
            assert stdio is not None
            command.runner = reaper
            self._hosting[reaper] = command
            try:
                hand_over(stdio)
            except OSError:
                command.runner = None
                del self._hosting[reaper]
                raise

        return self._begin(order, str(order.command[0]), launch)

    def _begin(
        self, order: Order, name: str, launch: Callable[[SupervisedCommand, Stdio | None], None]
    ) -> SupervisedCommand:
        self.require_new(order.id)
        if self.running >= CAPACITY:
            why = f"{CAPACITY} commands run in this sandbox already"
            raise LimitExceeded(why, hint="wait for one to end, or end one")
        self._count += 1
        command = SupervisedCommand(
            id=order.id or f"c{self._count}",
            order=order,
            output=CommandOutput(ATTACHED_LIMIT, self._budget, lambda: self._read_on(command))
            if order.attached
            else self.new_output(order.output_limit),
            started_at=datetime.now(UTC),
            started=time.monotonic(),
            finished=self._loop.create_future(),
        )
        self._commands[command.id] = command
        self._forget_old()
        theirs: list[int] = []
        try:
            launch(command, self._plumb(command, theirs))
        except OSError as error:
            self._never_started(command, error.errno or 0, name)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
            for descriptor in command.readers:  # the program is running meanwhile
                self._loop.add_reader(descriptor, self._on_output, command, descriptor)
        if order.timeout is not None and command.running:
            command.deadline = self._loop.call_later(order.timeout, self._expire, command)
        return command

    def new_output(self, limit: int) -> CommandOutput:
        """Create an output that shares the budget of the commands."""
        return CommandOutput(limit, self._budget)

    def _plumb(self, command: SupervisedCommand, theirs: list[int]) -> Stdio | None:
        order = command.order
        if order.terminal is not None:
            command.terminal_fd, command.slave_fd = os.openpty()
            os.set_blocking(command.terminal_fd, False)
            command_input.resize(command, *order.terminal)
            command.readers[command.terminal_fd] = STDOUT
            if order.stdin is not None:
                self._in_background(command_input.type_all(command, order.stdin))
            return None
        if order.stdin is not None:
            given = memory_file(order.stdin)
            theirs.append(given)
        elif order.interactive:
            given, command.stdin_fd = os.pipe2(os.O_CLOEXEC)
            theirs.append(given)
            os.set_blocking(command.stdin_fd, False)
        else:
            given = self._null
        ends = []
        for stream in (STDOUT, STDERR):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            theirs.append(write_end)
            os.set_blocking(read_end, False)
            command.readers[read_end] = stream
            ends.append(write_end)
        return given, ends[0], ends[1]

    def _launch(self, command: SupervisedCommand, program: ProgramStart) -> None:
        # The kernel's list of children can be incomplete while some of them end, so a command being killed counts.
        ending = self._last_direct is not None and self._last_direct.killing
        if not program.job and self._direct is None and not self._sweeps and not ending and not self._leftovers():
            command.pid = self.spawn(program, command.order.directory)
            self._by_pid[command.pid] = command
            command.begun.set()
            self._direct = self._last_direct = command
            command.close_slave()
            return
        runner = self._idle.pop() if self._idle else self._new_runner()
        assert isinstance(runner, Runner)
        command.runner = runner
        self._hosting[runner] = command
        runner.start(program, command.order.directory)

    def spawn(self, program: ProgramStart, directory: int) -> int:
        """Start a program with an OOM score that lets the kernel kill it before the supervisor."""
        self._childless = False
        set_oom_score(self.oom_score_fd, OOM_SCORE_OF_COMMANDS)
        try:
            return spawn(program, directory)
        finally:
            set_oom_score(self.oom_score_fd, OOM_SCORE_OF_SUPERVISOR)

    def _new_runner(self) -> Runner:
        runner = Runner(self._on_runner, self.oom_score_fd)
        self.adopt(runner)
        return runner

    def adopt(self, reaper: Reaper) -> None:
        """Handle the events of a reaper. Neither it nor its descendants count as left behind by a command."""
        self._childless = False
        self._runners[reaper.pid] = reaper
        self._loop.add_reader(reaper.socket, reaper.on_readable)

    def disown(self, reaper: Reaper) -> None:
        if self._runners.get(reaper.pid) is reaper:
            self._lost(reaper)

    def _leftovers(self) -> bool:
        """Whether processes of an earlier command are still directly below the supervisor."""
        if self._childless:
            return False
        try:
            return any(pid not in self._runners for pid in children(self._pid))
        except OSError:
            return True  # unknown: then a runner is used, which is always correct

    def _never_started(self, command: SupervisedCommand, code: int, name: str) -> None:
        words = _not_found(command.order, name) if code == errno.ENOENT else f"{name}: {os.strerror(code)}"
        command.output.add(STDERR, f"carrel: {words}\n".encode(errors="surrogateescape"))
        command.close_slave()
        self._finish(command, (127 if code == errno.ENOENT else 126) << 8)

    # output

    def _on_output(self, command: SupervisedCommand, descriptor: int) -> None:
        self._read(command, descriptor)
        if not command.readers and command is self._direct and command.pid is not None:
            self._reap_one(command.pid)  # it has closed its output, so it ends now: the signal takes longer

    def _read(self, command: SupervisedCommand, descriptor: int) -> int:
        data = read_some(descriptor, READ_SIZE)
        if data is None:
            return 0
        if data:
            command.output.add(command.readers[descriptor], data)
            if command.output.full and command.running:
                self._loop.remove_reader(descriptor)
                command.paused.add(descriptor)
        else:
            self._stop_reading(command, descriptor)
        return len(data)

    def _read_on(self, command: SupervisedCommand) -> None:
        for descriptor in command.paused & command.readers.keys():
            self._loop.add_reader(descriptor, self._on_output, command, descriptor)
        command.paused.clear()

    def _stop_reading(self, command: SupervisedCommand, descriptor: int) -> None:
        if command.readers.pop(descriptor, None) is not None:
            command.paused.discard(descriptor)
            self._loop.remove_reader(descriptor)
            if descriptor != command.terminal_fd:
                os.close(descriptor)

    # ending

    def _reap(self) -> None:
        while self._reap_one(-1):
            pass

    def _reap_one(self, pid: int) -> bool:
        """Handle the end of this child, or of any (-1); return whether one has ended."""
        try:
            pid, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            self._childless |= pid == -1
            return False
        if pid == 0:
            return False
        command = self._by_pid.pop(pid, None)
        if command is not None:
            self._finish(command, status)
        elif (reaper := self._runners.get(pid)) is not None:
            reaper.on_readable()  # its last messages
            if self._runners.get(pid) is reaper:
                reaper.on_event(reaper, "dead", 0)  # another object may handle its events
        return True

    def _finish(self, command: SupervisedCommand, status: int) -> None:
        if not command.running:
            return
        command.end_progress()
        # The last output of the command is still in the pipes. Processes that it left behind must not delay its end.
        for descriptor in list(command.readers):
            left = LAST_DRAIN
            while descriptor in command.readers and left > 0 and (got := self._read(command, descriptor)) > 0:
                left -= got
        if command.deadline is not None:
            command.deadline.cancel()
        command.status = status
        command.ended = time.monotonic()
        command.begun.set()
        if self._direct is command:
            self._direct = None
        command_input.close_stdin(command, self._loop)
        if command.terminal_fd >= 0:
            self._stop_reading(command, command.terminal_fd)
            self._loop.remove_writer(command.terminal_fd)
            os.close(command.terminal_fd)
            command.terminal_fd = -1
        command.output.end()
        if not command.finished.done():
            command.finished.set_result(None)

    def _expire(self, command: SupervisedCommand) -> None:
        if command.running:
            command.timed_out = True
            self.kill(command)

    def kill(self, command: SupervisedCommand) -> None:
        """Kill the whole process tree of a command, including what it left behind."""
        if not command.killing:
            command.killing = True
            self._in_background(self._kill(command))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _kill(self, command: SupervisedCommand) -> None:
        backoff = Backoff(0.0005, 0.05)
        try:
            while True:
                runner = command.runner
                if runner is not None and self._hosting.get(runner) is not command:
                    return  # nothing is left; the runner may have another command already
                if runner is None and self._last_direct is not command:
                    return
                left = runner.kill_below() if runner else kill_below(self._pid, tuple(self._runners))
                if left == 0 and (not command.running or runner is None):
                    return
                await asyncio.sleep(backoff.next_pause())
        finally:
            command.killing = False

    def signal(self, command: SupervisedCommand, name: str, *, tree: bool) -> None:
        """Send a signal to the process group of a command, or with `tree` to all its processes."""
        number = signal_number(name)
        if tree and number == signal.SIGKILL:
            self.kill(command)
            return
        if not command.running or command.pid is None:
            raise NotRunning(f"command {command.id} has ended")
        try:
            os.killpg(command.pid, number)
        except ProcessLookupError:
            raise NotRunning(f"command {command.id} has ended") from None
        if tree:
            from_reaper = command.runner.pid if command.runner else self._pid
            signal_below(from_reaper, number, () if command.runner else tuple(self._runners))

    # forgetting

    def forget(self, command: SupervisedCommand) -> None:
        """Kill what still runs of a command, and drop its output."""
        self._commands.pop(command.id, None)
        self.kill(command)
        for descriptor in list(command.readers):
            if not command.running:
                self._stop_reading(command, descriptor)
        command.output.release()

    def _forget_old(self) -> None:
        ended = [command for command in self._commands.values() if not command.running]
        spare = len(ended) - REMEMBERED
        for command in ended:
            if spare <= 0 and self._budget.left > self._budget.limit // 4:
                return
            spare -= 1
            del self._commands[command.id]
            for descriptor in list(command.readers):
                command.readers[descriptor] = STDOUT  # still drained, so that processes left behind do not block
            command.output.release()

    # runners

    def on_reaper(self, reaper: Reaper, event: str, value: int) -> None:
        """Handle an event of a reaper, about its command or itself."""
        command = self._hosting.get(reaper)
        if event == "dead":
            self._lost(reaper)
        elif event == "clean":
            self._hosting.pop(reaper, None)
        elif command is not None:
            if event == "started":
                command.pid = value
                command.begun.set()
                command.close_slave()
            elif event == "stopped":
                command.output.stopped()
            elif event == "ended":
                self._finish(command, value)
            elif event == "failed":
                argv = command.order.command
                self._never_started(command, value, argv if isinstance(argv, str) else argv[0])

    def _on_runner(self, runner: Reaper, event: str, value: int) -> None:
        self.on_reaper(runner, event, value)
        if event == "clean":
            self._idle.append(runner)
            self._rest_later()

    def _rest_later(self) -> None:
        while len(self._idle) > IDLE_RUNNERS:
            self._dismiss(self._idle.pop(0))
        if self._rest is not None:
            self._rest.cancel()
        self._rest = self._loop.call_later(RUNNER_REST_S, self._dismiss_idle)

    def _dismiss_idle(self) -> None:
        while self._idle:
            self._dismiss(self._idle.pop())

    def _dismiss(self, runner: Reaper) -> None:
        self._loop.remove_reader(runner.socket)
        runner.close()

    def _lost(self, runner: Reaper) -> None:
        """Handle the end of a reaper: dismissed, or killed by an agent's process."""
        if self._runners.pop(runner.pid, None) is None:
            return
        if runner in self._idle:
            self._idle.remove(runner)
        if runner.socket.fileno() >= 0:
            self._dismiss(runner)
        command = self._hosting.pop(runner, None)
        if command is not None:
            command.runner = None
            if command.running:
                self._finish(command, signal.SIGKILL)
            # Its processes are now below the supervisor and look like any others left there: kill them all.
            self.sweep(runner)
        runner.gone()

    def sweep(self, lost: Reaper) -> None:
        """Kill the processes below the supervisor that have no reaper, including those of a reaper that was lost."""
        self._sweeps += 1
        self._in_background(self._sweep(lost.pid))

    async def _sweep(self, lost: int) -> None:
        # In this order: while the reaper ends, its processes move to the supervisor, perhaps right after a scan.
        # The direct command and its descendants were never below the reaper.
        while lost in processes() or kill_below(self._pid, (*self._runners, *self._by_pid)):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)
        self._sweeps -= 1


def _argv(command: str | Sequence[str]) -> list[str]:
    """Return the words to run. A text needs a shell; without one, a text that is a single plain word is a program."""
    if not isinstance(command, str):
        return list(command)
    plain = _PLAIN_WORD.fullmatch(command) and not os.path.lexists(SHELL)
    return [command] if plain else [SHELL, "-c", command]


def _not_found(order: Order, name: str) -> str:
    """Return why the kernel did not find a program: an image may lack its shell, or what a program needs to start."""
    if name == SHELL and not os.path.lexists(SHELL):
        return f"this sandbox has no shell ({SHELL}): give the command as a list of words, not as one text"
    if isinstance(order.command, str) and find_program(name, order.env.get("PATH", ""), order.directory) is None:
        return f"this sandbox has no shell ({SHELL}) and no program {name}"
    program = find_program(name, order.env.get("PATH", ""), order.directory)
    if program is not None and os.access(program, os.F_OK, dir_fd=order.directory):
        return f"{name}: it is there, but the loader or interpreter that it needs is not in this sandbox"
    return f"{name}: command not found"
