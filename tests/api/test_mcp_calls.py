"""A plain call is answered as the package answers it; what is no plain call is left to the package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp import MCPError, types
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import CLIENT_CAPABILITIES_META_KEY, CLIENT_INFO_META_KEY, PROTOCOL_VERSION_META_KEY
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from tests.support.mcp_hosted import GOOD

from carrel.api.mcp_calls import plain_call
from carrel.server import RunningServer

VERSION = MODERN_PROTOCOL_VERSIONS[-1]
Json = dict[str, Any]
INFO = {"name": "b", "version": "1"}


def message(name: str = "echo", **params: object) -> Json:
    meta = {PROTOCOL_VERSION_META_KEY: VERSION, CLIENT_CAPABILITIES_META_KEY: {}, CLIENT_INFO_META_KEY: INFO}
    given = {"name": name, "arguments": {"text": "hi"}, "_meta": meta, **params}
    return {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": given}


def headers(name: str = "echo", **more: str) -> dict[str, str]:
    return {
        "accept": "application/json, text/event-stream",
        "content-type": "application/json",
        "mcp-protocol-version": VERSION,
        "mcp-method": "tools/call",
        "mcp-name": name,
        **{key.replace("_", "-"): value for key, value in more.items()},
    }


def scope(headers: dict[str, str]) -> Json:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": raw}


async def by_the_package(
    answer: Callable[[], Awaitable[Any]], headers: dict[str, str], body: bytes
) -> tuple[int, dict[bytes, bytes], Json]:
    """What the official server says."""

    async def call_tool(_context: object, _params: types.CallToolRequestParams) -> Any:
        return await answer()

    manager = StreamableHTTPSessionManager(Server(**INFO, on_call_tool=call_tool), stateless=True)  # type: ignore[arg-type]
    sent: list[Json] = []
    inbox = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Json:
        if not inbox:
            await anyio.sleep_forever()
        return inbox.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    async with manager.run():
        await manager.handle_request(scope(headers), receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), json.loads(sent[1]["body"] or b"null")


RESULTS: list[Json] = [
    {"content": [{"type": "text", "text": "hi"}], "isError": False},
    {"content": [{"type": "text", "text": "é\ud83d"}], "isError": True, "structuredContent": {"a": [1, None]}},
    {"content": [{"type": "image", "data": "aGk=", "mimeType": "image/png", "odd": 1}], "isError": False},
    {"content": [], "isError": False},
]


@pytest.mark.parametrize("result", RESULTS)
async def test_a_result_as_the_package_has_it(result: Json) -> None:
    async def answer() -> Any:
        return types.CallToolResult.model_validate(result)

    body = json.dumps(message()).encode()
    plain = plain_call(scope(headers()), body)
    assert plain is not None and plain.params.arguments == {"text": "hi"}
    status, said = plain.answered(result, INFO)
    theirs = await by_the_package(answer, headers(), body)
    assert (status, json.loads(said)) == (theirs[0], theirs[2])


@pytest.mark.parametrize("code", [types.INTERNAL_ERROR, types.INVALID_PARAMS, types.METHOD_NOT_FOUND, -32000, 5])
async def test_an_error_as_the_package_has_it(code: int) -> None:
    error = MCPError(code=code, message="no", data={"why": "because"})

    async def answer() -> Any:
        raise error

    body = json.dumps(message()).encode()
    plain = plain_call(scope(headers()), body)
    assert plain is not None
    status, said = plain.refused(error)
    theirs = await by_the_package(answer, headers(), body)
    assert (status, json.loads(said)) == (theirs[0], theirs[2])


def test_an_answer_that_is_none_of_the_protocol() -> None:
    plain = plain_call(scope(headers()), json.dumps(message()).encode())
    assert plain is not None
    for odd in ({"content": "text"}, {"content": [{"type": "[redacted]", "text": "x"}]}, {"content": [{}]}):
        with pytest.raises(MCPError, match="does not follow the protocol"):
            plain.answered(odd, INFO)


meta = message()["params"]["_meta"]
LEFT: list[tuple[dict[str, str], object]] = [
    (headers(), {**message(), "method": "tools/list"}),
    (headers(mcp_method="tools/list"), message()),
    (headers(mcp_name="other"), message()),
    (headers(mcp_protocol_version="2025-11-25"), message()),
    (headers(accept="application/json"), message()),
    (headers(content_type="text/plain"), message()),
    (headers(), [message()]),
    (headers(), {**message(), "id": None}),
    (headers(), {key: value for key, value in message().items() if key != "id"}),
    (headers(), {**message(), "jsonrpc": "1.0"}),
    (headers(), message(_meta={})),
    (headers(), message(_meta={**meta, "progressToken": 1})),
    (headers(), message(arguments=[])),
    (headers(), {**message(), "params": None}),
]


@pytest.mark.parametrize(("given", "body"), LEFT)
def test_what_is_left_to_the_package(given: dict[str, str], body: object) -> None:
    assert plain_call(scope(given), json.dumps(body).encode()) is None


def test_two_headers_that_disagree() -> None:
    twice = scope(headers())
    twice["headers"].append((b"mcp-name", b"echo"))
    assert plain_call(twice, json.dumps(message()).encode()) is None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(values, st.sampled_from(["jsonrpc", "id", "method", "params"]), st.sampled_from(["name", "arguments", "_meta"]))
def test_nothing_makes_it_fail(value: object, outer: str, inner: str) -> None:
    for body in ({**message(), outer: value}, message(**{inner: value}), value):
        found = plain_call(scope(headers()), json.dumps(body).encode())
        assert found is None or found.params.name == "echo"


@given(st.binary(max_size=60))
def test_nor_any_bytes(body: bytes) -> None:
    assert plain_call(scope(headers()), body) is None


async def test_a_call_that_takes_longer_is_served_on_and_broken_off_with_its_client(
    server: RunningServer, http: httpx.AsyncClient, box: str
) -> None:
    await http.put(f"{box}/files/content?path=good.py", content=GOOD.encode())
    added = await http.put(f"{box}/mcp-servers/good", json={"command": ["python3", "good.py"]})
    place = added.json()["url"]
    known = {"authorization": f"Bearer {server.token}"}
    async with httpx.AsyncClient(base_url=server.url, headers=known, timeout=60) as client:
        asking = asyncio.ensure_future(client.post(place, json=message("hang"), headers=headers("hang")))
        while (await http.get(f"{box}/mcp-servers/good")).json()["state"] != "running":
            await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    while True:
        found = (await http.get("/v1/audit?kind=mcp")).json()["items"]
        if found and found[0].get("result") == "cancelled":
            break
        await asyncio.sleep(0.02)
    assert len(found) == 1
