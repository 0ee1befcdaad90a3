from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_events_of_a_context(carrel: Carrel) -> None:
    name = f"e{uuid.uuid4().hex[:8]}"
    assert carrel("exec", name, "printf '\\033[31m'; exit 3").returncode == 3
    lines = [json.loads(line) for line in carrel("events", name, "-k", "command.started", "--json").stdout.splitlines()]
    assert [line["kind"] for line in lines] == ["command.started"]
    shown = carrel("events", name, "--kind", "command", "--after", str(lines[0]["id"] - 1)).stdout.decode()
    assert f"{name}  command.started" in shown
    assert "\033" not in shown
    assert "session" not in shown
    assert b"there are no events" in carrel("events", f"{name}-not").stderr
    refused = carrel("events", "--kind", "comand")
    assert refused.returncode == 1
    assert b"there is no kind of event 'comand'" in refused.stderr
