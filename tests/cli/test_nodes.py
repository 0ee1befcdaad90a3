from __future__ import annotations

import json
from collections.abc import Callable
from subprocess import CompletedProcess

Carrel = Callable[..., CompletedProcess[bytes]]


def test_a_server_alone(carrel: Carrel) -> None:
    found = json.loads(carrel("nodes", "--json").stdout)
    assert [(each["here"], each["state"], each["notice"]) for each in found] == [(True, "running", None)]
    header, row = carrel("nodes").stdout.decode().splitlines()
    assert header.split() == ["NAME", "STATE", "SANDBOXES", "URL", "SPIFFE", "ID", "VERSION", "UP", "SEEN", "NOTICE"]
    assert row.startswith(f"{found[0]['name']}*") and "running" in row


def test_revoking_needs_identities(carrel: Carrel) -> None:
    for command in ("revoke", "readmit"):
        done = carrel("nodes", command, "other")
        assert done.returncode != 0
        assert b"these servers have no SPIFFE IDs" in done.stderr and b"CARREL_SPIFFE_SOURCE" in done.stderr
