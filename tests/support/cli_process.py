"""Starts the `carrel` command by forking a process that has imported it, which takes milliseconds.

A fresh interpreter imports for half a second, and the tests of the command line start it about a thousand times. A
command still has a process of its own, with its own arguments, environment, directory, standard streams and exit code.
What an interpreter reads at its start (PYTHON…, LC_…) it reads only in a fresh one: such tests start one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Hands its streams to the server and ends as the command ended. If it is told to end, so is the command.
_CLIENT = """
import json, os, socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
socket.send_fds(s, [b"x"], [0, 1, 2])
s.sendall(json.dumps({"argv": sys.argv[2:], "env": dict(os.environ), "cwd": os.getcwd()}).encode())
s.shutdown(socket.SHUT_WR)
code = int(s.recv(16))
if code < 0:
    import signal
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
_SERVER = """
import gc, importlib, json, os, pkgutil, runpy, select, signal, socket, sys
from tests.support.quick_end import end_of
import carrel.cli, carrel.client, carrel.models, rich.console, rich.live, rich.progress, rich.table
import anyio._backends._asyncio, carrel.client._async.client, carrel.client._sync.client, encodings.idna, h11, httpcore
import pydantic.type_adapter, shellingham, sniffio, ssl, typer, typer._adapters
for each in pkgutil.iter_modules(carrel.cli.__path__):
    importlib.import_module(f"carrel.cli.{each.name}")  # a command imports no more than its own

def order(connection):
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    text = b"".join(iter(lambda: connection.recv(65536), b""))
    return streams, json.loads(text)

def accompany(connection, pid):
    "Tell whoever asked how the command ended; end it when nobody asks any more."
    end = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(connection, 0)  # hangs up
    poll.register(end, select.POLLIN)
    if all(number != end for number, _ in poll.poll()):
        os.kill(pid, signal.SIGTERM)
        poll.unregister(connection)
        if not poll.poll(10_000):
            os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        connection.sendall(str(code).encode())
    except OSError:
        pass
    os._exit(0)

def serve(listener):
    "Returns in the process of a command only."
    poll = select.poll()
    poll.register(0, select.POLLIN)  # ends when whoever started the server ends
    poll.register(listener, select.POLLIN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # companions are not waited for
    while True:
        if any(number == 0 for number, _ in poll.poll()):
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        streams, asked = order(connection)
        pid = os.fork()
        if pid:
            for stream in streams:
                os.close(stream)
            accompany(connection, pid)
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            old, mode = getattr(sys, name), "w" if number else "r"
            new = open(number, mode, closefd=False, encoding=old.encoding, errors=old.errors)
            new.reconfigure(line_buffering=old.line_buffering) if number else None
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)
            kept.append(old)
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(asked["cwd"])
        sys.argv[1:] = asked["argv"]
        return

kept = []  # the old streams, whose end would close the new ones
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(64)
for name in sys.argv[2:]:
    importlib.import_module(name)
del sys.argv[1:]
print("ready", flush=True)
gc.collect()
gc.freeze()
serve(listener)
end_of(lambda: runpy.run_module("carrel", run_name="__main__", alter_sys=True))
"""


class CliServer:
    """A process that has already imported the command line."""

    def __init__(self, directory: Path, environment: dict[str, str], *imported: str) -> None:
        """`imported` are more modules that commands will need."""
        self._path = str(directory / "cli")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, self._path, *imported],
            cwd=Path(__file__).parents[2],  # where `tests` is found; a command has its own
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def command(self, *words: str) -> list[str]:
        """What to start instead of `python -m carrel`."""
        return [sys.executable, "-I", "-S", "-c", _CLIENT, self._path, *words]

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=30)
