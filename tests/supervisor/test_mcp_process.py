"""One process, without a server around it. What it does in a sandbox is shown in `test_mcp_servers`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from carrel.errors import LimitExceeded, McpServerFailed, NotRunning
from carrel.supervisor.answers import frame
from carrel.supervisor.command import Order, exit_of
from carrel.supervisor.commands import Commands
from carrel.supervisor.mcp_log import Log
from carrel.supervisor.mcp_process import END, MESSAGE, NO_ROOM, OPENED, Process
from carrel.supervisor.output import ByteBudget

ROOM = 4 * 1024 * 1024


class Ground:
    """A supervisor's commands in this very process."""

    def __init__(self, directory: Path):
        self.commands = Commands()
        loop = asyncio.get_running_loop()
        self.commands.watch(loop)
        self.score = os.open("/dev/null", os.O_WRONLY)
        self.commands.configure(loop, self.score, ROOM)
        self.directory = os.open(directory, os.O_PATH)
        self.room = ByteBudget(ROOM)
        self.log = Log()
        self.over: list[Process] = []
        self.processes: list[Process] = []

    def start(self, *command: str) -> Process:
        order = Order(list(command), self.directory, {"PATH": os.environ["PATH"]})
        self.processes.append(Process("s", self.commands, order, 7, self.log, self.room, self.over.append))
        return self.processes[-1]

    async def close(self) -> None:
        for process in self.processes:
            process.end("the test is over")
            await process.over
            process.abandon()
        self.commands.close()
        os.close(self.score)
        os.close(self.directory)


@pytest.fixture
async def ground(tmp_path: Path) -> AsyncIterator[Ground]:
    ground = Ground(tmp_path)
    yield ground
    await ground.close()


async def frames(messages: AsyncIterator[bytes | memoryview]) -> list[tuple[int, bytes]]:
    data, found = b"".join([bytes(chunk) async for chunk in messages]), []
    while data:
        size = int.from_bytes(data[1:5], "big")
        found.append((data[0], data[5 : 5 + size]))
        data = data[5 + size :]
    return found


def test_frames() -> None:
    assert frame(MESSAGE, b"{}") == b"\1\0\0\0\2{}"


async def test_from_start_to_end(ground: Ground) -> None:
    process = ground.start("sh", "-c", 'read line; echo "$line"; echo words >&2; exit 3')
    await process.begun
    assert exit_of(process.status) == (None, None)
    messages = process.messages()  # before there is a reason to end: of one that is over, nothing is kept for nobody
    await process.send(b'{"a": 1}\n', 5)
    (opened, which), (kind, message), (end, how) = await frames(messages)
    assert (opened, kind, end) == (OPENED, MESSAGE, END)
    assert json.loads(which) == {"incarnation": 7, "pid": process.pid}
    assert message == b'{"a": 1}'
    assert json.loads(how)["exit_code"] == 3
    assert ground.over == [process]
    assert ground.log.read(0, 100)["text"] == f"carrel: started, process {process.pid}, incarnation 7\nwords\n"
    assert ground.room.left == ROOM
    with pytest.raises(NotRunning):
        await process.send(b"{}\n", 5)


async def test_there_must_be_a_program(ground: Ground) -> None:
    with pytest.raises(FileNotFoundError):
        ground.start("no-such-program")
    process = ground.start("/etc/passwd")
    await process.over
    assert process.failure > 0


async def test_lines_of_all_servers_share_what_memory_there_is(ground: Ground) -> None:
    code = "import os, sys\nos.write(1, b'{')\nfor _ in range(int(sys.argv[1])): os.write(1, b'x' * 65536)\nos.write(1, b'}\\n')"
    enough = ground.start(sys.executable, "-c", code, "32")
    found = await frames(enough.messages())
    assert [(kind, len(data)) for kind, data in found[1:-1]] == [(MESSAGE, 32 * 65536 + 2)]
    too_much = ground.start(sys.executable, "-c", code, "128")
    found = await frames(too_much.messages())
    assert json.loads(found[-1][1])["reason"] == NO_ROOM
    assert ground.room.left == ROOM


async def test_what_waits_to_be_written_is_bounded(ground: Ground) -> None:
    process = ground.start("sleep", "60")
    line = b"x" * (12 * 1024 * 1024)
    writers = [asyncio.create_task(process.send(line, 0.3)) for _ in range(3)]
    outcomes = await asyncio.gather(*writers, return_exceptions=True)
    assert sorted(type(each).__name__ for each in outcomes) == ["LimitExceeded", "McpServerFailed", "McpServerFailed"]
    assert isinstance(outcomes[2], LimitExceeded)
    assert isinstance(outcomes[0], McpServerFailed)


async def test_a_stream_that_is_never_read_is_let_go(ground: Ground) -> None:
    process = ground.start("sh", "-c", "echo '{}'")
    process.messages()
    await process.over
    assert process.connected
    process.abandon()
    assert not process.connected
