"""What every request passes: the token and the size of the body."""

from __future__ import annotations

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from tests.support.a2a_ground import Ground

from carrel.errors import Unauthorized
from carrel.integrations.a2a.callers import CALLER, A2aCaller, CallContexts, Callers, TokenGate


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    if request.url.path == "/breaks":
        raise ValueError("secret detail")
    body = await request.body()
    caller = scope.get(CALLER)
    await PlainTextResponse(f"{len(body)} {caller is not None}")(scope, receive, send)


@pytest.fixture
async def http(ground: Ground):  # type: ignore[no-untyped-def]
    callers = Callers(ground.url)
    gate = TokenGate(application, callers, frozenset({"/open"}), max_body=1000)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://agent") as client:
        yield client
    await callers.close()


async def test_the_open_paths_need_no_token(http: httpx.AsyncClient) -> None:
    assert (await http.get("/open")).text == "0 False"
    assert (await http.get("/open/more")).status_code == 401


@pytest.mark.parametrize("value", ["", "Basic x", "Bearer", "Bearer ", "Bearer carrel_wrong", "bearer a b"])
async def test_others_need_one_that_is_right(http: httpx.AsyncClient, value: str) -> None:
    answer = await http.get("/", headers={"authorization": value})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["code"] == "unauthorized"


async def test_a_right_token(http: httpx.AsyncClient, ground: Ground) -> None:
    answer = await http.post("/", headers={"authorization": f"bearer {ground.token}"}, content=b"x" * 1000)
    assert answer.text == "1000 True"


async def test_a_large_body_is_refused_declared_or_not(http: httpx.AsyncClient, ground: Ground) -> None:
    headers = {"authorization": f"Bearer {ground.token}"}

    async def pieces():  # type: ignore[no-untyped-def]
        for _ in range(11):
            yield b"x" * 100

    for content in (b"x" * 1001, pieces()):
        answer = await http.post("/", headers=headers, content=content)
        assert answer.status_code == 413
        assert answer.json()["code"] == "too_large"


async def test_a_failure_tells_nothing_of_the_inside(http: httpx.AsyncClient, ground: Ground) -> None:
    answer = await http.get("/breaks", headers={"authorization": f"Bearer {ground.token}"})
    assert answer.status_code == 500
    assert "secret detail" not in answer.text


def test_the_context_of_a_call_keeps_no_token() -> None:
    headers = [(b"a2a-version", b"1.0"), (b"authorization", b"Bearer carrel_x")]
    scope = {"type": "http", "headers": headers, "query_string": b"", CALLER: A2aCaller("carrel_x", "x")}
    context = CallContexts().build(Request(scope))
    assert context.state == {"headers": {"A2A-Version": "1.0"}}
    with pytest.raises(Unauthorized):
        CallContexts().build(Request({"type": "http", "headers": [], "query_string": b""}))
