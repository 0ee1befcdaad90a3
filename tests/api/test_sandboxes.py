from __future__ import annotations

import json
import os
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.governed import Known
from tests.support.refusals import refused

from carrel.server import RunningServer

Sent = dict[str, Any]
JSON = {"content-type": "application/json"}


async def test_a_life(http: httpx.AsyncClient) -> None:
    made = await http.post("/v1/sandboxes", json={"context_id": "a:b"}, headers={"idempotency-key": "k"})
    assert made.status_code == 201
    again = await http.post("/v1/sandboxes", json={"context_id": "a:b"})
    assert again.status_code == 200 and again.json()["id"] == made.json()["id"]
    for name in (made.json()["id"], "a:b"):
        assert (await http.get(f"/v1/sandboxes/{name}")).json()["state"] == "running"
    assert (await http.get("/v1/sandboxes/a:b/health")).json()["status"] == "ok"
    ended = await http.post("/v1/sandboxes/a:b/terminate", json={"reason": "done"})
    assert ended.json()["state"] == "terminated"
    assert (await http.get("/v1/sandboxes", params={"state": "terminated"})).json()["items"]
    deleted = await http.post("/v1/sandboxes/a:b/terminate", json={"delete_files": True})
    assert deleted.status_code == 404, "an ended context has no session any more"
    named = f"/v1/sandboxes/{made.json()['id']}/terminate"
    assert (await http.post(named, json={"delete_files": True})).status_code == 200


BAD: list[tuple[Sent, int, str]] = [
    ({"json": {"provider": "hypervisor"}}, 400, "provider"),
    ({"json": {"provider": 5}}, 400, "provider"),
    ({"json": {"limits": {"memory_mb": 1}}}, 400, "limits.memory_mb"),
    ({"json": {"limits": {"memory_mb": 10**9}}}, 400, "limits.memory_mb"),
    ({"json": {"limits": {"cpus": -1}}}, 400, "limits.cpus"),
    ({"content": b'{"limits": {"cpus": NaN}}', "headers": JSON}, 400, "limits.cpus"),
    ({"json": {"limits": {"memory": 64}}}, 400, "limits.memory"),
    ({"json": {"limits": 3}}, 400, "limits"),
    ({"json": {"context_id": "../../etc"}}, 400, "context_id"),
    ({"json": {"context_id": ""}}, 400, "context_id"),
    ({"json": {"context_id": "a\n"}}, 400, "context_id"),
    ({"json": {"env": {"A B": "c"}}}, 400, "env.A B"),
    ({"json": {"env": {"A": "b\0"}}}, 400, "env.A"),
    ({"json": {"network": "everything"}}, 400, "network"),
    ({"json": {"network": "host"}}, 400, "network"),
    ({"json": {"provider": "process", "trust": "low"}}, 422, "provider"),
    ({"json": {"trust": "low", "colour": "red"}}, 400, "colour"),
    ({"json": []}, 400, "body"),
    ({"content": b"{", "headers": JSON}, 400, "body"),
    ({"content": b"\xff\xfe", "headers": JSON}, 400, "body"),
    ({"content": b"[" * 100_000, "headers": JSON}, 400, "body"),
    ({"content": b'{"limits": {"cpus": ' + b"9" * 5000 + b"}}", "headers": JSON}, 400, "body"),
    ({"content": b""}, 400, "body"),
    ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 400, "body"),
    ({"json": {}, "headers": {"Idempotency-Key": "k" * 300}}, 400, "idempotency-key"),
    ({"json": {}, "params": {"wait": "1"}}, 400, "wait"),
    ({"content": b" " * 2_000_000}, 413, "body"),
]


async def test_bad_requests_leave_nothing(http: httpx.AsyncClient, server: RunningServer) -> None:
    for sent, status, field in BAD:
        refused(await http.post("/v1/sandboxes", **sent), status, field)
        assert (await http.get("/v1/sandboxes")).json()["items"] == []
        assert os.listdir(server.plane.driver.directory) == []
    answer = await http.post("/v1/sandboxes", json={"limits": {"memroy_mb": 64}})
    assert "memory_mb" in answer.json()["hint"]


async def test_pages(http: httpx.AsyncClient) -> None:
    for number in range(3):
        await http.post("/v1/sandboxes", json={"context_id": f"c{number}", "labels": {"n": str(number)}})
    first = (await http.get("/v1/sandboxes", params={"limit": 2})).json()
    second = (await http.get("/v1/sandboxes", params={"limit": 2, "cursor": first["next"]})).json()
    assert [each["context_id"] for each in first["items"] + second["items"]] == ["c2", "c1", "c0"]
    assert second["next"] is None
    found = (await http.get("/v1/sandboxes", params={"context_id": "c1", "state": "running"})).json()["items"]
    assert [each["labels"] for each in found] == [{"n": "1"}]
    bad = {"cursor": "?", "limit": "0", "state": "asleep", "context_id": "x" * 200}
    for field, value in bad.items():
        refused(await http.get("/v1/sandboxes", params={field: value}), 400, field)


