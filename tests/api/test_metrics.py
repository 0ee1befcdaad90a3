from __future__ import annotations

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from tests.support.refusals import refused

from carrel.server import RunningServer


async def count(http: httpx.AsyncClient, name: str, /, **labels: str) -> float:
    answer = await http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert answer.headers["cache-control"] == "no-store"
    found = [
        sample.value
        for family in parse(answer.text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(found)


async def test_operations_are_measured_by_kind_name_and_outcome(http: httpx.AsyncClient, box: str) -> None:
    for command in ("true", "false"):
        assert (await http.post(f"{box}/commands", json={"command": command})).status_code == 200
    assert (await http.get(f"{box}/files/stat", params={"path": "absent"})).status_code == 404
    name = "carrel_operation_seconds_count"
    assert await count(http, name, kind="shell", name="run_command", outcome="ok") == 2
    assert await count(http, name, kind="file", name="stat", outcome="file_not_found") == 1
    assert await count(http, name, kind="session", name="deploy_or_resume", outcome="ok") == 1
    assert await count(http, "carrel_operation_seconds_sum", kind="shell", name="run_command") > 0
    assert await count(http, "carrel_process_open_fds") > 0


async def test_openmetrics_for_who_accepts_it(http: httpx.AsyncClient) -> None:
    answer = await http.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,text/plain"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert "carrel_operation_seconds" in {family.name for family in parse_openmetrics(answer.text)}


async def test_the_token_is_asked_for(server: RunningServer) -> None:
    async with httpx.AsyncClient(base_url=server.url) as stranger:
        refused(await stranger.get("/metrics"), 401, "Authorization", "unauthorized")
