"""A real NATS server with JetStream for tests, from its wheel: on a loopback port, its files in a directory of its own."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PROGRAM = Path(sys.executable).parent / "nats-server"
_PATIENCE_S = 60.0


class NatsServer:
    """Started when made. It may be killed, and started again on the same port with what it holds."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="nats"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        command = [_PROGRAM, "-js", "-a", "127.0.0.1", "-p", str(self.port), "-sd", str(self.directory)]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                    if probe.recv(4) == b"INFO":
                        return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError((self.directory / "log").read_text())

    def freeze(self) -> None:
        """Stop it in such a way that its connections stay open and nobody answers on them."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it as a crash would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory)
