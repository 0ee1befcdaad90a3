from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_serve_says_how_to_go_on_and_ends_clean(tmp_path: Path) -> None:
    data = tmp_path / "data"
    config = tmp_path / "c.toml"
    config.write_text("max_sandboxes = 3\n")
    words = ["--port", "0", "--data-dir", str(data), "--config", str(config), "--set", "log_level=error"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
    command = [sys.executable, "-m", "carrel", "serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=kept) as server:
        try:
            deadline = time.monotonic() + 30
            while not (data / "server.json").exists():
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            url = json.loads((data / "server.json").read_bytes())["url"]
            token = (data / "token").read_text().strip()
            assert httpx.get(f"{url}/v1/host", headers={"authorization": f"Bearer {token}"}).status_code == 200
        finally:
            server.send_signal(signal.SIGTERM)
            told = server.communicate(timeout=30)[0].decode()
    assert server.returncode in {0, 128 + signal.SIGTERM, -signal.SIGTERM}
    assert url in told and "carrel run" in told
    assert "Traceback" not in told
    assert not (data / "server.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "prot=1"], b"'port'"),
        (["--port", "99999"], b"port"),
        (["--log-level", "loud"], b"log_level"),
        (["--set", "sandbox.memory_mb=lots"], b"sandbox.memory_mb"),
        (["--config", "/no/such/file.toml"], b"/no/such/file.toml"),
    ],
)
def test_serve_refuses_bad_settings(alone: Carrel, words: list[str], said: bytes) -> None:
    done = alone("serve", *words)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(b"error: ")
    assert said in done.stderr
    assert b"Traceback" not in done.stderr and done.stdout == b""


def test_a_second_server_on_the_same_directory_is_refused(carrel: Carrel, data_dir: Path) -> None:
    done = carrel("serve", "--port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: ") and b"hint: " in done.stderr
    assert (data_dir / "server.json").exists()
