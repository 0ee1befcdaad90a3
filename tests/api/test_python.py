from __future__ import annotations

import json

import httpx
import pytest
from tests.support.refusals import refused


async def test_run_start_stream(http: httpx.AsyncClient, box: str) -> None:
    answer = await http.post(f"{box}/python", json={"code": "print(1); open('f', 'w')"})
    assert (answer.json()["stdout"], answer.json()["files_produced"]) == ("1\n", ["f"])
    started = await http.post(f"{box}/python/start", json={"code": "print(2)"})
    assert started.status_code == 201
    result = await http.get(f"{box}/commands/{started.json()['id']}/result")
    assert result.json()["stdout"] == "2\n"
    streamed = await http.post(f"{box}/python/stream", json={"code": "print(3)"})
    events = [json.loads(line) for line in streamed.text.splitlines()]
    assert events[0]["text"] == "3\n" and events[-1]["result"]["exit_code"] == 0
    assert streamed.headers["carrel-command-id"]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "code"),
        ({"code": "1", "timeout": 121}, 400, "timeout"),
        ({"code": "1", "wrong": 1}, 400, "wrong"),
        ({"code": "1", "env": "none"}, 404, "env"),
        ({"code": "1", "cwd": "../x"}, 400, "cwd"),
    ],
)
async def test_refusals(http: httpx.AsyncClient, box: str, body: dict[str, object], status: int, field: str) -> None:
    for path in ("python", "python/start"):
        refused(await http.post(f"{box}/{path}", json=body), status, field)
    assert (await http.post(f"{box}/python?wrong=1", json={"code": "1"})).status_code == 400


async def test_python_exec(http: httpx.AsyncClient, box: str) -> None:
    answer = await http.post(f"{box}/tools", json={"tool_name": "python_exec", "params": {"code": "print(4)"}})
    assert answer.json()["result"]["stdout"] == "4\n"
