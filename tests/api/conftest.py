"""A real server for each test. Whatever it answers, its OpenAPI document must have told of it."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from tests.support.governed import POLICY, Known
from tests.support.refusals import Contract
from tests.support.worker_servers import ServerWithWorkers, server_with_workers

from carrel.config import Settings, load
from carrel.server import RunningServer, running


@pytest.fixture(autouse=True)
def _forked(forked: None, carrel_forks: None) -> None: ...


@pytest.fixture
def settings() -> Iterator[Settings]:
    path = tempfile.mkdtemp(prefix="carrel-t-")
    flags = {"data_dir": path, "port": 0, "max_body_mb": 1, "sandbox.allow_process": True, "volumes": "directory"}
    yield load(flags, environ={})
    shutil.rmtree(path)


@pytest.fixture
async def server(
    settings: Settings, request: pytest.FixtureRequest
) -> AsyncIterator[RunningServer | ServerWithWorkers]:
    count = request.config.getoption("--workers-of-server")
    if count > 1 and {"monkeypatch", "caplog"} & set(inspect.signature(request.function).parameters):
        pytest.skip("the test changes or watches the process of the server, and there are several")
    if count == 1:
        async with running(settings) as server:
            yield server
    else:
        with server_with_workers(settings, count) as several:
            yield several


_read: list[Contract] = []


@pytest.fixture
async def contract(server: RunningServer) -> Contract:
    """The OpenAPI document: the same for every server, so asked for once."""
    if not _read:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            _read.append(Contract((await client.get("/openapi.json")).json()))
    return _read[0]


@pytest.fixture
async def http(server: RunningServer, contract: Contract) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {server.token}"}

    async def judge(answer: httpx.Response) -> None:
        contract.judge(answer)

    hooks = {"response": [judge]}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60, event_hooks=hooks) as client:
        yield client


@pytest.fixture
async def known(http: httpx.AsyncClient, server: RunningServer) -> AsyncIterator[Known]:
    """Makes a token and gives a client that shows it."""
    made: list[httpx.AsyncClient] = []

    async def make(name: str, kind: str, *scopes: str, **more: object) -> httpx.AsyncClient:
        answer = await http.post("/v1/tokens", json={"name": name, "kind": kind, "scopes": scopes, **more})
        assert answer.status_code == 201, answer.text
        headers = {"authorization": f"Bearer {answer.json()['token']}"}
        made.append(httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60, event_hooks=http.event_hooks))
        return made[-1]

    yield make
    for client in made:
        await client.aclose()


@pytest.fixture
async def governed(http: httpx.AsyncClient) -> str:
    """A sandbox whose context has a policy: echo is allowed, curl is denied, all else asks."""
    answer = await http.put("/v1/contexts/team:a/policy", json={"settings": POLICY})
    assert answer.status_code == 200, answer.text
    answer = await http.post("/v1/sandboxes", json={"context_id": "team:a", "trust": "high"})
    assert answer.status_code == 201, answer.text
    return "/v1/sandboxes/team:a"


@pytest.fixture
async def box(http: httpx.AsyncClient) -> str:
    answer = await http.post("/v1/sandboxes", json={"context_id": "box", "trust": "high"})
    assert answer.status_code == 201, answer.text
    return f"/v1/sandboxes/{answer.json()['id']}"
