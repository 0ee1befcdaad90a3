from __future__ import annotations

import httpx
from tests.support.governed import Known
from tests.support.refusals import refused


async def test_only_an_administrator_forgets_a_context(http: httpx.AsyncClient, governed: str, known: Known) -> None:
    agent = await known("a", "agent", "operate")
    answer = await agent.delete("/v1/contexts/team:a")
    assert answer.status_code == 403 and answer.json()["rule"] == "scope(administer)"
    assert (await http.get("/v1/contexts/team:a/policy")).json()["settings"], "its rules hold still"
    assert (await http.delete("/v1/contexts/team:a")).status_code == 204
    assert (await http.get("/v1/contexts/team:a/policy")).json()["settings"] is None
    refused(await http.delete("/v1/contexts/team:a"), 404, "context_id")
    assert (await http.get(governed)).status_code == 404
