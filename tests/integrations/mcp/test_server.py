from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import MCPError, types

from carrel.client import Client
from carrel.errors import NotFound
from carrel.integrations.mcp.server import CATALOGUE, McpCaller, WorkspaceServer, instructions

Said = Callable[[types.CallToolResult], str]
MODES = ["legacy", "auto"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_starts_it_and_works_in_a_context(
    over_stdio: Any, context: str, mode: str, said: Said, admin: Client
) -> None:
    async with over_stdio("--context", context, mode=mode) as client:
        assert client.server_info.name == "carrel"
        assert f"'{context}'" in client.instructions
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == CATALOGUE.keys()
        result = await client.call_tool("run_command", {"command": "echo hi > data/a; cat data/a"})
        assert result.structured_content["output"] == "hi\n"
        many = [client.call_tool("run_command", {"command": f"sleep 0.05; echo {n}"}) for n in range(20)]
        got = [each.structured_content["output"] for each in await asyncio.gather(*many)]
        assert got == [f"{n}\n" for n in range(20)]
    assert admin.attach(admin.find(context)).files.read("data/a") == b"hi\n", "the workspace stays"


async def test_a_client_that_names_no_context_gets_its_own(
    over_stdio: Any, admin: Client, tmp_path: Path, said: Said
) -> None:
    info = types.Implementation(name=f"Some Client {uuid.uuid4().hex[:6]}", version="1")
    places = [tmp_path / "one", tmp_path / "two"]
    named: list[str] = []
    try:
        for place, mode in [(places[0], "legacy"), (places[0], "auto"), (places[1], "auto")]:
            place.mkdir(exist_ok=True)
            async with over_stdio(mode=mode, cwd=place, client_info=info) as client:
                found = re.search(r"context '(mcp-some-client-[a-z0-9-]+)'", client.instructions)
                assert found is not None, client.instructions
                named.append(found[1])
                assert not (await client.call_tool("list_files", {})).is_error
        assert named[0] == named[1], "the same client in the same place finds its files again"
        assert named[2] != named[0]
    finally:
        for name in set(named):
            admin.attach(admin.find(name)).terminate(delete_files=True)


@pytest.mark.parametrize("mode", MODES)
async def test_a_platform_failure_is_told_as_one(over_stdio: Any, mode: str, said: Said, tmp_path: Path) -> None:
    env = {"CARREL_DATA_DIR": str(tmp_path / "nothing")}
    async with over_stdio("--context", "c", mode=mode, env=env) as client:
        assert (await client.list_tools()).tools, "clients can look at the tools before there is a server"
        result = await client.call_tool("run_command", {"command": "echo hi"})
        assert result.is_error and result.structured_content["code"] == "server_unreachable"
        assert "carrel itself failed" in said(result) and "carrel serve" in said(result)
        assert "Traceback" not in said(result)


async def test_what_nobody_expected_is_no_traceback(connect: Any, monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    async def fails(_call: Any, _given: Any) -> Any:
        raise ZeroDivisionError("secret words")

    broken = CATALOGUE["snapshot"]
    monkeypatch.setitem(
        CATALOGUE, "snapshot", type(broken)(broken.name, broken.title, broken.description, broken.parameters, fails)
    )
    async with connect("c") as client:
        result = await client.call_tool("snapshot", {})
        assert result.is_error and result.structured_content["code"] == "platform_error"
        assert "secret" not in said(result) and "ZeroDivision" not in said(result)


@pytest.mark.parametrize("mode", MODES)
async def test_an_unknown_tool_and_wrong_arguments(connect: Any, context: str, mode: str) -> None:
    async with connect(context, mode=mode) as client:
        with pytest.raises(MCPError, match="there is no tool 'nonesuch'"):
            await client.call_tool("nonesuch", {})
        result = await client.call_tool("run_command", {"comand": "ls"})
        assert result.is_error and result.structured_content["field"] in {"command", "comand"}


async def test_a_client_that_goes_away_ends_what_it_waited_for(over_stdio: Any, context: str, admin: Client) -> None:
    async with over_stdio("--context", context) as client:
        await client.call_tool("write_file", {"path": "a", "content": ""})
        running = asyncio.ensure_future(client.call_tool("run_command", {"command": "touch begun; sleep 600"}))
        box = admin.attach(admin.find(context))
        async with asyncio.timeout(30):
            while not await asyncio.to_thread(box.files.exists, "begun"):
                await asyncio.sleep(0.02)
        left = await client.call_tool("run_command", {"command": "sleep 600", "background": True})
    await asyncio.gather(running, return_exceptions=True)
    async with asyncio.timeout(30):
        while True:
            live = [info.id for info in await asyncio.to_thread(box.commands.list) if info.running]
            if live == [left.structured_content["handle"].split(".")[0]]:
                break
            await asyncio.sleep(0.02)


async def test_every_call_is_in_the_audit_log_under_its_caller(
    connect: Any, governed: str, agent: str, admin: Client
) -> None:
    async with connect(governed, token=agent) as client:
        await client.call_tool("run_command", {"command": "echo audited"})
        await client.call_tool("run_command", {"command": "curl x"})
    records = list(admin.audit.search(context_id=governed))
    ours = {record.name: record for record in records if record.kind == "shell" and record.decision == "allow"}
    assert ours["start_command"].actor == f"agent:agent-{governed}"
    assert [record.rule for record in records if record.decision == "deny"] == ["shell(curl:*)"]


def test_a_caller_has_a_name_that_tells_nothing() -> None:
    one, two, three = McpCaller("t", "a"), McpCaller("t", "b"), McpCaller("u", "a")
    assert len({one.digest, two.digest, three.digest}) == 3
    assert one.digest == McpCaller("t", "a").digest and one.digest != "t"


def test_instructions_name_the_context() -> None:
    assert "'conversation-42'" in instructions("conversation-42")
    assert WorkspaceServer(context_id="c").server.name == "carrel"


async def test_without_a_context_of_that_name_nothing_is_made_before_a_call(connect: Any, admin: Client) -> None:
    name = f"mcp-unused-{uuid.uuid4().hex[:8]}"
    async with connect(name) as client:
        await client.list_tools()
    with pytest.raises(NotFound):
        admin.find(name)


def test_schemas_name_one_type_each() -> None:
    """A list of types is legal, but some clients turn schemas into forms that have none."""

    def types_in(schema: object) -> list[object]:
        if isinstance(schema, list):
            return [found for each in schema for found in types_in(each)]
        if not isinstance(schema, dict):
            return []
        own = [schema["type"]] if isinstance(schema.get("type"), str | list) else []
        return own + [found for each in schema.values() for found in types_in(each)]

    for tool in CATALOGUE.values():
        given = tool.declared()
        for schema in (given.input_schema, given.output_schema):
            assert all(isinstance(each, str) for each in types_in(schema)), given.name
