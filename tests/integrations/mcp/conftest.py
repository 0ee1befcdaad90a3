"""A real carrel server in its own process, contexts of one's own on it, and the official MCP client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mcp import Client as McpClient
from mcp import StdioServerParameters, types
from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
from tests.support.fork_server import Forked, start
from tests.support.governed import POLICY

from carrel.client import Client
from carrel.errors import NotFound
from carrel.integrations.mcp.server import WorkspaceServer

MODES = ("legacy", "auto")
"""Both eras of the protocol: the handshake, and an envelope for each request."""


@dataclass
class Ground:
    """The server's data directory and address, and the administrator's token."""

    directory: Path
    url: str
    token: str

    @property
    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
        return {**kept, "CARREL_DATA_DIR": str(self.directory)}


def _ended(process: Forked | subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory, carrel_forks: None) -> Iterator[Ground]:
    directory = tmp_path_factory.mktemp("mcp") / "data"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
    log = directory.parent / "server.log"
    with log.open("ab") as output:
        command = [sys.executable, "-m", "carrel", "serve", "--port", "0", "--data-dir", str(directory)]
        server = start(command, env=environment, stdout=output, stderr=output)
    deadline = time.monotonic() + 90
    try:
        while not (directory / "server.json").exists():
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail("the server did not start:\n" + log.read_text())
            time.sleep(0.02)
        url = str(json.loads((directory / "server.json").read_bytes())["url"])
        yield Ground(directory, url, (directory / "token").read_text().strip())
    finally:
        _ended(server)


@pytest.fixture(scope="session")
def front(ground: Ground) -> Iterator[str]:
    """The address of `carrel mcp --http`."""
    command = [sys.executable, "-m", "carrel", "mcp", "--http", "--port", "0"]
    with (ground.directory.parent / "mcp.log").open("ab") as log:
        process = subprocess.Popen(command, env=ground.environment, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    try:
        said = process.stdout.readline().decode()
        assert said.startswith("carrel mcp listens on http://127.0.0.1:"), said
        yield said.split()[-1].removesuffix("/CONTEXT/mcp")
    finally:
        _ended(process)
        process.stdout.close()


@pytest.fixture
def admin(ground: Ground) -> Iterator[Client]:
    with Client(ground.url, ground.token) as client:
        yield client


def _gone(admin: Client, name: str) -> None:
    try:
        admin.attach(admin.find(name)).terminate(delete_files=True)
    except NotFound:
        pass


@pytest.fixture
def context(admin: Client) -> Iterator[str]:
    name = f"mcp-{uuid.uuid4().hex[:12]}"
    yield name
    _gone(admin, name)


@pytest.fixture
def governed(admin: Client) -> Iterator[str]:
    """A context whose policy allows a little, denies a little and leaves the rest to a person."""
    name = f"mcp-{uuid.uuid4().hex[:12]}"
    admin.policy(name).put(settings=POLICY)
    yield name
    _gone(admin, name)


@pytest.fixture
def agent(admin: Client, governed: str) -> Iterator[str]:
    """An agent's token for the governed context."""
    made = admin.tokens.create(f"agent-{governed}", kind="agent", scopes=["operate"], contexts=[governed])
    yield made.token
    admin.tokens.revoke(made.id)


@pytest.fixture
def ann(admin: Client) -> Iterator[Client]:
    """A person who may approve."""
    made = admin.tokens.create(f"ann-{uuid.uuid4().hex[:8]}", kind="person", scopes=["approve"])
    with Client(admin.url, made.token) as client:
        client.token = made.token  # type: ignore[attr-defined]
        yield client
    admin.tokens.revoke(made.id)


Connect = Callable[..., AbstractAsyncContextManager[McpClient]]


@pytest.fixture
def connect(ground: Ground) -> Connect:
    """The official client on a server in this process."""

    @asynccontextmanager
    async def connected(
        context: str, *, token: str | None = None, mode: str = "auto", asking: Any = None, **more: Any
    ) -> AsyncIterator[McpClient]:
        given = WorkspaceServer(url=ground.url, token=token or ground.token, context_id=context, asking=asking)
        async with McpClient(given.server, mode=mode, raise_exceptions=True, **more) as client:
            try:
                yield client
            finally:
                await given.clients.close()

    return connected


@pytest.fixture
def over_http(front: str, ground: Ground) -> Connect:
    """The official client over streamable HTTP."""

    @asynccontextmanager
    async def connected(
        context: str | None, *, token: str | None = None, mode: str = "auto", headers: Any = None, **more: Any
    ) -> AsyncIterator[McpClient]:
        given = {"authorization": f"Bearer {token or ground.token}", **(headers or {})}
        url = f"{front}/mcp" if context is None else f"{front}/{context}/mcp"
        async with (
            create_mcp_http_client(headers=given) as http,
            McpClient(streamable_http_client(url, http_client=http), mode=mode, **more) as client,
        ):
            yield client

    return connected


@pytest.fixture
def over_stdio(ground: Ground, tmp_path: Path) -> Connect:
    """The official client, which starts `carrel mcp` itself."""

    @asynccontextmanager
    async def connected(
        *words: str, mode: str = "auto", env: dict[str, str] | None = None, cwd: Path | None = None, **more: Any
    ) -> AsyncIterator[McpClient]:
        parameters = StdioServerParameters(
            command=sys.executable,
            args=["-m", "carrel", "mcp", *words],
            env={**ground.environment, **(env or {})},
            cwd=str(cwd or tmp_path),
        )
        async with McpClient(parameters, mode=mode, **more) as client:
            yield client

    return connected


def text_of(result: types.CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, types.TextContent))


@pytest.fixture
def said() -> Callable[[types.CallToolResult], str]:
    """The text of an answer."""
    return text_of
