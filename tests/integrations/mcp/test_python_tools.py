from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from mcp import types

from carrel.client import AsyncClient
from carrel.integrations.mcp.python_tools import MOST_IMAGE

Said = Callable[[types.CallToolResult], str]
PICTURE = """
class Picture:
    def __init__(self, size): self.size = size
    def _repr_png_(self): return b"\\x89PNG\\r\\n\\x1a\\n" + b"x" * self.size
    def __repr__(self): return "a picture"
"""


async def test_a_fresh_process_for_each_call(connect: Any, context: str, said: Said) -> None:
    async with connect(context) as client:
        result = await client.call_tool("python", {"code": "x = 6 * 7\nprint(x)"})
        assert said(result).startswith("42\n[exit code 0")
        result = await client.call_tool("python", {"code": "print(x)"})
        assert not result.is_error and "NameError" in said(result) and "[exit code 1" in said(result)
        result = await client.call_tool("python", {"code": "while True: pass", "timeout": 0.5})
        assert "timed out: killed" in said(result)


async def test_a_code_context_keeps_variables(connect: Any, context: str, said: Said) -> None:
    async with connect(context) as client:
        first = await client.call_tool("python", {"code": "x = 20\nx + 1", "code_context": "main"})
        assert said(first).startswith("21\n[ok,") and "has just started" in said(first)
        second = await client.call_tool("python", {"code": "print('now'); x * 2", "code_context": "main"})
        assert said(second).startswith("now\n40\n[ok,") and "just started" not in said(second)
        other = await client.call_tool("python", {"code": "x", "code_context": "other"})
        assert "NameError" in said(other) and "it raised an exception" in said(other)
        late = await client.call_tool("python", {"code": "while True: pass", "code_context": "main", "timeout": 0.3})
        assert "interrupted at its deadline" in said(late)
        dead = await client.call_tool("python", {"code": "import os; os._exit(3)", "code_context": "main"})
        assert "its variables are gone" in said(dead)


async def test_images_are_images(connect: Any, context: str, said: Said) -> None:
    async with connect(context) as client:
        code = f"{PICTURE}\ndisplay(Picture(10))\nPicture(20)"
        result = await client.call_tool("python", {"code": code, "code_context": "main"})
        images = [block for block in result.content if isinstance(block, types.ImageContent)]
        assert [image.mime_type for image in images] == ["image/png", "image/png"]
        assert [len(base64.b64decode(image.data)) for image in images] == [18, 28]
        result = await client.call_tool("python", {"code": f"Picture({MOST_IMAGE})", "code_context": "main"})
        assert not any(isinstance(block, types.ImageContent) for block in result.content)
        assert "too large to be shown" in said(result)


@pytest.mark.parametrize("code_context", [None, "main"])
async def test_cancelling_ends_what_runs(connect: Any, context: str, code_context: str | None, ground: Any) -> None:
    async with connect(context) as client, AsyncClient(ground.url, ground.token) as own:
        box = await own.sandbox(context)
        given: dict[str, Any] = {"code": "open('begun', 'w').close()\nwhile True: pass", "timeout": 120}
        if code_context is not None:
            given["code_context"] = code_context
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "python", given)
            async with asyncio.timeout(60):
                while not await box.files.exists("begun"):
                    await asyncio.sleep(0.02)
            group.cancel_scope.cancel()
        async with asyncio.timeout(60):
            while any(info.running for info in await box.commands.list()):
                await asyncio.sleep(0.02)
            while any(info.state == "busy" for info in await box.python.contexts()):
                await asyncio.sleep(0.02)
        if code_context is not None:
            after = await client.call_tool("python", {"code": "1", "code_context": code_context})
            assert not after.is_error


async def test_wrong_arguments(connect: Any, context: str) -> None:
    async with connect(context) as client:
        for given, field in [({"code": ""}, "code"), ({"code": "1", "timeout": 1000}, "timeout")]:
            result = await client.call_tool("python", given)
            assert result.is_error and result.structured_content["field"] == field
        result = await client.call_tool("python", {"code": "1", "env": "nonesuch"})
        assert result.is_error and result.structured_content["code"] == "not_found"
