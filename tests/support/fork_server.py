"""Starts Python programs of carrel by forking a process that has imported them, which takes milliseconds.

A test with a control plane of its own needs a zygote, and tests that kill a server start it dozens of times; a fresh
interpreter imports for most of the time that such a test takes. What is forked is still a process of its own, with its own
arguments, environment, directory, descriptors and session. It is a child of the tests, not of the fork server: it is
orphaned on purpose, and the tests adopt orphans (see `leaks`).
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NoReturn

from tests.support.children import end_with_parent
from tests.support.quick_end import end_of

ZYGOTE, EGRESS, CARREL, AGENT = "carrel.isolation.zygote", "carrel.egress", "carrel", "carrel agent"
MAINS = {ZYGOTE: "carrel.isolation.zygote", EGRESS: "carrel.egress.launch", CARREL: "carrel.cli", AGENT: "carrel.cli"}
"""Where the `main` of each program is."""
IMPORTED = {
    ZYGOTE: ["carrel.supervisor.app"],
    EGRESS: [],
    CARREL: ["carrel.server", "carrel.cli.app", "carrel.cli.connecting", "carrel.api.app", "carrel.control.plane"],
    AGENT: ["carrel.cli.app", "carrel.cli.agent", "carrel.integrations.a2a"],
}
"""What each program imports late."""
_OUT_OF_THE_WAY = 500  # descriptors from here on are not asked for by number
_MAX_MESSAGE = 128 * 1024


class Forked:
    """The part of `subprocess.Popen` that is used, for a process that was forked."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the watch for what tests leave behind was quicker
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if until is None else max(0.0, until - time.monotonic())
            end = os.pidfd_open(self.pid)
            try:
                if not select.select([end], [], [], left)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            finally:
                os.close(end)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal while it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Tell it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process that has imported a program, and forks."""

    def __init__(self, program: str):
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", program, str(other.fileno())],
                cwd=Path(__file__).parents[2],
                env={**kept, "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2"},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,  # ends with its connection, not when somebody interrupts the tests
            )

    def start(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
        cwd: str | None = None,
        start_new_session: bool = True,
    ) -> Forked:
        """Start `[python, "-m", MODULE, …]` or `[python, "-c", CODE, …]`, as `subprocess.Popen` does; always in a
        session of its own.
        """
        given = {1: stdout.fileno(), 2: stderr.fileno(), **{each: each for each in pass_fds}}
        if not isinstance(stdin, int):
            given[0] = stdin.fileno()
        order = {"words": words[1:], "env": dict(env), "fds": list(given), "cwd": cwd or os.getcwd()}
        socket.send_fds(self._connection, [json.dumps(order).encode()], list(given.values()))
        return Forked(int(self._connection.recv(64)))

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._process.wait(30)


_running: dict[str, ForkServer] = {}


@contextmanager
def forking(*programs: str) -> Iterator[None]:
    """Until the end, `start` forks these programs."""
    _running.update({program: ForkServer(program) for program in programs})
    try:
        yield
    finally:
        for program in programs:
            _running.pop(program).close()


def start(words: Sequence[str], *, program: str = CARREL, **options: Any) -> Forked | subprocess.Popen[bytes]:
    """Start Python on a program: by a fork, or in a fresh interpreter where no fork server runs for it."""
    server = _running.get(program) if words[0] == sys.executable else None
    return subprocess.Popen(words, **options) if server is None else server.start(words, **options)


def run(words: Sequence[str], *, env: Mapping[str, str], stdin: str = "", timeout: float = 60) -> tuple[int, str, str]:
    """Start Python on `carrel` and wait; its exit code, output and errors."""
    with TemporaryFile() as given, TemporaryFile() as output, TemporaryFile() as errors:
        given.write(stdin.encode())
        given.seek(0)
        code = start(words, env=env, stdin=given, stdout=output, stderr=errors).wait(timeout)
        said = [file.seek(0) or file.read().decode() for file in (output, errors)]
        return code, said[0], said[1]


class Subprocess:
    """The module `subprocess`, but its `Popen` forks."""

    def Popen(self, words: Sequence[str], **options: Any) -> Forked | subprocess.Popen[bytes]:
        return start(words, program=words[2], **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


# in the fork server


def _serve(program: str, connection: socket.socket, started_by: int) -> NoReturn:
    if program == ZYGOTE:
        sys.modules["ssl"] = None  # type: ignore[assignment]  # as it does itself
    for name in (MAINS[program], *IMPORTED[program]):
        importlib.import_module(name)
    if program == ZYGOTE:
        supervisor: Any = importlib.import_module("carrel.supervisor.app")
        supervisor.warm()
        supervisor.warm = lambda: None  # once is enough
    gc.collect()
    gc.freeze()
    words = _next_order(connection, started_by)
    end_of(lambda: _run(words))


def _run(words: list[str]) -> None:
    sys.argv = words[1:]
    if words[0] == "-c":
        sys.argv[0] = "-c"
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        importlib.import_module(MAINS[words[1]]).main(words[2:])


def _next_order(connection: socket.socket, started_by: int) -> list[str]:
    """Fork for each order; returns its words in the forked process only."""
    while True:
        message, fds, _flags, _address = socket.recv_fds(connection, _MAX_MESSAGE, 8)
        if not message:
            os._exit(0)
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            if pid := os.fork():
                os.write(tell, str(pid).encode())
                os._exit(0)
            while os.getppid() != started_by:  # adopted once the process between is gone
                time.sleep(0.0005)
            for each in (told, tell):
                os.close(each)
            connection.close()
            return _become(json.loads(message), fds)
        os.waitpid(between, 0)  # only from then on can the tests wait for it
        connection.send(os.read(told, 64))
        for each in (*fds, told, tell):
            os.close(each)


def _become(order: dict[str, Any], fds: list[int]) -> list[str]:
    """Take over what the order says, so that nothing of the fork server is left."""
    os.setsid()
    end_with_parent()  # the tests: a run that is killed leaves no servers
    away = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for each in fds]
    for each in fds:
        os.close(each)
    for source, target in zip(away, order["fds"], strict=True):
        os.dup2(source, target)
        os.close(source)
    for number, name in ((1, "stdout"), (2, "stderr")):  # the old ones know whether they can seek, and these may not
        setattr(sys, name, open(number, "w", buffering=1, encoding="utf-8", closefd=False))
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    tempfile.tempdir = None  # to be found anew
    return [str(word) for word in order["words"]]


if __name__ == "__main__":
    _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), os.getppid())
