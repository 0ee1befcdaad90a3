from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_an_approvers_token_is_not_for_http(carrel: Carrel, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("carrel_x\n")
    run = carrel("mcp", "--http", "--approver-token-file", str(file))
    assert run.returncode == 1 and b"answer as a person" in run.stderr and b"hint:" in run.stderr


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff\xfe", b"a\x1b"])
def test_a_file_without_a_token_is_refused(carrel: Carrel, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    run = carrel("mcp", "--approver-token-file", str(file))
    assert run.returncode == 1 and b"holds no token" in run.stderr
    missing = carrel("mcp", "--approver-token-file", str(tmp_path / "none"))
    assert missing.returncode == 1 and b"No such file" in missing.stderr and b"Traceback" not in missing.stderr


def test_a_context_that_cannot_be_is_refused(carrel: Carrel) -> None:
    run = carrel("mcp", "--context", "../etc")
    assert run.returncode == 1 and b"cannot be a context" in run.stderr


def test_at_a_terminal_it_says_what_it_is_and_ctrl_c_ends_it(data_dir: Path) -> None:
    """It said nothing, and went on until the next line was typed."""
    master, slave = pty.openpty()
    environment = {**os.environ, "CARREL_DATA_DIR": str(data_dir)}
    command = [sys.executable, "-m", "carrel", "mcp"]
    with subprocess.Popen(
        command, stdin=slave, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    ) as run:
        try:
            assert run.stderr is not None
            assert b"for MCP clients" in run.stderr.readline()
            reading = Path(f"/proc/{run.pid}/task")
            while len(list(reading.iterdir())) < 2:
                assert run.poll() is None
            run.send_signal(signal.SIGINT)
            assert run.wait(30) in {130, -signal.SIGINT}
        finally:
            run.kill()
            os.close(master)
            os.close(slave)


def test_it_ends_with_its_input(carrel: Carrel, alone: Carrel) -> None:
    for each in (carrel, alone):
        run = each("mcp", stdin=b"")
        assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")


def test_what_is_no_message_does_not_end_it(carrel: Carrel) -> None:
    ping = b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n'
    run = carrel("mcp", stdin=b"garbage\n\xff\xfe\n{}\n" + ping)
    assert run.returncode == 0 and b'"id":1' in run.stdout and b"Traceback" not in run.stdout + run.stderr


def test_http_says_where_and_ends_when_told(data_dir: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
    command = [sys.executable, "-m", "carrel", "mcp", "--http", "--port", "0"]
    process = subprocess.Popen(
        command,
        env={**kept, "CARREL_DATA_DIR": str(data_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        assert said.startswith("carrel mcp listens on http://127.0.0.1:")
        with socket.create_connection(("127.0.0.1", int(said.split(":")[2].split("/")[0])), timeout=60) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nx: " + b"a" * 65536)
            assert stranger.recv(1024).startswith(b"HTTP/1.1 431 ")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in errors
    assert process.returncode in {0, -signal.SIGTERM, 128 + signal.SIGTERM}


def test_a_port_that_is_taken_is_told(carrel: Carrel, data_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = carrel("mcp", "--http", "--port", str(taken.getsockname()[1]))
    assert run.returncode == 1 and b"Traceback" not in run.stderr
    first, second = run.stderr.splitlines()
    assert first.startswith(b"error: cannot listen on 127.0.0.1:") and b"in use" in first and b"--port" in second
