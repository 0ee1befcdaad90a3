"""Connects a program in a sandbox to the streams, the terminal and the signals of this process, as if it ran directly.

One thread and one loop. Output that the reader of this process does not take is not fetched, and input that the program
does not take is not read.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from carrel.cli.here.wire import BINARY, TEXT, LocalWire, WebSocket
from carrel.errors import NotFound, NotRunning, SandboxLost, from_problem

PASSED_ON = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
HANGUP_S = 5.0
"""How long a program may run on after its terminal is gone."""
MOST_INPUT = 256 * 1024
MOST_OUTPUT = 1024 * 1024
PIECE = 4096
"""A pipe that can be written to takes this many bytes without waiting."""


class Questions(Protocol):
    """Asks a person at the terminal. The program's output is held back meanwhile."""

    def open(self) -> None:
        """Start to listen."""

    def fileno(self) -> int:
        """Return the descriptor on which news arrive."""

    def arrived(self) -> None:
        """Read the news."""

    @property
    def waiting(self) -> bool:
        """Whether there is something to ask."""

    def text(self) -> bytes:
        """Return the question, as it is written to the terminal."""

    def typed(self, keys: bytes) -> bool:
        """Take what was typed; return whether the question is answered."""


class Attached:
    """A program with the streams of this process."""

    def __init__(self, wire: LocalWire, sandbox_path: str, request: dict[str, Any], questions: Questions | None):
        self._wire = wire
        self._path = sandbox_path
        self._terminal = "terminal" in request
        self._request = request
        self._questions = questions
        self._asked = False
        self._output: deque[tuple[int, memoryview]] = deque()
        self._output_bytes = 0
        self._signals: deque[int] = deque()
        self._input_open = True
        self._hangup: float | None = None
        self._stopped = False
        self._screen = _Screen()
        self._id = ""
        self._info: dict[str, Any] | None = None

    def run(self, approval: str | None = None) -> dict[str, Any]:
        """Start the program and pass everything on until it ends; return its info."""
        with _signals(self._signals) as woken, contextlib.ExitStack() as stack:
            socket = self._wire.open_socket(f"{self._path}/commands/attached", approval)
            stack.callback(socket.close)
            socket.send(TEXT, json.dumps(self._request).encode())
            self._modes = stack.enter_context(_TerminalModes()) if self._terminal else None
            while self._info is None or self._output:
                self._step(socket, woken)
        return self._info

    def _step(self, socket: WebSocket, woken: int) -> None:
        """Wait for one event and handle it."""
        watched = select.poll()
        watched.register(woken, select.POLLIN)
        reading = self._info is None and self._output_bytes < MOST_OUTPUT
        if reading or socket.unsent:
            watched.register(socket, (select.POLLIN if reading else 0) | (select.POLLOUT if socket.unsent else 0))
        if self._input_open and self._id and self._info is None and socket.unsent < MOST_INPUT:
            watched.register(0, select.POLLIN)
        if self._output and not self._asked:
            watched.register(self._output[0][0], select.POLLOUT)
        if self._questions is not None and self._questions.fileno() >= 0:
            watched.register(self._questions.fileno(), select.POLLIN)
        for descriptor, _ in watched.poll(1000 if self._asked or self._hangup is not None else None):
            if descriptor == woken:
                os.read(woken, 4096)
            elif descriptor == socket.fileno():
                self._receive(socket, reading)
            elif descriptor == 0:
                self._read(socket)
            elif self._output and descriptor == self._output[0][0]:
                self._write(descriptor)
            elif self._questions is not None and descriptor == self._questions.fileno():
                self._questions.arrived()
        while self._signals:
            self._signal(self._signals.popleft())
        if self._stopped and not self._output:
            self._suspend()
        if self._asked and (self._info is not None or not self._questions_wait()):
            self._show_again()  # the program has ended, or the question was answered elsewhere, or has expired
        elif not self._asked and not self._output and self._info is None and self._questions_wait():
            self._ask()
        if self._hangup is not None and time.monotonic() > self._hangup:
            raise SandboxLost("the terminal is gone, and the program did not end")

    def _receive(self, socket: WebSocket, reading: bool) -> None:
        if socket.unsent:
            socket.flush()
        messages = socket.receive() if reading else []
        for kind, data in messages:
            if kind == BINARY:
                self._put(2 if data[:1] == b"\x02" else 1, data[1:])
            else:
                self._control(json.loads(data))
        if socket.closed and self._info is None:
            raise SandboxLost("the server ended the program's connection", hint="is the server still running?")

    def _control(self, message: dict[str, Any]) -> None:
        if "started" in message:
            self._id = message["started"]["id"]
            if self._modes is not None:
                self._modes.raw()
            if self._questions is not None:
                self._questions.open()
        elif "exit" in message:
            self._info = message["exit"]
        elif "stopped" in message:
            self._stopped = True
        elif isinstance(message.get("error"), dict):
            raise from_problem(message["error"])

    def _put(self, descriptor: int, data: bytes) -> None:
        self._screen.see(data)
        self._output.append((descriptor, memoryview(data)))
        self._output_bytes += len(data)

    def _write(self, descriptor: int) -> None:
        data = self._output[0][1]
        try:
            written = os.write(descriptor, data[:PIECE])
        except BlockingIOError:
            return
        self._output_bytes -= written
        if written == len(data):
            self._output.popleft()
        else:
            self._output[0] = descriptor, data[written:]

    def _read(self, socket: WebSocket) -> None:
        try:
            data = os.read(0, 1 << 16)
        except OSError:
            data = b""
        if data and self._asked:
            if self._questions is not None and self._questions.typed(data):
                self._answered()
            return
        if data:
            socket.send(BINARY, data)
            return
        self._input_open = False
        if self._terminal:
            self._hang_up()
        else:
            socket.send(BINARY, b"")

    def _hang_up(self) -> None:
        """The terminal is gone: tell the program, and give it a moment."""
        if self._hangup is None:
            self._hangup = time.monotonic() + HANGUP_S
            self._send("HUP")

    def _signal(self, number: int) -> None:
        if number == signal.SIGWINCH:
            self._resize()
        elif number == signal.SIGTSTP:
            if self._terminal:
                self._send("TSTP")
            else:
                self._send("STOP")
                self._suspend()
        elif number == signal.SIGHUP and self._terminal:
            self._hang_up()
        else:
            self._send(signal.Signals(number).name.removeprefix("SIG"))

    def _send(self, name: str) -> None:
        if self._id:
            self._request_of_command("signal", {"signal": name})

    def _resize(self, *, fewer: int = 0) -> None:
        if self._terminal and self._id:
            rows, columns = terminal_size()
            self._request_of_command("resize", {"rows": max(1, rows - fewer), "cols": columns})

    def _request_of_command(self, what: str, body: dict[str, Any]) -> None:
        with contextlib.suppress(NotRunning, NotFound):  # it has just ended
            self._wire.request("POST", f"{self._path}/commands/{self._id}/{what}", body, timeout=10.0)

    def _suspend(self) -> None:
        """Stop this process group, as the program was stopped; go on when the shell continues it."""
        self._stopped = False
        if self._modes is not None:
            self._modes.restore()
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.killpg(0, signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)
        if self._modes is not None:
            self._modes.raw()
            self._resize()
        self._send("CONT")

    def _questions_wait(self) -> bool:
        return self._questions is not None and self._questions.waiting

    def _ask(self) -> None:
        assert self._questions is not None
        self._asked = True
        self._write_now(self._screen.leave() + self._questions.text())

    def _answered(self) -> None:
        assert self._questions is not None
        if self._questions.waiting:
            self._write_now(b"\r\n" + self._questions.text())
        else:
            self._show_again()

    def _show_again(self) -> None:
        """Show the program's screen in place of the question."""
        self._asked = False
        self._write_now(self._screen.come_back())
        if self._screen.alternate and self._info is None:
            # The program has to draw it again: another size for a moment makes it do so.
            self._resize(fewer=1)
            self._resize()

    def _write_now(self, data: bytes) -> None:
        while data:
            data = data[os.write(1, data) :]


