"""E2B's wire without its SDKs: who may come in, what is decided, and what hostile or unserved requests get."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from tests.support.governed import POLICY, Known

from carrel.api.e2b.access import Signed, api_key
from carrel.api.e2b.answers import Failure, envelope, envelopes
from carrel.api.e2b.filesystem import inside
from carrel.server import RunningServer

PROCESS = "/process.Process"
SdkOf = Callable[[str, str, str], Awaitable["Sdk"]]


class Sdk:
    """Requests as an SDK makes them."""

    def __init__(self, url: str, key: str):
        self.http = httpx.AsyncClient(base_url=url, headers={"x-api-key": key}, timeout=60)

    async def __aenter__(self) -> Sdk:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.http.aclose()

    async def create(self, **body: object) -> dict[str, Any]:
        answer = await self.http.post("/v2/sandboxes", json={"templateID": "base", **body})
        assert answer.status_code == 201, answer.text
        return answer.json()

    async def start(self, box: dict[str, Any], command: str) -> list[dict[str, Any]]:
        """Start a command and return the messages of its stream, the last of which is its end."""
        body = envelope({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command]}})
        answer = await self.http.post(f"{PROCESS}/Start", content=body, headers=within(box))
        assert answer.status_code == 200, answer.text
        return messages(answer.content)


def within(box: dict[str, Any], **more: str) -> dict[str, str]:
    headers = {
        "e2b-sandbox-id": box["sandboxID"],
        "e2b-sandbox-port": "49983",
        "content-type": "application/connect+json",
    }
    return {**headers, "x-access-token": box["envdAccessToken"], **more}


def messages(data: bytes) -> list[dict[str, Any]]:
    found = []
    while data:
        _, size = struct.unpack(">BI", data[:5])
        found.append(json.loads(data[5 : 5 + size]))
        data = data[5 + size :]
    return found


@pytest.fixture
async def sdk(server: RunningServer) -> AsyncIterator[Sdk]:
    async with Sdk(server.url, server.token or "") as client:
        yield client


@pytest.fixture
async def sdk_of(server: RunningServer, known: Known) -> AsyncIterator[SdkOf]:
    """Makes a token and gives an SDK that uses it; `{}` in the form stands for the token, or its hexadecimal digits."""
    async with AsyncExitStack() as stack:

        async def make(name: str, kind: str, form: str) -> Sdk:
            token = (await known(name, kind, "operate")).headers["authorization"].removeprefix("Bearer ")
            key = form.format(token, token.encode().hex())
            return await stack.enter_async_context(Sdk(server.url, key))

        yield make


async def test_denial_is_readable_and_approval_waits(http: httpx.AsyncClient, known: Known, sdk_of: SdkOf) -> None:
    """Commands of an agent behind E2B's SDK pass policy as all others."""
    ann = await known("ann", "person", "approve")
    theirs = await sdk_of("coder", "agent", "{}")
    box = await theirs.create()
    path = f"/v1/contexts/{box['sandboxID']}/policy"
    policy = {"permissions": {**POLICY["permissions"], "allow": ["shell(echo:*)"]}}  # type: ignore[dict-item]
    assert (await http.put(path, json={"settings": policy})).status_code == 200

    [end] = await theirs.start(box, "curl http://example.org")
    assert end["error"]["code"] == "permission_denied" and "shell(curl:*)" in end["error"]["message"]

    waiting = asyncio.create_task(theirs.start(box, "touch asked && echo done"))
    while not (found := (await ann.get("/v1/approvals", params={"state": "pending"})).json()["items"]):
        await asyncio.sleep(0.02)
        assert not waiting.done(), waiting.result()
    await ann.post(f"/v1/approvals/{found[0]['id']}/decide", json={"approve": True})
    events = await waiting
    assert events[0]["event"]["start"]["pid"] and events[-2]["event"]["end"] == {
        "exitCode": 0,
        "exited": True,
        "status": "exit status 0",
    }
    records = (await http.get("/v1/audit", params={"context_id": box["sandboxID"]})).json()["items"]
    assert {"start_command"} <= {each["name"] for each in records}


