from __future__ import annotations

import asyncio
from typing import Any

import pytest
from deepagents import create_deep_agent
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from tests.support.langgraph_ground import Ground, Step, calls, last_results, lines_of, says, scripted

from carrel.integrations.deepagents import CarrelBackend, _window
from carrel.integrations.langgraph import Workspace, answer, pending, resolve_model


@pytest.fixture
async def backend(ground: Ground) -> CarrelBackend:
    """A backend in a context where everything is allowed."""
    await ground.owner.policy(ground.context).delete()
    return CarrelBackend(Workspace(ground.agent, ground.context))


async def test_files_of_the_workspace(backend: CarrelBackend) -> None:
    assert (await backend.awrite("/workspace/d/a.txt", "one\ntwo\nthree\n")).path == "/workspace/d/a.txt"
    read = await backend.aread("/workspace/d/a.txt", offset=1, limit=1)
    assert read.file_data is not None and read.file_data["content"] == "two"
    assert (read.total_lines, read.start_line, read.end_line, read.next_offset) == (3, 2, 2, 2)
    assert (await backend.aedit("/workspace/d/a.txt", "two", "2")).occurrences == 1
    assert "not found" in str((await backend.aedit("/workspace/d/a.txt", "two", "2")).error)
    assert "multiple times" in str((await backend.aedit("/workspace/d/a.txt", "e", "2")).error)
    assert (await backend.aedit("/workspace/d/a.txt", "e", "E", replace_all=True)).occurrences == 3
    listed = await backend.als("/workspace/d")
    assert [(entry["path"], entry["is_dir"]) for entry in listed.entries or []] == [("/workspace/d/a.txt", False)]
    assert [each["path"] for each in (await backend.aglob("*.txt", "/workspace")).matches or []] == [
        "/workspace/d/a.txt"
    ]
    assert [each["line"] for each in (await backend.agrep("2", "/workspace/d")).matches or []] == [2]
    assert (await backend.adelete("/workspace/d")).path == "/workspace/d"
    for error in (
        (await backend.adelete("/workspace/d")).error,
        (await backend.als("/workspace/d")).error,
        (await backend.aread("/workspace/d/a.txt")).error,
        (await backend.aedit("/workspace/d/a.txt", "a", "b")).error,
    ):
        assert error is not None and "not" in error and "found" in error


async def test_lines_that_end_otherwise_are_edited_as_they_are(backend: CarrelBackend) -> None:
    await backend.aupload_files([("/workspace/dos", b"a\r\nb\r\nc\r\n")])
    read = await backend.aread("/workspace/dos")
    assert read.file_data is not None and read.file_data["content"] == "a\nb\nc"
    assert (await backend.aedit("/workspace/dos", "a\nb", "x\ny")).occurrences == 1
    [got] = await backend.adownload_files(["/workspace/dos"])
    assert got.content == b"x\r\ny\r\nc\r\n"


@pytest.mark.parametrize("root", ["/workspace", "/tmp/deep"])
async def test_bytes_go_up_and_down_inside_the_workspace_and_outside(backend: CarrelBackend, root: str) -> None:
    data = bytes(range(256)) * 4096
    sent = await backend.aupload_files([(f"{root}/x y/b", data), ("relative", b"")])
    assert [each.error for each in sent] == [None, "invalid_path"]
    got = await backend.adownload_files([f"{root}/x y/b", f"{root}/none", "relative", f"{root}/x y"])
    assert got[0].content == data
    assert [each.error for each in got[1:3]] == ["file_not_found", "invalid_path"]
    assert got[3].content is None and got[3].error in {"is_directory", "permission_denied"}
    if root == "/workspace":
        read = await backend.aread(f"{root}/x y/b")
        assert read.error is not None and "exceeds" in read.error


