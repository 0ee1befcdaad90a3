from __future__ import annotations

from datetime import UTC, datetime, timedelta

import httpx
from tests.support.governed import Known
from tests.support.refusals import refused

from carrel.server import RunningServer


async def test_made_listed_revoked(http: httpx.AsyncClient, server: RunningServer) -> None:
    end = datetime.now(UTC) + timedelta(days=30)
    wanted = {"name": "coder", "kind": "agent", "scopes": ["operate"], "namespace": "team"}
    answer = await http.post("/v1/tokens", json={**wanted, "expires_at": end.isoformat()})
    assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
    made = answer.json()
    assert made["token"].startswith("carrel_") and made["created_by"] == "administrator"
    assert datetime.fromisoformat(made["expires_at"]) == end and "hash" not in made
    shown = (await http.get(f"/v1/tokens/{made['id']}")).json()
    assert shown == {key: value for key, value in made.items() if key != "token"}
    assert [each for each in (await http.get("/v1/tokens")).json()["items"] if each["name"] != "local"] == [shown]
    own = {"authorization": f"Bearer {made['token']}"}
    async with httpx.AsyncClient(base_url=server.url, headers=own) as agent:
        assert (await agent.get("/v1/sandboxes")).status_code == 200
        refused(await agent.get("/v1/tokens"), 403, None)
        for _ in range(2):
            assert (await http.delete(f"/v1/tokens/{made['id']}")).json()["revoked_at"]
        assert "revoked" in refused(await agent.get("/v1/sandboxes"), 401, "Authorization")["detail"]
    assert (await http.get(f"/v1/tokens/{made['id']}")).json()["used_at"]
    done = (await http.get("/v1/audit", params={"name": "create_token"})).json()["items"]
    assert [(each["actor"], each["arguments"]["name"], each["chain"][:7]) for each in done[:1]] == [
        ("administrator", "coder", "server:")
    ]
    assert [each["arguments"]["name"] for each in done[1:]] == ["local"]
    assert made["token"] not in (await http.get("/v1/audit/export")).text


async def test_what_cannot_be_a_token(http: httpx.AsyncClient) -> None:
    good = {"name": "coder", "kind": "agent", "scopes": ["operate"]}
    for change, field in (
        ({"name": "a b"}, "name"),
        ({"kind": "robot"}, "kind"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["approve"]}, "scopes"),
        ({"scopes": ["fly"]}, "scopes.0"),
        ({"namespace": "a:b"}, "namespace"),
        ({"contexts": []}, "contexts"),
        ({"expires_at": "2001-01-01T00:00:00"}, "expires_at"),
    ):
        answer = await http.post("/v1/tokens", json={**good, **change})
        assert answer.status_code == 400 and answer.json()["field"] == field, answer.text
    names = [each["name"] for each in (await http.get("/v1/tokens")).json()["items"]]
    assert names == ["local"], "the one that the server left for programs on its machine"


async def test_an_administrator_of_a_namespace_sees_only_that(http: httpx.AsyncClient, known: Known) -> None:
    everything = await known("all", "service", "operate")
    chief = await known("chief", "person", "administer", namespace="team")
    wanted = {"name": "coder", "kind": "agent", "scopes": ["operate"]}
    refused(await chief.post("/v1/tokens", json=wanted), 400, "namespace")
    made = await chief.post("/v1/tokens", json={**wanted, "namespace": "team", "contexts": ["team:a"]})
    assert made.status_code == 201 and made.json()["created_by"] == "person:chief"
    names = {each["name"] for each in (await chief.get("/v1/tokens")).json()["items"]}
    assert names == {"chief", "coder"}
    [other] = [each["id"] for each in (await http.get("/v1/tokens")).json()["items"] if each["name"] == "all"]
    refused(await chief.get(f"/v1/tokens/{other}"), 404, "id")
    refused(await chief.delete(f"/v1/tokens/{other}"), 404, "id")
    assert (await everything.get("/v1/sandboxes")).status_code == 200
    assert (await chief.delete(f"/v1/tokens/{made.json()['id']}")).status_code == 200


async def test_every_token_may_ask_whom_it_stands_for(http: httpx.AsyncClient, known: Known) -> None:
    root = (await http.get("/v1/tokens/me")).json()
    assert (root["subject"], root["scopes"], root.get("token_id")) == ("administrator", ["administer"], None)
    narrow = await known("narrow", "agent", "read", namespace="team", contexts=["team:b", "team:a"])
    shown = (await narrow.get("/v1/tokens/me")).json()
    assert (shown["subject"], shown["kind"], shown["scopes"]) == ("agent:narrow", "agent", ["read"])
    assert (shown["namespace"], shown["contexts"]) == ("team", ["team:a", "team:b"])
    assert shown["token_id"].startswith("tok-") and "hash" not in shown
    person = await known("ann", "person", "approve")
    assert (await person.get("/v1/tokens/me")).json()["subject"] == "person:ann"
    refused(await http.get("/v1/tokens/me", headers={"authorization": "Bearer carrel_nobody"}), 401, "Authorization")