async def test_access_token_is_for_one_sandbox_and_ends_with_its_token(
    sdk: Sdk, http: httpx.AsyncClient, sdk_of: SdkOf
) -> None:
    theirs = await sdk_of("worker", "service", "e2b_{1}")  # the form that older SDKs accept
    one, two = await theirs.create(), await theirs.create()
    unary = {"content-type": "application/json"}

    async def listed(**changes: str) -> httpx.Response:
        return await sdk.http.post(f"{PROCESS}/List", json={}, headers=within(one, **unary, **changes))

    assert (await listed()).json() == {"processes": []}
    for wrong in (two["envdAccessToken"], "", "root.00", one["envdAccessToken"].replace(".", ".0", 1)):
        answer = await listed(**{"x-access-token": wrong})
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
    names = (await http.get("/v1/tokens")).json()["items"]
    await http.delete(f"/v1/tokens/{next(each['id'] for each in names if each['name'] == 'worker')}")
    assert (await listed()).status_code == 401
    assert (await theirs.http.get("/v2/sandboxes")).status_code == 401


async def test_ends_at_its_time_as_its_client_chose(sdk: Sdk, http: httpx.AsyncClient) -> None:
    killed = await sdk.create(timeout=1, autoPause=False)
    paused = await sdk.create(timeout=1, autoPause=True)
    kept = await sdk.create(timeout=1)

    async def state(box: dict[str, Any]) -> str | None:
        answer = await sdk.http.get(f"/sandboxes/{box['sandboxID']}")
        return None if answer.status_code == 404 else answer.json()["state"]

    while (await state(killed), await state(paused)) != (None, "paused"):
        await asyncio.sleep(0.05)
    assert await state(kept) == "running"
    # Traffic starts a paused one again, unless its client paused it.
    assert (await sdk.start(paused, "true"))[-2]["event"]["end"]["exitCode"] == 0
    assert (await sdk.http.post(f"/sandboxes/{kept['sandboxID']}/pause", json={})).status_code == 204
    assert (await sdk.http.post(f"/sandboxes/{kept['sandboxID']}/pause", json={})).status_code == 409
    assert "was not found" in (await sdk.start(kept, "true"))[-1]["error"]["message"]


async def test_older_calls_and_pages_of_a_list(sdk: Sdk) -> None:
    """Older SDKs and E2B's CLI use the first version of some calls."""
    made = (await sdk.http.post("/sandboxes", json={"templateID": "base", "secure": True})).json()
    sandbox = made["sandboxID"]
    assert (await sdk.http.post(f"/sandboxes/{sandbox}/refreshes", json={"duration": 60})).status_code == 204
    assert (await sdk.http.post(f"/sandboxes/{sandbox}/connect", json={"timeout": 60})).status_code == 200
    assert (await sdk.http.get("/templates")).json()[0]["templateID"] == "base"
    await sdk.create()
    first = await sdk.http.get("/v2/sandboxes", params={"limit": 1, "state": "running,paused"})
    second = await sdk.http.get("/v2/sandboxes", params={"limit": 1, "nextToken": first.headers["x-next-token"]})
    assert sorted(each["sandboxID"] for each in [*first.json(), *second.json()]) == sorted(
        each["sandboxID"] for each in (await sdk.http.get("/sandboxes")).json()
    )
    key = {"idempotency-key": "a-key"}
    twice = [(await sdk.http.post("/v2/sandboxes", json={"templateID": "base"}, headers=key)).json() for _ in "ab"]
    assert twice[0]["sandboxID"] == twice[1]["sandboxID"]


