from __future__ import annotations

import os
import sys
import threading
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.cli.streams import exit_code, signal_number, standard_input, write_out
from carrel.models import CommandInfo


@pytest.mark.parametrize(
    ("name", "number"),
    [("SIGTERM", 15), ("KILL", 9), ("kill", 9), ("9", 9), ("odd", 0), (None, 0), ("", 0), ("999", 0)],
)
def test_signal_number(name: str | None, number: int) -> None:
    assert signal_number(name) == number


@given(st.text(max_size=12))
def test_any_signal_leaves_an_exit_code(name: str) -> None:
    assert 0 <= signal_number(name) < 128


def ended(**how: object) -> CommandInfo:
    base = {
        "id": "c",
        "command": "x",
        "running": False,
        "pid": 1,
        "terminal": False,
        "started_at": datetime.now(UTC),
        "duration_ms": 1,
        "output_bytes": 0,
    }
    return CommandInfo.model_validate({**base, **how})


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ({"exit_code": 0}, 0, ""),
        ({"exit_code": 7}, 7, ""),
        ({"signal": "SIGKILL"}, 137, ""),
        ({"signal": "SIG34"}, 128, ""),
        ({"exit_code": 0, "dropped_bytes": 5}, 0, "5 bytes"),
        ({"signal": "SIGKILL", "timed_out": True}, 124, "timed out"),
        ({"signal": "SIGKILL", "oom_killed": True}, 137, "out of memory"),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], how: dict[str, object], code: int, said: str) -> None:
    assert exit_code(ended(**how)) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err and bool(said) == bool(told.err)


def test_bytes_reach_their_descriptor_at_once(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_out("stdout", b"\xff\x00\r\n")
    write_out("stderr", b"\x1b")
    assert capfdbinary.readouterr() == (b"\xff\x00\r\n", b"\x1b")


@pytest.mark.parametrize("size", [0, 1, 1_000_000])
async def test_standard_input_arrives_whole(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    data = os.urandom(size)
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as there, open(write_end, "wb") as here:
        monkeypatch.setattr(sys, "stdin", there)

        def write() -> None:
            here.write(data)
            here.close()

        writer = threading.Thread(target=write)
        writer.start()
        assert b"".join([part async for part in standard_input()]) == data
        writer.join()
