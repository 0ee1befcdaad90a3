from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.support.audit_routes import Auditing, auditing

from carrel import AsyncClient, Client
from carrel.audit import AuditEntry, AuditLog, Ending, chain_of, verify


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Auditing]:
    with auditing(tmp_path) as server:
        yield server


async def fill(log: AuditLog) -> None:
    for number in range(450):
        entry = AuditEntry(
            chain_of(f"c{number % 2}"), "agent:a", "shell", "run_command", arguments={"command": f"echo {number}"}
        )
        (await log.begin(entry)).end(Ending("ok" if number % 10 else "timeout"))
    log.record(AuditEntry(chain_of("c0"), "agent:b", "file", "read", "deny", arguments={"path": "ü"}), Ending("denied"))


def test_search_export_and_key(server: Auditing) -> None:
    server.do(fill)
    with Client(server.url, "carrel_x") as client:
        found = list(client.audit.search())
        assert len(found) == 451, "every page"
        assert [record.name for record in client.audit.search(decision="deny")] == ["read"]
        assert len(list(client.audit.search(context_id="c1", result="timeout"))) == 0
        assert len(list(client.audit.search(context_id="c0", result="timeout"))) == 45
        assert [record.arguments for record in client.audit.search(text="ECHO 449")] == [{"command": "echo 449"}]
        assert [record.actor for record in client.audit.search(text="ü", actor="agent:b", kind="file", name="read")]
        soon = datetime.now(UTC) + timedelta(hours=1)
        assert list(client.audit.search(since=soon)) == []
        assert len(list(client.audit.search(until=soon))) == 451
        key = client.audit.key()
        for context, records in ((None, 901), ("c1", 450)):
            for compress in (False, True):
                data = b"".join(client.audit.export(context_id=context, compress=compress))
                verdict = verify(io.BytesIO(data), keys=[key.key])
                assert verdict.ok and verdict.records == records


async def test_it_is_the_same_asynchronously(server: Auditing) -> None:
    server.do(fill)
    async with AsyncClient(server.url, "carrel_x") as client:
        found = [record async for record in client.audit.search(context_id="c0", decision="deny")]
        assert [record.context_id for record in found] == ["c0"]
        data = b"".join([piece async for piece in client.audit.export()])
        assert verify(io.BytesIO(data), keys=[(await client.audit.key()).key]).ok


def test_prune(server: Auditing) -> None:
    server.do(fill)
    with Client(server.url, "carrel_x") as client:
        assert client.audit.prune().records == 901
        assert [record.name for record in client.audit.search()] == ["prune_audit", "prune_audit"]
