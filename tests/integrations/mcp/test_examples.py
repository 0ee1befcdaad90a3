"""The examples run as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

ROOT = Path(__file__).parents[3]


def test_the_example_client_runs(ground: Any, context: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "mcp_client.py"), context],
        env=ground.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for line in (f"'{context}'", "run_command          Run a command", "step 3", "hello", "42", "… 1 s, "):
        assert line in run.stdout
    assert run.stdout.endswith("refused: file_not_found\n")


async def test_the_configuration_file_starts_it(ground: Any, context: str) -> None:
    named = json.loads((ROOT / "examples" / "mcp_servers.json").read_text())["mcpServers"]["carrel"]
    args = [context if word == "my-project" else word for word in named["args"]]
    carrel = str(Path(sys.executable).with_name(named["command"]))
    async with Client(StdioServerParameters(command=carrel, args=args, env=ground.environment)) as client:
        assert f"'{context}'" in (client.instructions or "")
        assert not (await client.call_tool("list_files", {})).is_error


@pytest.mark.parametrize("name", ["a2a_client", "host_an_mcp_server"])
def test_without_a_server_an_example_says_so(name: str, tmp_path: Path) -> None:
    named = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        env={**named, "CARREL_DATA_DIR": str(tmp_path / "none")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in run.stderr, run.stderr
    assert "no carrel server runs here" in run.stdout + run.stderr
