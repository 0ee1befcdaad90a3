from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.audit_routes import Auditing, auditing

from carrel.audit import AuditEntry, AuditLog, Ending, chain_of
from carrel.cli.egress import _COLUMNS

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


async def fill(log: AuditLog) -> None:
    log.record(AuditEntry(chain_of("c"), "agent:a", "shell", "run_command", arguments={"command": "x"}), Ending())
    reached = {"host": "a.example", "port": 443, "protocol": "connect", "address": "192.0.2.7"}
    log.record(
        AuditEntry(
            chain_of("c"), "sandbox:s", "network", "connect", rule="network(outbound:a.example)", arguments=reached
        ),
        Ending("ok", 12.0, bytes_in=5_000_000, bytes_out=700),
    )
    refused = {"host": "b\x1b[31m.example", "port": 80, "protocol": "http", "method": "GET", "path": "/x"}
    log.record(
        AuditEntry(chain_of("d"), "sandbox:t", "network", "request", "deny", arguments=refused),
        Ending("denied_by_policy"),
    )
    await log.begin(AuditEntry(chain_of("d"), "sandbox:t", "network", "connect", arguments=reached))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Auditing]:
    with auditing(tmp_path) as server:
        server.do(fill)
        yield server


@pytest.fixture
def carrel(alone: Carrel, server: Auditing) -> Carrel:
    def run(*words: str) -> subprocess.CompletedProcess[bytes]:
        return alone("egress", *words, env={"CARREL_URL": server.url, "CARREL_TOKEN": "carrel_x"})

    return run


def test_connections_are_shown_and_nothing_else(carrel: Carrel) -> None:
    head, *lines = carrel("tail").stdout.decode().splitlines()
    assert head.split() == _COLUMNS
    assert len(lines) == 3
    text = "\n".join(lines)
    assert "a.example:443" in text and "192.0.2.7" in text and "4.8M" in text and "700B" in text and "12ms" in text
    assert "GET /x" in text and "denied_by_policy" in text and "…" in text
    assert "\x1b[31m" not in text


def test_one_context_as_json(carrel: Carrel) -> None:
    lines = json.loads(carrel("tail", "--context", "c", "--json").stdout)
    assert [(line["name"], line["result"], line["bytes_in"]) for line in lines] == [("connect", "ok", 5_000_000)]
