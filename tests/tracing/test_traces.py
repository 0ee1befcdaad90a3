"""What a server sends to a collector: the spans of a command from the request to its process, and no secret."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager

import httpx
import pytest
from tests.support.governed import POLICY
from tests.support.mcp_hosted import GOOD
from tests.support.otlp import Collector, Seen

from carrel.config import load
from carrel.errors import InvalidRequest
from carrel.server import running

SPAN = "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def _forked(forked: None) -> None: ...


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@asynccontextmanager
async def served(
    patch: pytest.MonkeyPatch, variables: Mapping[str, str], **flags: object
) -> AsyncIterator[httpx.AsyncClient]:
    """A server in this process; `variables` are those of its environment."""
    path = tempfile.mkdtemp(prefix="carrel-t-")
    settings = {"data_dir": path, "port": 0, "volumes": "directory", "sandbox.allow_process": True, **flags}
    with patch.context() as inner:
        for name, value in variables.items():
            if name.startswith("OTEL_"):
                inner.setenv(name, value)
        try:
            environ = {name: value for name, value in variables.items() if name.startswith("CARREL_")}
            async with running(load(settings, environ=environ)) as server:
                headers = {"authorization": f"Bearer {server.token}"}
                async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
                    yield client
        finally:
            shutil.rmtree(path)


@pytest.fixture
async def http(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    async with served(monkeypatch, collector.settings) as client:
        yield client


def asked() -> tuple[str, dict[str, str]]:
    """A new trace, and the headers that name it."""
    trace_id = os.urandom(16).hex()
    return trace_id, {"traceparent": f"00-{trace_id}-{SPAN}-01", "tracestate": "vendor=7"}


async def sandbox(http: httpx.AsyncClient, headers: Mapping[str, str] | None = None, **given: object) -> str:
    body = {"context_id": "traced", **given}
    answer = await http.post("/v1/sandboxes", json=body, headers=headers)
    assert answer.status_code in {200, 201}, answer.text
    return f"/v1/sandboxes/{answer.json()['id']}"


async def shell(http: httpx.AsyncClient, box: str, command: str, headers: Mapping[str, str] | None = None) -> str:
    answer = await http.post(f"{box}/commands", json={"command": command}, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["stdout"])


def parents(spans: Mapping[str, Seen]) -> dict[str, str]:
    """For each span the name of the one that it is a part of."""
    names = {each.span_id: each.name for each in spans.values()}
    return {each.name: names.get(each.parent, each.parent) for each in spans.values()}


async def test_a_command_is_seen_from_the_request_to_its_process(http: httpx.AsyncClient, collector: Collector) -> None:
    started, headers = asked()
    box = await sandbox(http, headers)
    spans = await asyncio.to_thread(collector.trace, started, "deploy_or_resume", "start", "attach")
    found = {name: parent for name, parent in parents(spans).items() if name in {"start", "prepare", "attach"}}
    assert set(found.values()) == {"deploy_or_resume"}

    trace_id, headers = asked()
    assert await shell(http, box, "sleep 0.2; exit 3", headers) == ""
    steps, route = {"policy", "audit", "supervisor", "process"}, "POST /v1/sandboxes/{id}/commands"
    spans = await asyncio.to_thread(collector.trace, trace_id, *steps, "run_command", route)
    assert parents(spans) == {route: SPAN, "run_command": route} | dict.fromkeys(steps, "run_command")
    request, operation, process = spans[route], spans["run_command"], spans["process"]
    assert request.state == "vendor=7"
    assert request.facts["http.response.status_code"] == 200
    assert request.facts["http.route"] == "/v1/sandboxes/{id}/commands"
    assert operation.facts["carrel.sandbox"] == box.rpartition("/")[2]
    assert (operation.facts["carrel.outcome"], operation.facts["carrel.decision"]) == ("ok", "allow")
    assert operation.facts["carrel.record"] > 0
    assert (process.facts["carrel.exit"], process.facts["carrel.exit_code"]) == ("failed", 3)
    assert 0.15 < process.ended - process.began < operation.ended - operation.began + 0.1
    assert request.service["service.name"] == "carrel"


async def test_without_a_caller_s_trace_each_request_has_its_own_and_upkeep_has_none(
    http: httpx.AsyncClient, collector: Collector
) -> None:
    box = await sandbox(http)
    assert await shell(http, box, "echo ${TRACEPARENT-none}") == "none\n"
    for path in ("/healthz", "/metrics"):
        assert (await http.get(path)).status_code == 200
    await asyncio.to_thread(
        collector.until, lambda: len([each for each in collector.spans if not each.parent]) >= 2, "two roots"
    )
    roots = [each.name for each in collector.spans if not each.parent]
    assert sorted(roots) == ["POST /v1/sandboxes", "POST /v1/sandboxes/{id}/commands"]


async def test_the_trace_is_passed_on_into_the_sandbox(http: httpx.AsyncClient, collector: Collector) -> None:
    box = await sandbox(http)
    trace_id, headers = asked()
    said = await shell(http, box, "echo $TRACEPARENT $TRACESTATE", headers)
    spans = await asyncio.to_thread(collector.trace, trace_id, "run_command")
    assert said in {
        f"00-{trace_id}-{each.span_id}-01 vendor=7\n" for each in collector.spans if each.trace_id == trace_id
    }
    assert spans["run_command"].trace_id == trace_id
    answer = await http.post(
        f"{box}/commands", json={"command": "echo $TRACEPARENT", "env": {"TRACEPARENT": "mine"}}, headers=headers
    )
    assert answer.json()["stdout"] == "mine\n"
    broken = {"traceparent": f"00-{trace_id}-{SPAN}-01'; echo broken", "tracestate": "a=b"}
    assert await shell(http, box, "echo ${TRACEPARENT-none}", broken) == "none\n"


async def test_a_background_command_has_its_process_in_the_trace(http: httpx.AsyncClient, collector: Collector) -> None:
    box = await sandbox(http)
    trace_id, headers = asked()
    answer = await http.post(f"{box}/commands/start", json={"command": "sleep 0.3; exit 4"}, headers=headers)
    assert answer.status_code == 201
    spans = await asyncio.to_thread(collector.trace, trace_id, "start_command", "process")
    assert parents(spans)["process"] == "start_command"
    assert spans["process"].facts["carrel.exit_code"] == 4
    assert spans["process"].ended > spans["start_command"].ended


async def test_waiting_for_a_person_and_a_refusal_are_seen(http: httpx.AsyncClient, collector: Collector) -> None:
    assert (await http.put("/v1/contexts/traced/policy", json={"settings": POLICY})).status_code == 200
    box = await sandbox(http)
    trace_id, headers = asked()
    answer = await http.post(f"{box}/commands", json={"command": "curl example.org"}, headers=headers)
    assert answer.status_code == 403
    await asyncio.to_thread(collector.trace, trace_id, "run_command", "policy")
    operation = next(each for each in collector.spans if each.trace_id == trace_id and "carrel.outcome" in each.facts)
    assert operation.failed
    assert operation.facts["carrel.decision"] == "deny"
    assert operation.facts["error.type"] == "denied_by_policy"
    trace_id, headers = asked()
    answer = await http.post(f"{box}/commands", json={"command": "make"}, headers={**headers, "carrel-wait": "0.3"})
    assert answer.status_code == 403
    spans = await asyncio.to_thread(collector.trace, trace_id, "approval")
    assert spans["approval"].ended - spans["approval"].began >= 0.25


async def test_no_secret_and_no_command_is_sent_unless_the_operator_wants_commands(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, said = "correct-horse-battery", "said-in-a-command"
    for wanted in (False, True):
        settings = collector.settings | {"CARREL_TRACING_COMMANDS": str(wanted).lower()}
        collector.raw = b""
        async with served(monkeypatch, settings) as http:
            assert (await http.put("/v1/contexts/traced/secrets/KEY", json={"value": secret})).status_code in {
                200,
                201,
                204,
            }
            box = await sandbox(http)
            trace_id, headers = asked()
            long = "x" * 5000
            command = f"echo {said} {secret} {long} >&2; exit 9"
            assert await shell(http, box, command, headers) == ""
            await asyncio.to_thread(collector.trace, trace_id, "run_command", "process")
        assert (said.encode() in collector.raw) is wanted
        assert secret.encode() not in collector.raw
        assert b"x" * 1001 not in collector.raw, "texts are cut"


async def test_hosted_mcp_servers_get_the_trace(http: httpx.AsyncClient, collector: Collector) -> None:
    box = await sandbox(http)
    program = GOOD.replace("return text(calls)", 'return text(json.dumps(params.get("_meta") or {}))')
    await http.put(f"{box}/files/content?path=good.py", content=program.encode())
    added = await http.put(f"{box}/mcp-servers/good", json={"command": ["python3", "good.py"]})
    assert added.status_code == 200, added.text
    for headers in ({}, asked()[1]):
        answer = await http.post(f"{box}/mcp-servers/good/request", json={"tool": "count"}, headers=headers)
        assert answer.status_code == 200, answer.text
        meta = json.loads(answer.json()["content"][0]["text"])
        assert meta.get("tracestate") == headers.get("tracestate")
        assert meta.get("traceparent", "")[:35] == headers.get("traceparent", "")[:35]


async def test_an_outbound_connection_is_a_part_of_the_command_that_ran(
    http: httpx.AsyncClient, collector: Collector
) -> None:
    box = await sandbox(http, network="allowlist")
    trace_id, headers = asked()
    await shell(http, box, "python3 -c 'import urllib.request as u; u.urlopen(\"http://nowhere.example/\")'", headers)
    spans = await asyncio.to_thread(collector.trace, trace_id, "connection")
    assert parents(spans)["connection"] == "run_command"
    facts = spans["connection"].facts
    assert facts["carrel.host"] == "nowhere.example"
    assert facts["carrel.outcome"] != "ok"
    assert spans["connection"].failed


async def test_a_collector_that_is_away_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_BSP_MAX_QUEUE_SIZE": "512",
            "CARREL_TRACING_ENABLED": "true",
        }
        async with served(monkeypatch, variables) as http:
            box = await sandbox(http)
            for _ in range(20):
                assert await shell(http, box, "echo on") == "on\n"
            began = time.monotonic()
        assert time.monotonic() - began < 30, "nor the end of the server"


async def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "CARREL_TRACING_ENABLED": "true"}
    with pytest.raises(InvalidRequest, match="grpc"):
        async with served(monkeypatch, variables):
            pass
