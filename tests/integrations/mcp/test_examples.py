"""The examples run as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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
