"""`carrel here` in processes of its own, with pipes or at a terminal, as root or as an ordinary user."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from tests.support.fork_server import start

from carrel.cli.here.questions import SILENCE_S
from carrel.cli.here.server import server_for

COMMAND = [sys.executable, "-m", "carrel", "here"]
WAIT_S = 90.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def ended(directory: Path) -> None:
    """Wait until no server uses a data directory."""
    with (directory / "lock").open("rb+") as lock:

        def is_free() -> bool:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        until(is_free)


@contextmanager
def sharing(base: Path, here_toml: str = "", **settings: str) -> Iterator[dict[str, str]]:
    """The environment of commands that share one server: this process is one of its users. Afterwards it ends."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("CARREL_", "XDG_"))}
    own = {"CARREL_DATA_DIR": str(base / "data"), "XDG_CONFIG_HOME": str(base / "config"), **settings}
    (base / "config/carrel").mkdir(parents=True)
    (base / "config/carrel/here.toml").write_text(here_toml)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        with server_for(str(base)):
            yield {**kept, **own, "TERM": "xterm"}
    ended(base / "data-here")


def here(
    env: dict[str, str], folder: Path, *words: str, stdin: bytes = b"", command: list[str] = COMMAND
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end; it is forked where a fork server runs."""
    with TemporaryFile() as given, TemporaryFile() as output, TemporaryFile() as errors:
        given.write(stdin)
        given.seek(0)
        code = start([*command, *words], cwd=str(folder), env=env, stdin=given, stdout=output, stderr=errors).wait(
            WAIT_S
        )
        said = [file.seek(0) or file.read() for file in (output, errors)]
    return subprocess.CompletedProcess([*command, *words], code, *said)


class Screen:
    """A program at a terminal of its own."""

    def __init__(self, words: list[str], env: dict[str, str], folder: Path):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(words[0], words, env)
        self.resize(24, 80)
        self.seen = b""
        self.is_closed = False

    def type(self, keys: bytes) -> None:
        left = memoryview(keys)
        while left:
            left = left[os.write(self.fd, left[:4096]) :]

    def answer(self, key: bytes) -> None:
        """Answer the question on the screen, which is possible a moment after it was shown."""
        time.sleep(SILENCE_S + 0.1)
        self.type(key)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> bytes:
        try:
            return os.read(self.fd, 65536) if select.select([self.fd], [], [], 0.1)[0] else b""
        except OSError:
            self.is_closed = True
            return b""

    def wait(self, text: bytes) -> bytes:
        """Read until a text appears; return everything up to it and forget that."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.seen:
            assert time.monotonic() < deadline and not self.is_closed, (
                f"{text!r} did not appear, but {self.seen[-2000:]!r}"
            )
            self.seen += self.read()
        before, _, self.seen = self.seen.partition(text)
        return before

    def end(self) -> int:
        status = None
        deadline = time.monotonic() + WAIT_S
        while status is None:
            assert time.monotonic() < deadline
            self.seen += self.read()
            found, code = os.waitpid(self.pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if found else None
        os.close(self.fd)
        return status
