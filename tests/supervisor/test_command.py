from __future__ import annotations

import asyncio
import json
import signal
import time
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.supervisor.command import Order, SupervisedCommand, exit_of, signal_name
from carrel.supervisor.output import STDERR, STDOUT, ByteBudget, CommandOutput


@pytest.fixture
async def command() -> SupervisedCommand:
    order = Order(["echo", "é"], -1, {})
    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    return SupervisedCommand(
        "c1", order, CommandOutput(5, ByteBudget(100_000)), datetime.now(UTC), time.monotonic(), finished
    )


async def test_while_it_runs(command: SupervisedCommand) -> None:
    info = command.info()
    assert (info["id"], info["command"], info["running"], info["terminal"]) == ("c1", ["echo", "é"], True, False)
    assert (info["exit_code"], info["signal"], info["pid"], info["timed_out"]) == (None, None, None, False)
    assert command.duration_ms() <= command.duration_ms()
    assert datetime.fromisoformat(info["started_at"]).tzinfo is UTC
    assert json.loads(json.dumps(info)) == info


@pytest.mark.parametrize(
    ("status", "code", "name"),
    [
        (0, 0, None),
        (7 << 8, 7, None),
        (255 << 8, 255, None),
        (signal.SIGKILL, None, "SIGKILL"),
        (signal.SIGSEGV | 0x80, None, "SIGSEGV"),
    ],
)
async def test_how_it_ended(command: SupervisedCommand, status: int, code: int | None, name: str | None) -> None:
    command.status, command.ended = status, command.started + 0.25
    assert not command.running
    assert exit_of(command.status) == (code, name)
    info = command.info()
    assert (info["running"], info["exit_code"], info["signal"], info["duration_ms"]) == (False, code, name, 250.0)


async def test_what_was_written_and_dropped_is_told(command: SupervisedCommand) -> None:
    command.output.add(STDOUT, b"abc")
    command.output.add(STDERR, b"defg")
    assert (command.info()["output_bytes"], command.info()["dropped_bytes"]) == (5, 2)


async def test_two_commands_are_never_equal(command: SupervisedCommand) -> None:
    other = SupervisedCommand(
        command.id, command.order, command.output, command.started_at, command.started, command.finished
    )
    assert command != other
    assert len({command, other}) == 2


@given(st.integers(1, 64))
def test_every_signal_has_a_name(number: int) -> None:
    name = signal_name(number)
    assert name.startswith("SIG")
    assert name == f"SIG{number}" or signal.Signals[name] == number
