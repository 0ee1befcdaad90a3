from __future__ import annotations

import asyncio

import httpx
import pytest

from carrel.server import Running
from governed import Known
from refusals import refused
from sandboxes import until


async def test_a_call(http: httpx.AsyncClient, known: Known) -> None:
    answer = await http.post("/v1/execute", json={"code": "print(open('a').read())", "files": {"a": "aGk="}})
    assert answer.status_code == 200 and answer.json()["output"] == "hi\n"
    for body in ({}, {"code": ""}, {"code": "1", "timeout": 121}, {"code": "1", "language": "shell"}):
        assert (await http.post("/v1/execute", json=body)).status_code == 400
    both = {"code": "1", "env_name": "a", "requirements": ["b"]}
    assert (await http.post("/v1/execute", json=both)).status_code == 400
    refused(await http.post("/v1/execute", json={"code": "1", "template": "none"}), 400, "template")
    reader = await known("reader", "agent", "read")
    refused(await reader.post("/v1/execute", json={"code": "1"}), 403, None)
    bounded = await known("bounded", "agent", "operate", namespace="team")
    refused(await bounded.post("/v1/execute", json={"code": "1"}), 403, None)


async def test_back_pressure(http: httpx.AsyncClient, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"max_sandboxes": 1, "queue": 0, "spares": 0}
    monkeypatch.setattr(server.plane.router, "_settings", server.plane.settings.router.model_copy(update=few))
    running = asyncio.ensure_future(http.post("/v1/execute", json={"code": "import time; time.sleep(3)"}))

    async def busy() -> bool:
        return 'carrel_router_sandboxes{state="busy"} 1.0' in (await http.get("/metrics")).text

    await until(busy)
    answer = await http.post("/v1/execute", json={"code": "1"})
    assert refused(answer, 429, None)["retry"] is True
    assert int(answer.headers["retry-after"]) > 0
    assert (await running).status_code == 200
