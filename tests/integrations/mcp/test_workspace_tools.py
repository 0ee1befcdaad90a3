from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mcp import types
from tests.support.environments_ground import sources, stocked

from carrel.client import AsyncClient, Client

Said = Callable[[types.CallToolResult], str]


async def test_snapshots_are_taken_listed_and_restored(connect: Any, context: str, said: Said) -> None:
    async with connect(context) as client:
        await client.call_tool("write_file", {"path": "a", "content": "before"})
        taken = await client.call_tool("snapshot", {})
        name = taken.structured_content["id"]
        assert name in said(taken)
        await client.call_tool("write_file", {"path": "a", "content": "after"})
        listed = await client.call_tool("list_snapshots", {})
        assert name in [each["id"] for each in listed.structured_content["snapshots"]]
        restored = await client.call_tool("restore_snapshot", {"snapshot": name})
        assert not restored.is_error, said(restored)
        assert said(await client.call_tool("read_file", {"path": "a"})) == "before"
        missing = await client.call_tool("restore_snapshot", {"snapshot": "snap-none"})
        assert missing.is_error and missing.structured_content["code"] == "not_found"


async def test_a_fork_has_the_files_and_the_connection_stays(
    connect: Any, context: str, said: Said, admin: Client
) -> None:
    twin = f"{context}-twin"
    async with connect(context) as client:
        await client.call_tool("write_file", {"path": "a", "content": "both"})
        forked = await client.call_tool("fork", {"context": twin})
        assert not forked.is_error, said(forked)
        assert forked.structured_content == {"context": twin, "from": context}
        try:
            await client.call_tool("write_file", {"path": "a", "content": "mine"})
            async with connect(twin) as other:
                assert said(await other.call_tool("read_file", {"path": "a"})) == "both"
            again = await client.call_tool("fork", {"context": twin})
            assert again.is_error and again.structured_content["code"] == "already_exists"
        finally:
            admin.attach(admin.find(twin)).terminate(delete_files=True)


async def test_a_token_forks_only_where_it_reaches(connect: Any, governed: str, agent: str) -> None:
    async with connect(governed, token=agent) as client:
        result = await client.call_tool("fork", {"context": f"{governed}-out-of-reach"})
        assert result.is_error and result.structured_content["code"] == "denied_by_policy"


async def test_environments_are_attached_and_used(connect: Any, context: str, said: Said, ground: Any) -> None:
    async with stocked() as index, AsyncClient(ground.url, ground.token) as own:
        await own.policy(context).put(sources=sources(index))
        async with connect(context) as client:
            attached = await client.call_tool("attach_environment", {"requirements": ["shelf"]})
            assert not attached.is_error, said(attached)
            name = attached.structured_content["name"]
            listed = await client.call_tool("list_environments", {})
            assert [each["name"] for each in listed.structured_content["attached"]] == [name]
            assert name not in [each["name"] for each in listed.structured_content["others"]]
            code = {"code": "import shelf; print(shelf.version)", "env": name}
            for more in ({}, {"code_context": "main"}):
                assert said(await client.call_tool("python", {**code, **more})).startswith("1.0\n")
            wrong = await client.call_tool("attach_environment", {"requirements": ["nonesuch"]})
            assert wrong.is_error and "nonesuch" in said(wrong)


async def test_the_names_of_others_environments_are_not_told(
    connect: Any, context: str, said: Said, ground: Any
) -> None:
    other = f"{context}-other"
    async with stocked() as index, AsyncClient(ground.url, ground.token) as own:
        await own.policy(other).put(sources=sources(index))
        box = await own.sandbox(other)
        try:
            private = await box.envs.attach(["nail"])
            async with connect(context) as client:
                listed = await client.call_tool("list_environments", {})
                assert private.name not in said(listed) + str(listed.structured_content)
        finally:
            await box.terminate(delete_files=True)


@pytest.mark.parametrize("given", [{}, {"env": "a", "requirements": ["b"]}])
async def test_an_environment_is_named_or_described(connect: Any, context: str, given: dict[str, object]) -> None:
    async with connect(context) as client:
        result = await client.call_tool("attach_environment", given)
        assert result.is_error and result.structured_content["field"] == "env"
