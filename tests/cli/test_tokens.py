from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable
from datetime import timedelta

import pytest
import typer

from carrel.cli.tokens import _duration

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_made_shown_once_used_listed_and_revoked(carrel: Carrel) -> None:
    name = f"t{uuid.uuid4().hex[:8]}"
    made = carrel(
        "token", "create", name, "--kind", "agent", "--scope", "operate", "--scope", "read",
        "--namespace", name, "--context", f"{name}:a", "--expires", "30d",
    )  # fmt: skip
    token = made.stdout.decode().strip()
    assert made.returncode == 0 and token.startswith("carrel_")
    assert f"for agent:{name}; it cannot be printed again" in made.stderr.decode()
    table = carrel("token", "ls").stdout.decode()
    [line] = [line for line in table.splitlines() if name in line]
    assert f"{name}:a" in line and "operate, read" in line and "good" in line and token not in table
    [listed] = [each for each in json.loads(carrel("token", "ls", "--json").stdout) if each["name"] == name]
    assert carrel("ps", env={"CARREL_TOKEN": token}).returncode == 0
    assert b"agents may not" in carrel("token", "ls", env={"CARREL_TOKEN": token}).stderr
    assert carrel("token", "revoke", listed["id"]).stdout.decode() == f"revoked {listed['id']}\n"
    refused = carrel("ps", env={"CARREL_TOKEN": token})
    assert refused.returncode == 1 and b"revoked" in refused.stderr
    assert name not in carrel("token", "ls").stdout.decode()
    assert "revoked" in next(line for line in carrel("token", "ls", "-a").stdout.decode().splitlines() if name in line)
    assert json.loads(carrel("token", "create", name, "--kind", "person", "--scope", "read", "--json").stdout)["token"]


def test_wrong_usage(carrel: Carrel) -> None:
    for words in (["--kind", "agent"], ["--scope", "read"], ["--kind", "agent", "--scope", "read", "--expires", "x"]):
        assert carrel("token", "create", "a", *words).returncode == 2
    refused = carrel("token", "create", "a", "--kind", "agent", "--scope", "approve")
    assert refused.returncode == 1 and b"agent's token cannot" in refused.stderr
    assert carrel("token", "revoke", "tok-0").returncode == 1


def test_durations() -> None:
    assert _duration("30d") == timedelta(days=30) and _duration("12h") == timedelta(hours=12)
    for wrong in ("0d", "d", "-1d", "1y", "1.5h"):
        with pytest.raises(typer.BadParameter):
            _duration(wrong)
