"""`carrel agent`: what it says when it cannot start. How it works is tested with the agent itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Carrel = Callable[..., Any]


def test_it_needs_a_server(alone: Carrel) -> None:
    said = alone("agent")
    assert said.returncode == 1
    assert b"carrel serve" in said.stderr


def test_what_cannot_be_is_said_in_words(carrel: Carrel, tmp_path: Path) -> None:
    for words, told in (
        (["--log-level", "loud"], b"loud"),
        (["--approver-token-file", str(tmp_path / "missing")], b"cannot read the token"),
        (["--database", "mysql://x"], b"postgresql://"),
        (["--port", "99999"], b"65535"),
        (["--public-url", "agent.example.org"], b"https://agent.example.org"),
    ):
        said = carrel("agent", "--port", "0", *words)
        assert said.returncode != 0
        assert told in said.stderr
        assert b"Traceback" not in said.stderr


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "127.0.0.1"], False),
        (["--host", "0.0.0.0", "--public-url", "https://agent.example.org"], False),
    ],
)
def test_agent_for_other_machines_warns_of_plain_http(
    data_dir: Path, tmp_path: Path, words: list[str], warned: bool
) -> None:
    command = [sys.executable, "-m", "carrel", "agent", "--port", "0", "--database", str(tmp_path / "agent.db")]
    with subprocess.Popen(
        [*command, *words],
        env={**os.environ, "CARREL_DATA_DIR": str(data_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as agent:
        assert agent.stdout is not None and agent.stderr is not None
        assert b"listens on" in agent.stdout.readline()
        agent.terminate()
        told = agent.stderr.read()
    assert (b"in the clear" in told) is warned
