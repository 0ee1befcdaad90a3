from __future__ import annotations

import httpx
from tests.support.governed import POLICY, Known
from tests.support.refusals import refused

PATH = "/v1/contexts/team:a/policy"


async def test_get_put_delete(http: httpx.AsyncClient) -> None:
    assert (await http.get(PATH)).json()["version"] == 0
    info = (await http.put(PATH, json={"settings": POLICY, "version": 0})).json()
    assert (info["version"], info["settings"], info["sources"]) == (1, POLICY, None)
    assert info["updated_by"] == "administrator"
    refused(await http.put(PATH, json={"settings": {}, "version": 0}), 409, "version")
    info = (await http.put(PATH, json={"sources": {"runtime": {"languages": ["bash"]}}})).json()
    assert (info["version"], info["settings"]) == (2, POLICY), "what is left out is not changed"
    info = (await http.put(PATH, json={"settings": None})).json()
    assert info["settings"] is None and info["sources"] is not None
    for _ in range(2):
        assert (await http.delete(PATH)).status_code == 204
    assert (await http.get(PATH)).json()["sources"] is None
    changes = (await http.get("/v1/audit", params={"context_id": "team:a"})).json()["items"]
    assert [each["name"] for each in changes].count("put_policy") == 4
    assert {each["actor"] for each in changes} == {"administrator"}


async def test_what_cannot_be_a_policy(http: httpx.AsyncClient) -> None:
    answer = await http.put(PATH, json={"settings": {"permissions": {"allow": ["shell(git"]}}})
    assert "shell(git" in refused(answer, 400, "permissions.allow[0]")["detail"]
    answer = await http.put(PATH, json={"settings": {"permissions": {"alow": []}}})
    assert refused(answer, 400, "permissions.alow")["hint"]
    refused(await http.get("/v1/contexts/-x/policy"), 400, "context_id")


async def test_explain(http: httpx.AsyncClient, known: Known, governed: str) -> None:
    agent = await known("coder", "agent", "operate", contexts=["team:a"])
    told = (await agent.post(f"{PATH}/explain", json={"command": "echo a | curl x"})).json()
    assert told["verdict"] == "deny" and told["rule"] == "shell(curl:*)"
    assert [part["verdict"] for part in told["parts"]] == ["allow", "deny"]
    assert (await agent.post(f"{PATH}/explain", json={"command": ["echo", "a"]})).json()["verdict"] == "allow"
    assert (await agent.post(f"{PATH}/explain", json={"command": "id", "cwd": "x"})).json()["verdict"] == "ask"
    refused(await agent.put(PATH, json={"settings": None}), 403, None)
    answer = await agent.post(f"{governed}/commands", json={"command": "curl x"})
    assert (answer.status_code, answer.json()["rule"]) == (403, "shell(curl:*)")


async def test_get_policy_of_the_known_version_has_no_body(http: httpx.AsyncClient) -> None:
    await http.put(PATH, json={"settings": POLICY})
    tag = (await http.get(PATH)).headers["etag"]
    same = await http.get(PATH, headers={"if-none-match": tag})
    assert (same.status_code, same.content) == (304, b"")
    await http.put(PATH, json={"settings": None})
    assert (await http.get(PATH, headers={"if-none-match": tag})).json()["settings"] is None
