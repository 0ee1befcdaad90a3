"""`carrel agent`: what it says when it cannot start. How it works is tested with the agent itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
