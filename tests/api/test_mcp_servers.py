from __future__ import annotations

import httpx
import pytest
from tests.support.governed import Known
from tests.support.mcp_hosted import GOOD
from tests.support.refusals import refused

from carrel.server import RunningServer

SERVER = {"command": ["python3", "good.py"]}


@pytest.fixture
async def hosted(http: httpx.AsyncClient, box: str) -> str:
    written = await http.put(f"{box}/files/content?path=good.py", content=GOOD.encode())
    assert written.status_code < 300, written.text
    added = await http.put(f"{box}/mcp-servers/good", json=SERVER)
    assert added.status_code == 200, added.text
    return f"{box}/mcp-servers"


async def test_a_server_over_http(http: httpx.AsyncClient, hosted: str) -> None:
    info = (await http.get(f"{hosted}/good")).json()
    assert (info["tools"], info["state"], info["url"]) == (9, "stopped", "/v1/sandboxes/box/mcp-servers/good/mcp")
    body = {"tool": "echo", "arguments": {"text": "hi"}}
    told = (await http.post(f"{hosted}/good/request", json=body)).json()
    assert told["content"] == [{"type": "text", "text": "hi"}] and told["duration_ms"] > 0
    assert [each["state"] for each in (await http.get(hosted)).json()["items"]] == ["running"]
    assert "listening" in (await http.get(f"{hosted}/good/log")).json()["text"]
    assert (await http.post(f"{hosted}/good/stop")).json()["enabled"] is False
    refused(await http.post(f"{hosted}/good/request", json=body), 409, "server")
    assert (await http.post(f"{hosted}/good/start")).json()["state"] == "running"
    catalogue = (await http.get(f"{hosted}/good/catalogue")).json()
    assert catalogue["current"] and catalogue["tools"][0]["qualified"] == "good:echo"
    assert (await http.post(f"{hosted}/good/refresh")).json()["error"] is None
    assert (await http.delete(f"{hosted}/good")).status_code == 204
    refused(await http.get(f"{hosted}/good"), 404, "server")


async def test_a_server_that_dies(http: httpx.AsyncClient, hosted: str) -> None:
    refused(await http.post(f"{hosted}/good/request", json={"tool": "die"}), 502, "server", "mcp_server_failed")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "command"),
        ({"command": []}, "command"),
        ({"command": "python3 x"}, "command"),
        ({"command": [""]}, "body"),
        ({"command": ["x"], "variables": {"A=B": "c"}}, "variables.A=B"),
        ({"command": ["x"], "variables": {"A": "1"}, "secret_variables": {"A": "B"}}, "body"),
        ({"command": ["x"], "secret_variables": {"A": "../x"}}, "secret_variables.A"),
        ({"command": ["x"], "npm": ["--global"]}, "npm.0"),
        ({"command": ["x"], "npm": ["a b"]}, "npm.0"),
        ({"command": ["x"], "python": "3.11"}, "body"),
        ({"command": ["x"], "comand": 1}, "comand"),
    ],
)
async def test_what_cannot_be_a_server(http: httpx.AsyncClient, box: str, body: object, field: str) -> None:
    refused(await http.put(f"{box}/mcp-servers/x", json=body), 400, field)


async def test_what_cannot_be_a_call(http: httpx.AsyncClient, hosted: str) -> None:
    for body, field in (
        ({}, "tool"),
        ({"tool": "a b"}, "tool"),
        ({"tool": "resources/read"}, "tool"),
        ({"tool": "echo", "arguments": []}, "arguments"),
        ({"tool": "echo", "timeout": 0}, "timeout"),
    ):
        refused(await http.post(f"{hosted}/good/request", json=body), 400, field)
    refused(await http.put(f"{hosted}/no%20name", json=SERVER), 400, "server")
    refused(await http.get(f"{hosted}/good/log?offset=-1"), 400, "offset")
    refused(await http.get(f"{hosted}/good/log?lmit=1"), 400, "lmit")


async def test_who_may(http: httpx.AsyncClient, hosted: str, known: Known, server: RunningServer) -> None:
    reader = await known("r", "agent", "read")
    assert (await reader.get(f"{hosted}/good/catalogue")).status_code == 200
    for act in (
        reader.post(f"{hosted}/good/request", json={"tool": "echo"}),
        reader.put(f"{hosted}/x", json=SERVER),
        reader.delete(f"{hosted}/good"),
        reader.post(f"{hosted}/good/mcp", json={}),
    ):
        refused(await act, 403, None)
    stranger = await known("s", "agent", "operate", contexts=["other"])
    refused(await stranger.post(f"{hosted}/good/request", json={"tool": "echo"}), 403, None)
    async with httpx.AsyncClient(base_url=server.url) as nobody:
        assert (await nobody.post(f"{hosted}/good/mcp", json={})).status_code == 401