class _Screen:
    """Knows whether the program uses the alternate screen, so that a question does not destroy its screen."""

    def __init__(self) -> None:
        self.alternate = False
        self._last = b""

    def see(self, data: bytes) -> None:
        """Look for the sequences that switch screens. They may be split over two pieces."""
        seen = self._last + data
        on = max(seen.rfind(b"\x1b[?1049h"), seen.rfind(b"\x1b[?1047h"), seen.rfind(b"\x1b[?47h"))
        off = max(seen.rfind(b"\x1b[?1049l"), seen.rfind(b"\x1b[?1047l"), seen.rfind(b"\x1b[?47l"))
        if on != off:
            self.alternate = on > off
        self._last = seen[-7:]

    def leave(self) -> bytes:
        """Return the sequences that show an empty screen."""
        return b"\x1b[0m\x1b[2J\x1b[H" if self.alternate else b"\x1b7\x1b[?1049h\x1b[0m\x1b[2J\x1b[H"

    def come_back(self) -> bytes:
        """Return the sequences that show the program's screen again, as far as the terminal can."""
        return b"\x1b[2J\x1b[H" if self.alternate else b"\x1b[?1049l\x1b8"


class _TerminalModes:
    """The modes of the terminal. They are restored in any case, also when an error ends this process."""

    def __enter__(self) -> _TerminalModes:
        self._before = termios.tcgetattr(0)
        return self

    def raw(self) -> None:
        """Send every key to the program, Ctrl-C included."""
        # TCSADRAIN keeps keys that were typed ahead: they are for the program.
        tty.setraw(0, termios.TCSADRAIN)

    def restore(self) -> None:
        """Set the modes from before."""
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(0, termios.TCSADRAIN, self._before)

    def __exit__(self, *_: object) -> None:
        # Without this a process in the background would be stopped here.
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        self.restore()
        signal.signal(signal.SIGTTOU, before)


@contextlib.contextmanager
def _signals(arrived: deque[int]) -> Iterator[int]:
    """Collect signals instead of being ended by them; yield a descriptor that is readable when some have arrived.

    A signal that is ignored stays ignored, as `nohup` wants it.
    """
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before: dict[int, Any] = {}
    previous = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        for number in (*PASSED_ON, signal.SIGWINCH, signal.SIGTSTP):
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, lambda number, _frame: arrived.append(number))
        yield woken
    finally:
        for restored, handler in before.items():
            signal.signal(restored, handler)
        signal.set_wakeup_fd(previous)
        os.close(woken)
        os.close(wake)


def terminal_size() -> tuple[int, int]:
    """Return rows and columns of this terminal."""
    try:
        columns, rows = os.get_terminal_size(1)
    except OSError:
        columns, rows = 80, 24
    return min(max(rows, 1), 1000), min(max(columns, 1), 1000)


def has_terminal() -> bool:
    """Whether the program gets a terminal: when both its input and its output are this terminal."""
    return os.isatty(0) and os.isatty(1)


def exit_code(info: dict[str, Any]) -> int:
    """Return the exit code that a shell would show: 128+n for a signal."""
    code = info.get("exit_code")
    if isinstance(code, int):
        return code
    found = signal.Signals.__members__.get(str(info.get("signal")))
    return 128 + (0 if found is None else int(found))
