from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.api.gate import _seconds
from carrel.config import Settings
from carrel.errors import InvalidRequest
from carrel.server import RunningServer, running


async def test_without_the_token(server: RunningServer) -> None:
    for shown in (None, "Bearer wrong", "Basic x", "Bearer", f"Basic {server.token}"):
        await refused(server, {} if shown is None else {"authorization": shown})


async def refused(server: RunningServer, headers: dict[str, str]) -> None:
    async with httpx.AsyncClient(base_url=server.url, headers=headers) as client:
        for path in ("/v1/sandboxes", "/v1/host", "/nothing", f"/v1/sandboxes?token={server.token}"):
            answer = await client.get(path)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["field"] == "Authorization"
            assert answer.json()["code"] == "unauthorized"


async def test_open_pages(server: RunningServer) -> None:
    async with httpx.AsyncClient(base_url=server.url) as client:
        for path in ("/healthz", "/readyz", "/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 200


async def test_other_hosts_and_origins_are_refused(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/sandboxes", headers={"host": "evil.example:7070"})
    assert (answer.status_code, answer.json()["field"]) == (400, "Host")
    answer = await http.get("/v1/sandboxes", headers={"origin": "http://evil.example"})
    assert (answer.status_code, answer.json()["field"]) == (400, "Origin")
    assert (await http.get("/v1/sandboxes", headers={"host": "localhost:1"})).status_code == 200


@pytest.mark.parametrize("origin", [b"http://[", b"http://[::1", b"http://\xff", b"//[x]y", b"null", b""])
async def test_origins_that_are_none_are_refused(http: httpx.AsyncClient, origin: bytes) -> None:
    answer = await http.get("/v1/sandboxes", headers={b"origin": origin})
    assert (answer.status_code, answer.json()["field"]) == (400, "Origin")


async def test_without_auth_only_on_loopback(settings: Settings) -> None:
    async with running(settings.model_copy(update={"auth": False})) as server:
        assert server.token is None
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/v1/sandboxes")).status_code == 200
    with pytest.raises(InvalidRequest) as caught:
        async with running(settings.model_copy(update={"auth": False, "host": "0.0.0.0"})):
            pass
    assert caught.value.field == "auth"


async def test_a_token_that_is_known(server: RunningServer, http: httpx.AsyncClient) -> None:
    made = await http.post("/v1/tokens", json={"name": "a", "kind": "agent", "scopes": ["read"]})
    async with httpx.AsyncClient(base_url=server.url) as client:
        good = {"authorization": f"bearer {made.json()['token']}"}
        assert (await client.get("/v1/sandboxes", headers=good)).status_code == 200
    for wrong in ("carrel_" + "x" * 43, "carrel_", "carrel_" + "x" * 10_000, "carrel_\xff"):
        await refused(server, {"authorization": f"Bearer {wrong}".encode("latin-1")})  # type: ignore[dict-item]


@pytest.mark.parametrize("wait", ["-1", "601", "nan", "inf", "soon", ""])
async def test_how_long_to_wait_is_checked(http: httpx.AsyncClient, wait: str) -> None:
    answer = await http.get("/v1/sandboxes", headers={"carrel-wait": wait})
    assert (answer.status_code, answer.json()["field"]) == (400, "Carrel-Wait")


async def test_an_approval_and_the_name_of_a_request(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/sandboxes", headers={"carrel-approval": "apr x"})
    assert (answer.status_code, answer.json()["field"]) == (400, "Carrel-Approval")
    named = await http.get("/v1/sandboxes", headers={"x-request-id": "mine-1", "carrel-wait": "60"})
    assert named.headers["x-request-id"] == "mine-1"
    made_up = {
        (await http.get("/v1/sandboxes", headers={"x-request-id": bad})).headers["x-request-id"]
        for bad in ("a b", "", "\\")
    }
    assert len(made_up) == 3 and all(len(name) == 16 for name in made_up)


@given(st.binary(max_size=12) | st.floats().map(lambda value: str(value).encode()))
def test_any_bytes_are_seconds_or_refused(text: bytes) -> None:
    try:
        assert 0 <= _seconds(text) <= 600
    except InvalidRequest as error:
        assert error.field == "Carrel-Wait"
