"""`carrel agent`: what it says when it cannot start. How it works is tested with the agent itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cli_process import CliServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CliServer]:
    """Has imported what an agent needs, which takes seconds."""
    server = CliServer(tmp_path_factory.mktemp("cli"), dict(os.environ), "carrel.integrations.a2a.server")
    yield server
    server.close()


def carrel(server: CliServer, data_dir: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "CARREL_DATA_DIR": str(data_dir)}
    return subprocess.run(server.command(*words), env=env, capture_output=True, timeout=60, check=False)


def test_it_needs_a_server(server: CliServer, tmp_path: Path) -> None:
    said = carrel(server, tmp_path / "nothing", "agent")
    assert said.returncode == 1
    assert b"carrel serve" in said.stderr


def test_what_cannot_be_is_said_in_words(server: CliServer, data_dir: Path, tmp_path: Path) -> None:
    for words, told in (
        (["--log-level", "loud"], b"loud"),
        (["--approver-token-file", str(tmp_path / "missing")], b"cannot read the token"),
        (["--database", "mysql://x"], b"postgresql://"),
        (["--port", "99999"], b"65535"),
        (["--public-url", "agent.example.org"], b"https://agent.example.org"),
    ):
        said = carrel(server, data_dir, "agent", "--port", "0", *words)
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
    server: CliServer, data_dir: Path, tmp_path: Path, words: list[str], warned: bool
) -> None:
    command = server.command("agent", "--port", "0", "--database", str(tmp_path / "agent.db"))
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
    assert (b"unencrypted" in told) is warned
