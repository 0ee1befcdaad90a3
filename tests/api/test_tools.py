from __future__ import annotations

import httpx
from tests.support.refusals import refused


async def test_create_file(http: httpx.AsyncClient, box: str) -> None:
    body = {"tool_name": "create_file", "params": {"path": "d/t", "content": "é", "mode": "600"}}
    answer = await http.post(f"{box}/tools", json=body)
    assert answer.json()["result"]["size"] == 2
    assert (await http.get(f"{box}/files/content", params={"path": "d/t"})).text == "é"


async def test_bad_calls(http: httpx.AsyncClient, box: str) -> None:
    for body, field in (
        ({}, "tool_name"),
        ({"tool_name": "fly"}, "tool_name"),
        ({"tool_name": "create_file", "params": []}, "params"),
        ({"tool_name": "create_file"}, "params.path"),
        ({"tool_name": "create_file", "params": {"path": "../x", "content": ""}}, "path"),
        ({"tool_name": "create_file", "params": {"path": "x"}}, "params.content"),
        ({"tool_name": "create_file", "params": {"path": "x", "content_base64": "!"}}, "params.content_base64"),
    ):
        refused(await http.post(f"{box}/tools", json=body), 400, field)