async def test_conflicts(http: httpx.AsyncClient, box: str) -> None:
    refused(await http.post("/v1/sandboxes", json={"context_id": "box", "env": {"A": "b"}}), 409, "env", "conflict")
    await http.post("/v1/sandboxes", json={"context_id": "one"}, headers={"idempotency-key": "k"})
    other = await http.post("/v1/sandboxes", json={"context_id": "two"}, headers={"idempotency-key": "k"})
    refused(other, 409, "Idempotency-Key", "conflict")
    refused(await http.post(f"{box}/terminate", json={"reason": "r" * 2000}), 400, "reason")
    refused(await http.post(f"{box}/terminate", json={"delete_files": "perhaps"}), 400, "delete_files")
    assert (await http.get(box)).json()["state"] == "running"


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "context_id": st.just("c") | junk,
        "provider": st.sampled_from(["auto", "namespace", "process", "docker"]) | junk,
        "trust": st.sampled_from(["high", "medium", "low"]) | junk,
        "network": st.sampled_from(["none", "allowlist", "bridge", "host"]) | junk,
        "limits": st.dictionaries(
            st.sampled_from(["cpus", "memory_mb", "disk_mb", "processes", "timeout_s"]),
            st.integers(1, 64) | st.floats() | junk,
            max_size=3,
        )
        | junk,
        "env": st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2) | junk,
        "labels": st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2) | junk,
    },
)


async def test_no_body_makes_the_server_fail(http: httpx.AsyncClient) -> None:
    started: set[int] = set()

    @settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(bodies | junk)
    def collect(body: object) -> None:
        tried.append(body)

    tried: list[object] = []
    collect()
    for body in tried:
        answer = await http.post("/v1/sandboxes", content=json.dumps(body), headers=JSON)
        assert answer.status_code < 500 or answer.json()["code"] == "provider_unavailable", (body, answer.text)
        started.add(answer.status_code)
        if answer.is_success:
            assert (await http.post(f"/v1/sandboxes/{answer.json()['id']}/terminate")).status_code == 200
        else:
            assert answer.json()["detail"] and answer.json()["hint"], answer.text
    assert {201, 400} <= started, "random bodies should be of both kinds"


@pytest.mark.parametrize("text", ["\ud800", "a\udcffb"])
async def test_half_characters_are_refused(http: httpx.AsyncClient, text: str) -> None:
    for field, value in (("context_id", text), ("provider", text), ("labels", {"a": text}), ("env", {"A": text})):
        answer = await http.post("/v1/sandboxes", content=json.dumps({field: value}), headers=JSON)
        assert answer.status_code == 400, answer.text
        assert answer.json()["field"].partition(".")[0] == field


async def test_stop_keeps_the_files(http: httpx.AsyncClient) -> None:
    made = (await http.post("/v1/sandboxes", json={"context_id": "stoppable"})).json()
    at = f"/v1/sandboxes/{made['id']}"
    assert (await http.put(f"{at}/files/content", params={"path": "kept"}, content=b"x")).is_success
    for _ in range(2):
        assert (await http.post(f"{at}/stop")).json()["state"] == "stopped"
    assert (await http.post(f"{at}/commands", json={"command": "true"})).json()["code"] == "not_running"
    assert (await http.post("/v1/sandboxes", json={"context_id": "stoppable"})).status_code == 201
    assert (await http.get(f"{at}/files/content", params={"path": "kept"})).content == b"x"
    assert (await http.post("/v1/sandboxes/absent/stop")).json()["code"] == "not_found"


async def test_usage(http: httpx.AsyncClient, box: str) -> None:
    await http.put(f"{box}/files/content", params={"path": "f"}, content=b"x" * 300_000)
    usage = (await http.get(f"{box}/usage")).json()
    assert usage["context_id"] == "box" and usage["bytes"] >= 300_000
    assert usage["limit_bytes"] == 1024**3 and usage["enforced_by"] in {"kernel", "watch"}
    refused(await http.get("/v1/sandboxes/absent/usage"), 404, "id", "not_found")


async def test_a_key_is_its_callers_own(http: httpx.AsyncClient, known: Known) -> None:
    one = await known("one", "service", "operate", namespace="one")
    two = await known("two", "service", "operate", namespace="two")
    free = await known("free", "service", "operate")
    key = {"idempotency-key": "k"}
    made = {}
    for client, context in ((one, "one:a"), (two, "two:a"), (http, None), (free, None)):
        answer = await client.post("/v1/sandboxes", json={"context_id": context}, headers=key)
        assert answer.status_code == 201, answer.text
        made[client] = answer.json()["id"]
    assert len(set(made.values())) == 4, "none is the answer of another"
    again = await free.post("/v1/sandboxes", json={}, headers=key)
    assert again.status_code == 200 and again.json()["id"] == made[free]
    refused(await one.post("/v1/sandboxes", json={"context_id": "one:b"}, headers=key), 409, "Idempotency-Key")
