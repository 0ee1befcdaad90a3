from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from tests.support.governed import Known
from tests.support.refusals import refused

from carrel.audit import verify
from carrel.config import Settings
from carrel.server import running


async def test_search_export_and_key(http: httpx.AsyncClient, governed: str) -> None:
    for command in ("echo one", "echo two", "curl x"):
        await http.post(f"{governed}/commands", json={"command": command})

    async def found(**wanted: str) -> list[str]:
        items = (await http.get("/v1/audit", params={"context_id": "team:a", **wanted})).json()["items"]
        return [each["arguments"].get("command", each["name"]) for each in items]

    assert await found(name="run_command") == ["curl x", "echo two", "echo one"]
    assert await found(decision="deny") == ["curl x"]
    assert await found(text="TWO") == ["echo two"]
    assert await found(kind="shell", actor="administrator", limit="1") == ["curl x"]
    now = datetime.now(UTC)
    later = (now + timedelta(hours=1)).isoformat()
    assert await found(since=later) == [] and len(await found(until=later)) == 5
    assert len(await found(until=later.removesuffix("+00:00"))) == 5, "without a zone it is UTC"
    first = (await http.get("/v1/audit", params={"limit": 2})).json()
    second = (await http.get("/v1/audit", params={"limit": 2, "cursor": first["next"]})).json()
    assert not {each["seq"] for each in first["items"]} & {each["seq"] for each in second["items"]}
    refused(await http.get("/v1/audit", params={"decision": "perhaps"}), 400, "decision")
    refused(await http.get("/v1/audit", params={"since": "yesterday"}), 400, "since")

    key = (await http.get("/v1/audit/key")).json()["key"]
    for params in ({}, {"compress": "1"}, {"context_id": "team:a"}):
        exported = await http.get("/v1/audit/export", params=params)
        kind = "application/zstd" if "compress" in params else "application/x-ndjson"
        assert exported.headers["content-type"].startswith(kind)
        assert verify(io.BytesIO(exported.content), keys=[key]).ok


async def test_only_kinds_that_there_are_can_be_looked_for(http: httpx.AsyncClient) -> None:
    for name in ("kind", "decision"):
        refused(await http.get("/v1/audit", params={name: "nonsense"}), 400, name)
    for kind in ("shell", "file", "network", "mcp", "session"):
        assert (await http.get("/v1/audit", params={"kind": kind})).status_code == 200


@pytest.mark.parametrize("moment", ["0.5", "5", "-5", "1e9", "now", ""])
async def test_moments_are_dates(http: httpx.AsyncClient, moment: str) -> None:
    for name in ("since", "until"):
        refused(await http.get("/v1/audit", params={name: moment}), 400, name)
        assert (await http.get("/v1/audit", params={name: "2026-01-31T12:00:00Z"})).status_code == 200


async def test_pruning_is_for_who_administers_all_and_only_where_it_is_set(
    http: httpx.AsyncClient, known: Known
) -> None:
    problem = refused(await http.post("/v1/audit/prune"), 409, "audit.keep_days")
    assert "CARREL_AUDIT_KEEP_DAYS" in problem["hint"]
    for who in (await known("op", "service", "operate"), await known("part", "person", "administer", namespace="team")):
        assert (await who.post("/v1/audit/prune")).status_code == 403


async def test_pruning_by_request_is_recorded_under_who_asked(settings: Settings) -> None:
    kept = settings.model_copy(update={"audit": settings.audit.model_copy(update={"keep_days": 1})})
    async with running(kept) as server, httpx.AsyncClient(base_url=server.url) as client:
        client.headers["authorization"] = f"Bearer {server.token}"
        answer = await client.post("/v1/audit/prune")
        assert answer.status_code == 200 and answer.json()["records"] == 0