async def test_commands_say_how_they_ended(backend: CarrelBackend) -> None:
    ended = await backend.aexecute("echo out; echo err >&2; exit 3")
    assert (ended.output, ended.exit_code, ended.truncated) == ("out\nerr\n", 3, False)
    assert (await backend.aexecute("sleep 100", timeout=1)).exit_code == 124
    assert (await backend.aexecute("kill -9 $$")).exit_code == 137


async def test_the_blocking_methods_do_the_same(backend: CarrelBackend) -> None:
    def work() -> None:
        assert backend.write("/workspace/a", "x").error is None
        assert backend.edit("/workspace/a", "x", "y").occurrences == 1
        assert backend.execute("cat a").output == "y"
        assert "/workspace/a" in [entry["path"] for entry in backend.ls("/workspace").entries or []]
        read = backend.read("/workspace/a")
        assert read.file_data is not None and read.file_data["content"] == "y"
        assert backend.download_files(["/workspace/a"])[0].content == b"y"
        assert backend.upload_files([("/workspace/b", b"z")])[0].error is None
        assert len(backend.glob("/[ab]", "/workspace").matches or []) == 2
        assert backend.delete("/workspace/b").error is None

    await asyncio.to_thread(work)


async def test_a_refusal_is_told_and_a_blocking_call_does_not_wait(ground: Ground) -> None:
    backend = CarrelBackend(Workspace(ground.agent, ground.context))
    denied = await backend.aexecute("curl example.org")
    assert denied.exit_code == 126 and "shell(curl:*)" in denied.output
    asked = await asyncio.to_thread(backend.execute, "touch x")
    assert asked.exit_code == 126 and "A person has to approve this" in asked.output


async def test_a_deep_agent_works_waits_and_goes_on(ground: Ground) -> None:
    script: list[Step] = [
        calls(("write_file", {"file_path": "/workspace/plan", "content": "first\n"})),
        calls(("execute", {"command": "echo one >> ran"}), ("execute", {"command": "touch asked; echo two >> ran"})),
        calls(("edit_file", {"file_path": "/workspace/plan", "old_string": "first", "new_string": "second"})),
        calls(("execute", {"command": "curl x"}), ("read_file", {"file_path": "/workspace/plan"})),
        lambda messages: says(" | ".join(last_results(messages, 2))),
    ]
    async with scripted(*script) as model:
        chat: Any = resolve_model("scripted", base_url=model.url)
        graph = create_deep_agent(chat, backend=CarrelBackend(), context_schema=Workspace, checkpointer=InMemorySaver())
        here: Any = {"configurable": {"thread_id": ground.context}}
        result = await graph.ainvoke({"messages": [("user", "work")]}, here, context=ground.workspace)
        [waits] = pending(result).values()
        assert (waits.tool, waits.summary) == ("execute", "touch asked; echo two >> ran")
        await ground.person.approvals.approve(waits.approval)
        result = await graph.ainvoke(answer(result, "look"), here, context=ground.workspace)
        await chat.root_async_client.close()
    told = result["messages"][-1].text
    assert "curl is denied" in told and "second" in told
    assert await lines_of(ground.owner, ground.context, "ran") == ["one", "two"]
    assert await lines_of(ground.owner, ground.context, "plan") == ["second"]
    assert sum(isinstance(message, ToolMessage) for message in result["messages"]) == 6


@given(st.lists(st.text(alphabet="ab \t", max_size=5), min_size=1), st.integers(0, 20), st.integers(0, 20))
def test_windows_cover_a_text_without_gaps(lines: list[str], offset: int, limit: int) -> None:
    text = "\n".join(lines)
    if not text:
        return
    shown = _window(text.encode(), offset, limit)
    expected = text.removesuffix("\n").split("\n")
    if not limit:
        assert shown["no_lines_requested"]
    elif offset >= len(expected):
        assert "exceeds" in str(shown["error"])
    else:
        assert shown["content"] == "\n".join(expected[offset : offset + limit])
        end = min(len(expected), offset + limit)
        assert (shown["start_line"], shown["end_line"]) == (offset + 1, end)
        assert shown["next_offset"] == (end if end < len(expected) else None)
