from __future__ import annotations

import pytest

from carrel.client import AsyncSandbox, Client, Sandbox, Terminal
from carrel.errors import CarrelError, NotRunning


def until(terminal: Terminal, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        data = terminal.recv()
        assert data, f"the terminal ended after {seen!r}"
        seen += data
    return seen


def test_a_shell_in_a_terminal(box: Sandbox) -> None:
    with box.terminal(rows=33, cols=101) as terminal:
        terminal.send("stty size; tty >/dev/null && echo is-a-$((40 + 2))\n")
        seen = until(terminal, b"is-a-42")
        assert b"33 101" in seen
        terminal.resize(40, 120)
        terminal.send(b"stty size\n")
        until(terminal, b"40 120")
        terminal.send("exit 7\n")
        for _ in terminal:
            pass
        assert terminal.exit is not None
        assert terminal.exit.exit_code == 7
        assert terminal.recv() == b""
        with pytest.raises(NotRunning):
            terminal.send("more")


def test_a_program_in_a_terminal(box: Sandbox) -> None:
    with box.terminal(command=["sh", "-c", 'echo $0 "$1"; exit 3', "$HOME", "a  b&c"]) as terminal:
        assert b"".join(terminal) == b"$HOME a  b&c\r\n", "no shell reads the words"
        assert terminal.exit is not None
        assert terminal.exit.exit_code == 3


def test_a_terminal_needs_the_token(address: str, box: Sandbox) -> None:
    with Client(address, "carrel_wrong") as stranger, pytest.raises(CarrelError):
        stranger.attach(box.info()).terminal()


async def test_async_terminal(async_box: AsyncSandbox) -> None:
    async with await async_box.terminal(command="echo hello") as terminal:
        assert b"".join([data async for data in terminal]) == b"hello\r\n"
        assert terminal.exit is not None
        assert terminal.exit.exit_code == 0
