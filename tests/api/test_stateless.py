from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from tests.support.governed import Known
from tests.support.refusals import refused
from tests.support.sandboxes import until

from carrel.models.bundles import END, MEDIA_TYPE, BundlePart, Unbundling
from carrel.server import RunningServer


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


def bundle(code: str, *, end: bytes = END, **files: bytes) -> bytes:
    request = json.dumps({"code": code}).encode()
    parts = [BundlePart("request", len(request)).head() + request]
    parts += [BundlePart("file", len(data), path).head() + data for path, data in files.items()]
    return b"".join(parts) + end


def parts_of(body: bytes) -> list[tuple[BundlePart, bytes]]:
    parser, found = Unbundling(), []
    for item in parser.feed(body):
        found.append((item, b"")) if isinstance(item, BundlePart) else found.append((found.pop()[0], item))
    parser.finish()
    return found


async def test_a_bundle(http: httpx.AsyncClient, known: Known) -> None:
    answer = await http.post(
        "/v1/execute/bundle", content=bundle("open('out', 'w').write(open('a').read() * 2)", a=b"hi")
    )
    assert answer.headers["content-type"] == MEDIA_TYPE
    [(result, text), (file, content)] = parts_of(answer.content)
    assert (result.kind, json.loads(text)["files_produced"]) == ("result", ["out"])
    assert (file, content) == (BundlePart("file", 4, "out"), b"hihi")
    for body in (
        b"",
        END,
        BundlePart("file", 1, "x").head() + b"x" + END,
        bundle(""),
        bundle("1", end=b""),
        b"nonsense" * 9,
    ):
        refused(await http.post("/v1/execute/bundle", content=body), 400, "code" if body == bundle("") else "body")
    bad = bundle("print(1)", **{"../x": b"1"})
    refused(await http.post("/v1/execute/bundle", content=bad), 400, "path")
    reader = await known("bundle-reader", "agent", "read")
    refused(await reader.post("/v1/execute/bundle", content=bundle("1")), 403, None)


async def test_back_pressure(http: httpx.AsyncClient, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"max_sandboxes": 1, "queue": 0, "spares": 0}
    monkeypatch.setattr(server.plane.router.table, "settings", server.plane.settings.router.model_copy(update=few))
    code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    running = asyncio.ensure_future(http.post("/v1/execute", json={"code": code}))

    async def busy() -> bool:
        return 'carrel_router_sandboxes{state="busy"} 1.0' in (await http.get("/metrics")).text

    await until(busy)
    answer = await http.post("/v1/execute", json={"code": "1"})
    assert refused(answer, 429, None)["retry"] is True
    assert int(answer.headers["retry-after"]) > 0
    answer = await http.post("/v1/execute/bundle", content=bundle("1", a=bytes(1 << 20)))
    assert refused(answer, 429, None)["retry"] is True and int(answer.headers["retry-after"]) > 0
    table = server.plane.router.table
    place = await until(lambda: next((each for each in table.places if each.state == "busy"), None))
    Path((await server.plane.sessions.find(place.id)).workspace, "go").touch()
    assert (await running).status_code == 200
