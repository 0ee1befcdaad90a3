from __future__ import annotations

import asyncio
from typing import Any

import pytest

from carrel.client import AsyncSandbox, Client
from carrel.errors import FileMissing, ServerUnreachable, Unauthorized
from carrel.integrations.mcp import clients as module
from carrel.integrations.mcp.clients import Clients


async def _echo(box: AsyncSandbox) -> str:
    return (await box.commands.run("echo hi")).stdout


async def test_a_sandbox_that_was_stopped_is_resumed(ground: Any, context: str, admin: Client) -> None:
    reach = Clients(ground.url)
    async with reach.access(ground.token, context) as access:
        assert await access.do(_echo) == "hi\n"
        await asyncio.to_thread(admin.attach(admin.find(context)).stop)
        assert await access.do(_echo) == "hi\n"
        asked = 0

        async def missing(box: AsyncSandbox) -> bytes:
            nonlocal asked
            asked += 1
            return await box.files.read("none")

        with pytest.raises(FileMissing):
            await access.do(missing)
        assert asked == 1
    await reach.close()


async def test_each_token_has_a_client_and_each_context_a_place(ground: Any) -> None:
    reach = Clients(ground.url)
    async with reach.access(ground.token, "a") as one, reach.access(ground.token, "b") as two:
        assert one is not two and one.client is two.client
        async with reach.access("carrel_other", "a") as other:
            assert other.client is not one.client
            with pytest.raises(Unauthorized):
                await other.sandbox()
        async with reach.access(ground.token, "a") as again:
            assert again is one
    await reach.close()


async def test_clients_that_nobody_uses_are_let_go(ground: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CLIENTS", 2)
    monkeypatch.setattr(module, "MAX_ACCESSES", 2)
    reach = Clients(ground.url)
    async with reach.access("t0", "c") as used:
        for number in range(1, 6):
            async with reach.access(f"t{number}", "c"):
                pass
        async with reach.access("t0", "c") as again:
            assert again.client is used.client, "one that is in use stays"
    async with reach.access("t5", "c") as newest:
        pass
    async with reach.access("t5", "c") as same:
        assert same is newest
        for name in ("d", "e", "f"):
            async with reach.access("t5", name):
                pass
    await reach.close()


async def test_one_that_comes_back_while_others_are_let_go_keeps_its_client(
    ground: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CLIENTS", 4)
    reach = Clients(ground.url)

    async def ask(token: str, meanwhile: asyncio.Event | None = None) -> None:
        async with reach.access(token, "c") as access:
            with pytest.raises(Unauthorized):  # which takes a connection, and closing that takes a while
                await access.sandbox()
            if meanwhile is not None:
                await meanwhile.wait()
                with pytest.raises(Unauthorized):
                    await access.sandbox()

    for name in "abcd":
        await ask(name)
    for turns in range(20):
        leave, stay = asyncio.Event(), asyncio.Event()
        new = [asyncio.ensure_future(ask(f"{name}{turns}", leave)) for name in "efg"]
        while len(reach.pool) < 7:
            await asyncio.sleep(0.001)
        leave.set()
        known = reach.pool.tokens()[:4]
        for _ in range(turns):
            await asyncio.sleep(0)
        back = [asyncio.ensure_future(ask(name, stay)) for name in known]
        await asyncio.gather(*new)
        stay.set()
        await asyncio.gather(*back)
    await reach.close()


async def test_a_server_that_is_back_elsewhere_is_found(
    ground: Any, context: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CARREL_URL", "CARREL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CARREL_DATA_DIR", str(tmp_path))
    reach = Clients()
    with pytest.raises(ServerUnreachable):
        async with reach.access(None, context):
            pass
    (tmp_path / "server.json").write_text('{"url": "http://127.0.0.1:9"}')
    (tmp_path / "agent-token").write_text(ground.token)
    with pytest.raises(ServerUnreachable):
        async with reach.access(None, context) as access:
            await access.sandbox()
    (tmp_path / "server.json").write_text(f'{{"url": "{ground.url}"}}')
    async with reach.access(None, context) as access:
        assert await access.do(_echo) == "hi\n"
    await reach.close()
