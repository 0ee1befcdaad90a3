"""Starts `python -m MODULE` by forking a process that has imported the module, which takes milliseconds.

A test with a control plane of its own needs a zygote, and a fresh interpreter imports for most of the time that the test
takes. What is forked is still a process of its own, with its own arguments, environment, descriptors and session. It is a
child of the tests, not of the fork server: it is orphaned on purpose, and the tests adopt orphans (see `leaks`).
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
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

MODULES = {"carrel.isolation.zygote": "carrel.isolation.zygote", "carrel.egress": "carrel.egress.process"}
"""Where the `main` of each module is."""
_OUT_OF_THE_WAY = 500  # descriptors from here on are not asked for by number
_MAX_MESSAGE = 128 * 1024


class Forked:
    """The part of `subprocess.Popen` that carrel uses, for a process that was forked."""

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

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process that has imported a module, and forks."""

    def __init__(self, module: str):
        self._module = module
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", module, str(other.fileno())],
                cwd=Path(__file__).parents[2],
                env={**kept, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "MALLOC_ARENA_MAX": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )

    def start(
        self, words: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], stdout: IO[bytes], **_rest: Any
    ) -> Forked:
        """Start what `subprocess.Popen` would have started, in a session of its own, with no standard input."""
        assert words[1:3] == ["-m", self._module]
        order = {"words": words[3:], "env": dict(env), "fds": list(pass_fds), "cwd": os.getcwd()}
        socket.send_fds(self._connection, [json.dumps(order).encode()], [stdout.fileno(), *pass_fds])
        return Forked(int(self._connection.recv(64)))

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._process.wait(30)


class Subprocess:
    """The module `subprocess`, but its `Popen` has fork servers do it."""

    def __init__(self, servers: Mapping[str, ForkServer]):
        self._servers = servers

    def Popen(self, words: Sequence[str], **options: Any) -> Forked:
        return self._servers[words[2]].start(words, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def _prepare(module: str) -> Callable[[list[str]], None]:
    """Import what the module imports, and give its `main`."""
    if module == "carrel.isolation.zygote":
        sys.modules["ssl"] = None  # type: ignore[assignment]  # as it does itself
        supervisor: Any = importlib.import_module("carrel.supervisor.app")
        supervisor.warm()
        supervisor.warm = lambda: None  # once is enough
    main: Callable[[list[str]], None] = importlib.import_module(MODULES[module]).main
    return main


def _orders(connection: socket.socket) -> list[str]:
    """Fork for each order; returns the arguments in the forked process only."""
    while True:
        message, fds, _flags, _address = socket.recv_fds(connection, _MAX_MESSAGE, 8)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            if pid := os.fork():
                connection.send(str(pid).encode())
                os._exit(0)
            while os.getppid() != _STARTED_BY:  # adopted once the process between is gone
                time.sleep(0.0005)
            connection.close()
            return _become(json.loads(message), fds)
        os.waitpid(between, 0)
        for each in fds:
            os.close(each)


def _become(order: dict[str, Any], fds: list[int]) -> list[str]:
    """Take over what the order says, so that nothing of the fork server is left."""
    os.setsid()
    away = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for each in fds]
    for each in fds:
        os.close(each)
    for source, target in zip(away, [1, *order["fds"]], strict=True):
        os.dup2(source, target)
        os.close(source)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    return [str(word) for word in order["words"]]


if __name__ == "__main__":
    _STARTED_BY = os.getppid()
    _main = _prepare(sys.argv[1])
    gc.collect()
    gc.freeze()
    _main(_orders(socket.socket(fileno=int(sys.argv[2]))))
