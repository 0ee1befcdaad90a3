"""`carrel sh` at a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


class Screen:
    """A pseudo terminal with `carrel` at its other end."""

    def __init__(self, data_dir: Path, *words: str):
        self.master, self.slave = pty.openpty()
        self.size(30, 90)
        self.before = termios.tcgetattr(self.slave)
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "carrel", *words],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            env={**os.environ, "CARREL_DATA_DIR": str(data_dir)},
        )

    def size(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, wanted: bytes) -> None:
        deadline = time.monotonic() + 60
        while wanted not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {wanted!r} in {self.seen!r}"
            self.seen += os.read(self.master, 65536)

    def end(self) -> int:
        return self.process.wait(60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def screen(data_dir: Path) -> Iterator[Callable[..., Screen]]:
    made: list[Screen] = []

    def make(*words: str, command: str = "sh", directory: Path = data_dir) -> Screen:
        made.append(Screen(directory, command, *words))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_shell_with_size_keys_and_exit_code(screen: Callable[..., Screen]) -> None:
    at = screen()
    at.type("stty size\n")
    at.until(b"30 90")
    at.size(44, 111)
    os.killpg(at.process.pid, signal.SIGWINCH)
    at.type("until stty size | grep '^44'; do :; done\n")
    at.until(b"44 111")
    # A program of its own says that it runs: an interrupt between bash's fork and its exec would be lost in bash.
    at.type("sh -c 'echo go-$((1 + 1)); exec sleep 600'\n")
    at.until(b"go-2")
    at.seen = b""
    at.type("\x03")
    at.until(b"$ ")
    at.type("echo still-$((1 + 1))\n")
    at.until(b"still-2")
    at.type("exit 6\n")
    assert at.end() == 6
    assert termios.tcgetattr(at.slave) == at.before


def test_the_terminal_is_restored_when_it_is_ended_from_outside(screen: Callable[..., Screen]) -> None:
    at = screen("-c", "echo up; sleep 600")
    at.until(b"up")
    at.process.send_signal(signal.SIGTERM)
    assert at.end() == 128 + signal.SIGTERM
    assert termios.tcgetattr(at.slave) == at.before


def test_input_from_a_pipe(carrel: Carrel) -> None:
    done = carrel("sh", stdin=b"echo piped-$((20 + 2)); exit 4\n")
    assert b"piped-22" in done.stdout
    assert done.returncode == 4


@pytest.mark.parametrize("server", [True, False])
def test_it_passes_the_terminal_to_a_command(screen: Callable[..., Screen], tmp_path: Path, server: bool) -> None:
    name = f"it-{os.urandom(4).hex()}"
    if server:
        at = screen("-it", name, "--", "sh", "-c", "stty size; exec sh", command="exec")
        at.until(f"created a sandbox for '{name}'".encode())
    else:
        at = screen("-it", "--", "sh", "-c", "stty size; exec sh", command="run", directory=tmp_path / "nothing")
    at.until(b"30 90")
    at.size(44, 111)
    at.process.send_signal(signal.SIGWINCH)
    at.type("until [ \"$(stty size)\" = '44 111' ]; do :; done; echo resized-$((1 + 1))\n")
    at.until(b"resized-2")
    at.type("sh -c 'echo sleeping-$((1 + 2)); exec sleep 100'\n")  # so that who says it is who is interrupted
    at.until(b"sleeping-3")
    at.type("\x03")
    at.until(b"^C")
    at.type("echo interrupted-$((2 + 2))\n")
    at.until(b"interrupted-4")
    at.type("exit 9\n")
    assert at.end() == 9
    assert termios.tcgetattr(at.slave) == at.before
    if server:
        removed = screen("-y", "--files", name, command="rm")
        assert removed.end() == 0


def test_a_terminal_needs_a_terminal(carrel: Carrel) -> None:
    done = carrel("run", "-t", "true")
    assert done.returncode == 1 and b"standard input is not one" in done.stderr