async def test_refusals_say_what_and_never_hang(sdk: Sdk) -> None:
    box = await sdk.create()
    for method, path, status, words in (
        ("POST", "/v3/templates", 501, "carrel image build"),
        ("GET", "/volumes", 501, "workspace"),
        ("GET", "/teams", 501, "no teams"),
        ("GET", "/sandboxes/none/more/here", 404, "no call"),
        ("GET", "/sandboxes/none", 404, "doesn't exist"),
        ("GET", f"/sandboxes/{box['sandboxID']}/logs", 501, "/v1/events"),
    ):
        answer = await sdk.http.request(method, path)
        assert (answer.status_code, answer.json()["code"]) == (status, status), answer.text
        assert words in answer.json()["message"]
    missing = await sdk.http.get("/health", headers=within(box) | {"e2b-sandbox-id": "i" * 21})
    assert missing.status_code == 401  # nobody learns which sandboxes exist
    other = await sdk.http.post("/elsewhere", json={}, headers=within(box))
    assert other.status_code == 501
    port = await sdk.http.get("/", headers=within(box, **{"e2b-sandbox-port": "3000"}))
    assert port.status_code == 400 and "port 3000" in port.json()["message"]
    foreign = await sdk.http.get("/v2/sandboxes", headers={"host": "attacker.example"})
    assert foreign.status_code == 400

    async def starting(body: bytes) -> dict[str, Any]:
        answer = await sdk.http.post(f"{PROCESS}/Start", content=body, headers=within(box))
        return messages(answer.content)[-1]["error"]

    assert (await starting(b"\xff" * 40))["code"] == "resource_exhausted"  # a message of 4 GB is announced
    assert (await starting(envelope({}, flags=1)))["code"] == "unimplemented"
    assert (await starting(envelope({"process": {"cmd": 5}})))["code"] == "invalid_argument"
    assert (await starting(b""))["code"] == "invalid_argument"


async def test_upload_that_breaks_off_writes_nothing(sdk: Sdk) -> None:
    box = await sdk.create()
    plain = {"content-type": "application/octet-stream"}
    for body, headers in (
        (b"\x1f\x8b\x08\x00broken", plain | {"content-encoding": "gzip"}),
        (
            b'--B\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nhalf',
            {"content-type": "multipart/form-data; boundary=B"},
        ),
    ):
        answer = await sdk.http.post("/files", params={"path": "f"}, content=body, headers=within(box) | headers)
        assert answer.status_code == 400, answer.text
    assert (await sdk.http.get("/files", params={"path": "f"}, headers=within(box))).status_code == 404
    outside = await sdk.http.post("/files", params={"path": "/etc/x"}, content=b"x", headers=within(box) | plain)
    assert outside.status_code == 400 and "/home/user" in outside.json()["message"]


# parts


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_hostile_streams_are_messages_or_refused(chunks: list[bytes]) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": chunks.pop(0) if chunks else b"", "more_body": bool(chunks)}

    async def read() -> list[Any]:
        return [each async for each in envelopes(Request({"type": "http"}, receive))]

    try:
        assert all(isinstance(each, dict) for each in asyncio.run(read()))
    except Failure as refused:
        assert refused.status in {400, 413, 501}


@given(st.text(min_size=1, max_size=30))
def test_paths_stay_relative_to_the_workspace(path: str) -> None:
    for name in (path, f"/home/user/{path}", f"/workspace/{path}", f"~/{path}"):
        try:
            found = inside(name)
        except Failure:
            continue
        assert found and not found.startswith("/")


def test_keys_and_signatures() -> None:
    assert api_key("e2b_" + b"carrel_x".hex()) == "carrel_x"
    assert [api_key(each) for each in ("carrel_x", "e2b_zz", "e2b_00")] == ["carrel_x", "e2b_zz", "e2b_00"]
    digest = base64.b64encode(hashlib.sha256(b"a/b:read::token:99").digest()).decode().rstrip("=")
    signed = Signed("a/b", "read", "", f"v1_{digest}", "99")
    assert signed.made_with("token") and not signed.made_with("other") and signed.expired
    assert not Signed("a/b", "write", "", f"v1_{digest}", "99").made_with("token")
