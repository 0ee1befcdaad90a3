"""One request that is answered by another server is one trace, which both servers send."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator

import pytest
from tests.support.fleet import Fleet, eventually
from tests.support.otlp import Collector
from tests.support.postgres import Postgres

SPAN = "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def fleet(postgres: Postgres, carrel_forks: None, collector: Collector) -> Iterator[Fleet]:
    schema = f"traces_{secrets.token_hex(4)}"
    asyncio.run(postgres.execute(f"CREATE SCHEMA {schema}"))
    fleet = Fleet(postgres.url(search_path=schema), **collector.settings)
    for name in ("a", "b"):
        fleet.start(name)
        fleet.ready(name)
    yield fleet
    fleet.close()
    asyncio.run(postgres.execute(f"DROP SCHEMA {schema} CASCADE"))


async def test_a_forwarded_request_goes_on_with_the_trace(fleet: Fleet, collector: Collector) -> None:
    trace_id = os.urandom(16).hex()
    async with fleet.http("a") as near, fleet.http("b") as far:
        answer = await eventually(near, "POST", "/v1/sandboxes", json={"context_id": "traced"})
        owner, box = answer.json()["node"], f"/v1/sandboxes/{answer.json()['id']}"
        other = far if owner == "a" else near
        answer = await other.post(
            f"{box}/commands",
            json={"command": "echo $TRACEPARENT"},
            headers={"traceparent": f"00-{trace_id}-{SPAN}-01", "tracestate": "vendor=7"},
        )
        assert answer.status_code == 200, answer.text
        route = "POST /v1/sandboxes/{id}/commands"
        spans = await asyncio.to_thread(collector.trace, trace_id, "POST", route, "run_command", "process")
        forwarded, answered = spans["POST"], spans[route]
        assert forwarded.parent == SPAN
        assert answered.parent == forwarded.span_id
        assert answered.state == forwarded.state == "vendor=7"
        assert answered.service["service.instance.id"] == owner != forwarded.service["service.instance.id"]
        assert spans["run_command"].parent == answered.span_id
        assert answer.json()["stdout"] == f"00-{trace_id}-{spans['run_command'].span_id}-01\n"
        assert (await near.delete("/v1/contexts/traced")).status_code == 204
