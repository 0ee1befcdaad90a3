from __future__ import annotations

import asyncio

import httpx
import pytest
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


async def test_a_running_sandbox_shows_what_it_uses_and_a_stopped_one_nothing(
    http: httpx.AsyncClient, box: str
) -> None:
    told = (await http.get(box)).json()
    if told["provider"] == "process":
        pytest.skip("sandboxes without isolation are not measured")
    work = "python3 -c 'import time\nwhile time.process_time() < 0.5: pass'"
    assert (await http.post(f"{box}/commands", json={"command": work})).status_code == 200
    async with asyncio.timeout(30):
        while (await http.get(box)).json()["resources"]["cpu_seconds"] < 0.5:
            await asyncio.sleep(0.05)  # a measurement is shared for a while
    used = (await http.get(box)).json()["resources"]
    assert 0 < used["memory_bytes"] <= used["memory_peak_bytes"]
    listed = {each["id"]: each for each in (await http.get("/v1/sandboxes")).json()["items"]}
    assert listed[told["id"]]["resources"]["cpu_seconds"] >= 0.5
    name = "carrel_sandbox_cpu_seconds_total"
    assert await count(http, name, sandbox=told["id"], template="") >= 0.5
    assert (await http.post(f"{box}/stop")).status_code == 200
    assert await count(http, name, sandbox=told["id"]) == 0
    assert (await http.get(box)).json()["resources"] is None


async def test_commands_are_counted_by_how_they_end(http: httpx.AsyncClient, box: str) -> None:
    name = "carrel_command_seconds_count"
    for command in ("true", "exit 3", "kill -9 $$"):
        assert (await http.post(f"{box}/commands", json={"command": command})).status_code == 200
    slow = {"command": "sleep 60", "timeout": 0.2}
    assert (await http.post(f"{box}/commands", json=slow)).status_code == 200
    answer = await http.post(f"{box}/python", json={"code": "1 / 0"})
    assert answer.status_code == 200, answer.text
    started = await http.post(f"{box}/commands/start", json={"command": "sleep 0.1; exit 4"})
    assert started.status_code == 201, started.text
    async with asyncio.timeout(30):
        while await count(http, name, exit="failed", template="") < 3:
            await asyncio.sleep(0.05)
    for exit, number in {"ok": 1, "failed": 3, "signaled": 1, "timed_out": 1, "cancelled": 0, "error": 0}.items():
        assert await count(http, name, exit=exit) == number, exit
