from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.support.environments_ground import sources, stocked
from tests.support.governed import Known
from tests.support.indexes import IndexServer
from tests.support.refusals import refused

from carrel.config import Settings


@pytest.fixture
async def index() -> AsyncIterator[IndexServer]:
    async with stocked() as index:
        yield index


@pytest.fixture
async def settings(settings: Settings, index: IndexServer) -> Settings:
    """The server's own policy installs from the index."""
    file = Path(settings.data_dir, "sources.json")
    file.write_text(json.dumps(sources(index)))
    return settings.model_copy(update={"policy": settings.policy.model_copy(update={"sources_file": str(file)})})


async def test_built_listed_attached_removed(http: httpx.AsyncClient, known: Known) -> None:
    answer = await http.post("/v1/envs", json={"requirements": ["shelf"], "name": "tools"})
    assert answer.status_code == 200, answer.text
    built = answer.json()
    assert built["labels"] == ["tools"] and built["path"] == f"/envs/{built['name']}" and not built["in_use"]
    assert [each["name"] for each in built["packages"]] == ["plank", "shelf"]
    assert (await http.get("/v1/envs/tools")).json()["name"] == built["name"]
    assert (await http.post("/v1/sandboxes", json={"context_id": "team:a"})).status_code == 201
    attached = await http.post("/v1/sandboxes/team:a/envs", json={"env": "tools"})
    assert attached.status_code == 200 and attached.json()["in_use"]
    refused(await http.delete("/v1/envs/tools"), 409, "env", "conflict")
    own = await http.post("/v1/sandboxes/team:a/envs", json={"requirements": ["nail"]})
    assert own.status_code == 200, own.text

    agent = await known("coder", "agent", "operate", contexts=["team:a"])
    other = await known("other", "agent", "operate", contexts=["team:b"])
    seen = {each["name"] for each in (await agent.get("/v1/envs")).json()["items"]}
    assert seen == {built["name"], own.json()["name"]}
    assert [(each["name"], each["path"]) for each in (await other.get("/v1/envs")).json()["items"]] == [("tools", "")]
    for client in (agent, other):
        refused(await client.post("/v1/envs", json={"requirements": ["nail"], "name": "tools"}), 403, None)
        refused(await client.delete("/v1/envs/tools"), 403, None)
    refused(await other.post("/v1/sandboxes/team:a/envs", json={"env": "tools"}), 403, None)
    assert (await agent.post("/v1/sandboxes/team:a/envs", json={"requirements": ["nail"]})).status_code == 200

    assert (await http.post("/v1/sandboxes/team:a/terminate", json={})).is_success
    assert (await http.delete("/v1/envs/tools")).status_code == 204
    refused(await http.get("/v1/envs/tools"), 404, "env", "not_found")


async def test_a_name_is_of_use_to_those_alone_whose_contexts_have_it(http: httpx.AsyncClient, known: Known) -> None:
    for context in ("one:a", "two:a", "two:b"):
        assert (await http.post("/v1/sandboxes", json={"context_id": context})).status_code == 201
    one = await known("one", "service", "operate", namespace="one")
    two = await known("two", "service", "operate", namespace="two")
    private = (await one.post("/v1/sandboxes/one:a/envs", json={"requirements": ["nail"]})).json()
    assert private["built_by"] == "one:a"
    assert (await two.get("/v1/envs")).json()["items"] == []
    refused(await two.get(f"/v1/envs/{private['name']}"), 404, "env", "not_found")
    refused(await two.post("/v1/sandboxes/two:a/envs", json={"env": private["name"]}), 404, "env", "not_found")
    run = {"code": "import nail", "env": private["name"]}
    refused(await two.post("/v1/sandboxes/two:a/python", json=run), 404, "env", "not_found")

    # Who asks for what it holds, under a policy that gives the same, has the same: and then its name.
    own = (await two.post("/v1/sandboxes/two:a/envs", json={"requirements": ["nail"]})).json()
    assert own["name"] == private["name"] and own["path"] == private["path"] and own["built_by"] is None
    for answer in (
        await two.get(f"/v1/envs/{own['name']}"),
        await two.post("/v1/sandboxes/two:b/envs", json={"env": own["name"]}),
    ):
        assert answer.status_code == 200 and answer.json()["built_by"] is None
    assert [each["name"] for each in (await two.get("/v1/envs")).json()["items"]] == [own["name"]]

    # What the administrator gave a label is for all; its name is told where it was attached.
    shared = (await http.post("/v1/envs", json={"requirements": ["shelf"], "name": "tools"})).json()
    seen = (await two.get("/v1/envs/tools")).json()
    assert (seen["name"], seen["path"]) == ("tools", "") and shared["name"] not in json.dumps(seen)
    assert (await two.post("/v1/sandboxes/two:a/envs", json={"env": "tools"})).json()["path"] == shared["path"]
    assert (await two.get("/v1/envs/tools")).json()["name"] == shared["name"]
    assert (await one.get("/v1/envs/tools")).json()["name"] == "tools"


async def test_followed(http: httpx.AsyncClient) -> None:
    async def follow(body: dict[str, object]) -> list[dict[str, object]]:
        answer = await http.post("/v1/envs?follow=true", json=body)
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        return [json.loads(line) for line in answer.text.splitlines()]

    *progress, last = await follow({"requirements": ["nail"]})
    assert {"progress": "+ nail==1.0"} in progress and "environment" in last
    *_, last = await follow({"requirements": ["nonesuch"]})
    problem = last["problem"]
    assert isinstance(problem, dict) and problem["code"] == "invalid_request" and "nonesuch" in problem["detail"]


async def test_what_is_no_request(http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/sandboxes", json={"context_id": "c"})).status_code == 201
    for body, field in (
        ({}, "body"),
        ({"requirements": []}, "requirements"),
        ({"env": "x", "requirements": ["y"]}, "body"),
        ({"env": "x", "python": "3.11"}, "body"),
        ({"requirements": ["x\n--index-url http://evil.test"]}, "requirements.0"),
        ({"requirements": ["-r /etc/passwd"]}, "requirements"),
        ({"requirements": ["nail"], "python": "3.99"}, "python"),
        ({"requirements": ["nail"], "index": "absent"}, "index"),
        ({"requirements": ["nail @ file:///etc/passwd"]}, "requirements"),
        ({"env": "../../etc"}, "env"),
    ):
        refused(await http.post("/v1/sandboxes/c/envs", json=body), 400, field)
    refused(await http.post("/v1/sandboxes/c/envs", json={"env": "absent"}), 404, "env")
    refused(await http.post("/v1/sandboxes/absent/envs", json={"env": "absent"}), 404, "id")
