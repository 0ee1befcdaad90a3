"""The supervisor as a program, until it has its facts: it waits for them, ends with its server, and says what is wrong.

What it does with them is tested in sandboxes (see `tests/providers/test_bundle.py`).
"""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from carrel.errors import PlatformError
from carrel.providers.control_directory import MOST_FACTS, WaitingSupervisor, waiting_supervisor
from carrel.supervisor import program

Started = tuple[socket.socket, subprocess.Popen[bytes]]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """A supervisor, as a process of this user, and the socket that it connects to."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "report"))
        listener.listen()
        words = [sys.executable, "-m", "carrel.supervisor.program", str(tmp_path / "report")]
        process = subprocess.Popen(words, stderr=subprocess.PIPE)
        try:
            yield listener, process
        finally:
            process.kill()
            process.communicate()


async def connected(started: Started) -> WaitingSupervisor:
    async def ended() -> str:
        await asyncio.Event().wait()
        return ""

    listener, process = started
    supervisor = await waiting_supervisor(listener, ended())
    assert supervisor.pid == process.pid
    assert process.poll() is None
    return supervisor


async def test_it_ends_with_its_server_when_it_has_no_facts(started: Started) -> None:
    (await connected(started)).close()
    assert started[1].wait(20) == 0


async def test_facts_that_end_too_early_are_none(started: Started) -> None:
    with closing(await connected(started)) as supervisor:
        supervisor.connection.send(b'{"socket": "/run/carrel/private/socket"')
    assert started[1].wait(20) == 1


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"socket": "/none"}, "TypeError: .*missing"),
        ({"socket": "/none", "surprise": 1}, "TypeError: .*surprise"),
        ([], "TypeError"),
    ],
)
async def test_facts_that_are_wrong_are_reported(started: Started, facts: object, words: str) -> None:
    supervisor = await connected(started)
    with closing(supervisor), pytest.raises(PlatformError, match=f"did not start: {words}"):
        await supervisor.begin(facts)  # type: ignore[arg-type]
    assert started[1].wait(20) == 1


async def test_a_supervisor_that_was_killed_while_it_waited_is_noticed(started: Started) -> None:
    with closing(await connected(started)) as supervisor:
        started[1].kill()
        started[1].wait()
        with pytest.raises(PlatformError, match="did not start: it ended"):
            await supervisor.begin({})


def test_facts_are_bounded() -> None:
    ours, theirs = socket.socketpair()

    def send() -> None:
        with suppress(OSError):  # the other side is closed once that is too much
            theirs.sendall(b" " * (MOST_FACTS + 2))

    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 60, 0))
        sending = threading.Thread(target=send)
        sending.start()
        with pytest.raises(ValueError, match="more than"):
            program.receive_facts(ours)
        ours.close()
        sending.join()


async def test_too_many_facts_are_not_sent() -> None:
    ours, theirs = socket.socketpair()
    supervisor = WaitingSupervisor(ours)
    with theirs, closing(supervisor), pytest.raises(PlatformError, match="too large"):
        await supervisor.begin({"env": {"a": "b" * MOST_FACTS}})


async def test_one_that_ends_before_it_connects_says_why(tmp_path: Path) -> None:
    async def ended() -> str:
        return "no memory today"

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "report"))
        listener.listen()
        with pytest.raises(PlatformError, match="did not start: no memory today"):
            await waiting_supervisor(listener, ended())
