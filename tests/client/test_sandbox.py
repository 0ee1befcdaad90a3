from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from carrel.client import AsyncSandbox, Client, Sandbox
from carrel.errors import InvalidRequest, NotRunning, Unsupported
from carrel.models import State


@pytest.fixture
def kept(client: Client) -> Iterator[Sandbox]:
    box = client.sandbox(f"kept:{uuid.uuid4().hex[:8]}")
    yield box
    box.terminate(delete_files=True)


def test_what_it_says_of_itself(client: Client, box: Sandbox, kept: Sandbox) -> None:
    info = box.info()
    assert (info.id, info.provider, info.ephemeral, info.state) == (box.id, box.provider, True, State.RUNNING)
    assert box.health().status == "ok"
    assert repr(box) == f"<Sandbox {box.id} on {box.provider}>"
    assert str(kept.context_id) in repr(kept)
    assert client.attach(info).commands.run("echo same").stdout == "same\n"


def test_a_block_ends_an_ephemeral_one_only(client: Client, kept: Sandbox) -> None:
    with kept:
        pass
    assert kept.info().state is State.RUNNING
    with client.sandbox() as passing:
        passing.terminate()
    assert passing.info().state is State.TERMINATED
    with pytest.raises(NotRunning):
        passing.commands.run("true")


def test_a_kept_workspace_stays_unless_told(client: Client) -> None:
    name = f"kept-{uuid.uuid4().hex[:8]}"
    first = client.sandbox(name)
    first.files.write("f", b"x")
    first.terminate(reason="over")
    second = client.sandbox(name)
    assert second.id != first.id and second.files.read("f") == b"x"
    second.terminate(delete_files=True)
    third = client.sandbox(name)
    assert third.files.list() == [] or "f" not in [entry.path for entry in third.files.list()]
    third.terminate(delete_files=True)


def test_execute_and_tool(box: Sandbox) -> None:
    result = box.execute("wc -c < in.bin; echo made > output/o", files={"in.bin": b"\x00\xff12"})
    assert (result.output.strip(), result.files_produced) == ("4", ["output/o"])
    box.tool("create_file", {"path": "made.txt", "content": "by a tool"})
    assert box.files.read_text("made.txt") == "by a tool"
    with pytest.raises(Unsupported):
        box.execute("1", language="python")
    with pytest.raises(InvalidRequest) as caught:
        box.tool("fly")
    assert caught.value.field == "tool_name"


async def test_the_same_when_awaited(async_box: AsyncSandbox) -> None:
    assert (await async_box.info()).id == async_box.id
    assert (await async_box.execute("echo hi")).output == "hi\n"
    assert (await async_box.tool("create_file", {"path": "x", "content": ""})).tool_name == "create_file"
    assert (await async_box.terminate(reason="over")).state is State.TERMINATED


def test_stop_keeps_the_files_and_the_next_use_starts_it_again(client: Client, kept: Sandbox) -> None:
    kept.files.write("f", b"x")
    assert kept.stop().state is State.STOPPED
    with pytest.raises(NotRunning):
        kept.commands.run("true")
    again = client.sandbox(kept.context_id)
    assert again.id == kept.id and again.files.read("f") == b"x"


def test_snapshots_restore_and_fork(client: Client, kept: Sandbox) -> None:
    kept.files.write("f", b"one")
    first = kept.snapshot()
    kept.files.write("f", b"two")
    second = kept.snapshot()
    assert [each.id for each in kept.snapshots()] == [second.id, first.id]
    assert [(change.path, change.kind) for change in kept.diff(first, second.id)] == [("f", "changed")]
    assert kept.restore(first).state is State.RUNNING
    assert kept.files.read("f") == b"one"
    twin = kept.fork(f"{kept.context_id}-twin", second)
    try:
        assert twin.files.read("f") == b"two" and twin.id != kept.id
    finally:
        twin.terminate(delete_files=True)
