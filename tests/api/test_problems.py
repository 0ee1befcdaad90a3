from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from carrel.server import Running

Sent = dict[str, Any]


def check(answer: httpx.Response, status: int, field: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert problem["field"] == field
    assert problem["code"] and problem["title"] and problem["detail"] and problem["hint"]
    assert "Traceback" not in answer.text and ".py" not in answer.text


SANDBOX_CASES: list[tuple[Sent, int, str]] = [
    ({"json": {"provider": "hypervisor"}}, 400, "provider"),
    ({"json": {"provider": 5}}, 400, "provider"),
    ({"json": {"limits": {"memory_mb": 1}}}, 400, "limits.memory_mb"),
    ({"json": {"limits": {"memory_mb": 10**9}}}, 400, "limits.memory_mb"),
    ({"json": {"limits": {"cpus": -1}}}, 400, "limits.cpus"),
    ({"json": {"limits": {"memory": 64}}}, 400, "limits.memory"),
    ({"json": {"limits": 3}}, 400, "limits"),
    ({"json": {"context_id": "../../etc"}}, 400, "context_id"),
    ({"json": {"context_id": ""}}, 400, "context_id"),
    ({"json": {"env": {"A B": "c"}}}, 400, "env.A B"),
    ({"json": {"env": {"A": "b\0"}}}, 400, "env.A"),
    ({"json": {"network": "everything"}}, 400, "network"),
    ({"json": {"network": "bridge"}}, 422, "provider"),
    ({"json": {"provider": "process", "trust": "low"}}, 422, "provider"),
    ({"json": {"trust": "low", "colour": "red"}}, 400, "colour"),
    ({"json": []}, 400, "body"),
    ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "body"),
    ({"content": b"\xff\xfe", "headers": {"content-type": "application/json"}}, 400, "body"),
    ({"content": b""}, 400, "body"),
    ({"json": {}, "headers": {"Idempotency-Key": "k" * 300}}, 400, "idempotency-key"),
    ({"json": {}, "params": {"wait": "1"}}, 400, "wait"),
    ({"content": b" " * 2_000_000}, 413, "body"),
]


async def test_bad_requests_for_a_sandbox_leave_nothing(http: httpx.AsyncClient, server: Running) -> None:
    for sent, status, field in SANDBOX_CASES:
        check(await http.post("/v1/sandboxes", **sent), status, field)
        assert (await http.get("/v1/sandboxes")).json()["items"] == []
        assert os.listdir(server.plane.layout.workspaces) == [".trash"]


CASES: list[tuple[str, str, Sent, int, str]] = [
    ("POST", "/commands", {"json": {}}, 400, "command"),
    ("POST", "/commands", {"json": {"command": ""}}, 400, "command"),
    ("POST", "/commands", {"json": {"command": "a\0b"}}, 400, "command"),
    ("POST", "/commands", {"json": {"command": "x", "timeout": 0}}, 400, "timeout"),
    ("POST", "/commands", {"json": {"command": "x", "time_out": 1}}, 400, "time_out"),
    ("POST", "/commands", {"json": {"command": "x", "interactive": True}}, 400, "interactive"),
    ("POST", "/commands", {"json": {"command": "x"}, "params": {"wait": "1"}}, 400, "wait"),
    ("POST", "/commands", {"content": b"{"}, 400, "body"),
    ("POST", "/commands", {"content": b"[]"}, 400, "body"),
    ("POST", "/commands/start", {"json": {"command": 1}}, 400, "command"),
    ("GET", "/commands/..%2f..%2fhealth", {}, 404, "path"),
    ("GET", "/commands/a%3fb", {}, 400, "command_id"),
    ("GET", "/commands/c1/output", {"params": {"offset": "-1"}}, 400, "offset"),
    ("POST", "/execute", {"json": {"code": "1", "language": "cobol"}}, 400, "language"),
    ("POST", "/execute", {"json": {"code": "1", "language": "python"}}, 422, "language"),
    ("POST", "/tools", {"json": {"tool_name": "fly"}}, 400, "tool_name"),
    ("GET", "/files/content", {}, 400, "path"),
    ("GET", "/files/content", {"params": {"path": "../../etc/passwd"}}, 400, "path"),
    ("GET", "/files/content", {"params": {"path": "/etc/passwd"}}, 400, "path"),
    ("GET", "/files/content", {"params": {"path": "a\0b"}}, 400, "path"),
    ("GET", "/files", {"params": {"recurisve": "1"}}, 400, "recurisve"),
    ("GET", "/files", {"params": {"limit": "0"}}, 400, "limit"),
    ("PUT", "/files/content", {"params": {"path": "x", "mode": "999"}}, 400, "mode"),
    ("PUT", "/files/content", {"params": {"path": "../x"}, "content": b"x"}, 400, "path"),
    ("POST", "/files/edit", {"json": {"path": "x", "old": "", "new": ""}}, 400, "old"),
    ("PATCH", "/files", {}, 405, "method"),
    ("GET", "/nothing", {}, 404, "path"),
]


async def test_bad_requests_to_a_sandbox(http: httpx.AsyncClient, box: str) -> None:
    for method, path, sent, status, field in CASES:
        check(await http.request(method, box + path, **sent), status, field)


async def test_hints_name_the_remedy(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/sandboxes", json={"limits": {"memroy_mb": 64}})
    assert "memory_mb" in answer.json()["hint"]


async def test_chunked_bodies_have_the_same_cap(http: httpx.AsyncClient, box: str) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    check(await http.post(f"{box}/commands", content=endless()), 413, "body")
    upload = await http.put(f"{box}/files/content", params={"path": "big"}, content=endless())
    assert upload.json()["size"] == 40 * 65536


async def test_unknown_sandbox(http: httpx.AsyncClient) -> None:
    check(await http.get("/v1/sandboxes/absent"), 404, "id")
    check(await http.post("/v1/sandboxes/absent/commands", json={"command": "x"}), 404, "id")
    check(await http.get("/v1/sandboxes", params={"cursor": "?"}), 400, "cursor")


async def test_what_nobody_expected(
    http: httpx.AsyncClient, server: Running, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("/root/secret.py is broken")

    monkeypatch.setattr(server.plane.operations, "run_command", broken)
    monkeypatch.setattr(server.plane.operations, "stat_file", broken)
    for answer in (
        await http.post(f"{box}/commands", json={"command": "x"}),
        await http.get(f"{box}/files/stat", params={"path": "x"}),
    ):
        assert answer.status_code == 500
        assert answer.json()["code"] == "platform_error"
        assert "secret" not in answer.text
