from __future__ import annotations

import asyncio
import uuid

import pytest
from tests.support.environments_ground import sources, stocked

from carrel.client import AsyncClient, Client
from carrel.errors import Conflict, InvalidRequest, NotFound


async def test_attached_by_requirements_and_by_name(async_client: AsyncClient, client: Client) -> None:
    async with stocked() as index:
        name = f"env-{uuid.uuid4().hex}"
        await async_client.policy(name).put(sources=sources(index))
        box = await async_client.sandbox(name)
        try:
            lines: list[str] = []
            info = await box.envs.attach(["shelf"], progress=lines.append)
            assert "+ shelf==1.0" in lines
            for again in (info, info.name, ["shelf"]):
                assert (await box.envs.attach(again)).name == info.name
            assert (await box.envs.attach(info, venv=True)).name == info.name
            result = await box.commands.run("python3 -c 'import shelf; print(shelf.version)'")
            assert result.stdout == "1.0\n", result.stderr
            with pytest.raises(InvalidRequest, match="nonesuch"):
                await box.envs.attach(["nonesuch"], progress=lines.append)
            with pytest.raises(InvalidRequest, match="nonesuch"):
                await box.envs.attach(["nonesuch"])
            assert (await async_client.envs.get(info.name)).in_use
            with pytest.raises(Conflict):
                await async_client.envs.delete(info.name)
            with pytest.raises(NotFound, match="no packages"):
                await box.envs.attach()
            assert [each.name for each in await box.envs.list()] == [info.name]
            await box.envs.detach(info)
            assert await box.envs.list() == []
            with pytest.raises(NotFound):
                await box.envs.detach(info)
            assert not (await async_client.envs.get(info.name)).in_use
            same = await asyncio.to_thread(client.envs.list)
            assert info.name in [each.name for each in same]
            assert info.name in [each.name for each in await async_client.envs.list()]
        finally:
            await box.terminate(delete_files=True)
        await async_client.envs.delete(info.name)
        with pytest.raises(NotFound):
            await asyncio.to_thread(client.envs.get, info.name)
        with pytest.raises(InvalidRequest, match="not a requirement"):
            await async_client.envs.build(["pandas >"], name="x", progress=print)
