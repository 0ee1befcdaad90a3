from __future__ import annotations

import io
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from carrel.client import AsyncClient, AsyncSandbox, Client, Sandbox
from carrel.errors import InvalidRequest, NotFound, NotRunning
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
    changes = {(each.path, each.kind) for each in kept.diff(first, second.id)}
    assert changes - {(".context.json", "changed")} == {("f", "changed")}  # upkeep may have written that one meanwhile
    assert kept.restore(first).state is State.RUNNING
    assert kept.files.read("f") == b"one"
    twin = kept.fork(f"{kept.context_id}-twin", second)
    try:
        assert twin.files.read("f") == b"two" and twin.id != kept.id
    finally:
        twin.terminate(delete_files=True)


def test_a_snapshot_is_downloaded_whole_or_not_at_all(kept: Sandbox, tmp_path: Path) -> None:
    kept.files.write("data/f", b"x" * 700_000)
    snapshot = kept.snapshot()
    counted: list[int] = []
    target = tmp_path / "work.tar"
    kept.download_snapshot(snapshot, target, progress=counted.append)
    assert sum(counted) == target.stat().st_size > 700_000
    with tarfile.open(target) as archive:
        member = next(each for each in archive.getmembers() if each.name.endswith("data/f"))
        file = archive.extractfile(member)
        assert file is not None and file.read() == b"x" * 700_000
    held = io.BytesIO()
    kept.download_snapshot(snapshot.id, held)
    assert held.getvalue() == target.read_bytes()
    with pytest.raises(NotFound):
        kept.download_snapshot("snap-absent", tmp_path / "never.tar")
    with pytest.raises(InvalidRequest):
        kept.download_snapshot(snapshot, tmp_path / "absent" / "work.tar")
    assert [each.name for each in tmp_path.iterdir()] == ["work.tar"]

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(InvalidRequest, match="space"):
        kept.download_snapshot(snapshot, tmp_path / "half.tar", progress=full)
    assert [each.name for each in tmp_path.iterdir()] == ["work.tar"]


def test_resume_starts_the_same_sandbox(kept: Sandbox) -> None:
    kept.files.write("f", b"x")
    before = kept.id
    kept.stop()
    assert kept.resume().state is State.RUNNING
    assert kept.id == before and kept.files.read("f") == b"x"
    assert kept.resume().id == before


def test_resume_after_the_end_is_a_new_sandbox_on_the_same_files(kept: Sandbox) -> None:
    kept.files.write("f", b"x")
    before = kept.id
    kept.terminate(reason="over", snapshot=False)
    assert kept.resume().id == kept.id != before
    assert kept.files.read("f") == b"x"


def test_an_ephemeral_one_cannot_be_resumed(box: Sandbox) -> None:
    with pytest.raises(InvalidRequest) as caught:
        box.resume()
    assert caught.value.field == "context_id" and caught.value.hint


async def test_usage_and_download_when_awaited(async_client: AsyncClient, tmp_path: Path) -> None:
    box = await async_client.sandbox(f"usage-{uuid.uuid4().hex[:12]}")
    try:
        await box.files.write("f", b"x" * 200_000)
        usage = await box.usage()
        assert usage.context_id == box.context_id and usage.bytes >= 200_000 and usage.limit_bytes
        await box.download_snapshot(await box.snapshot(), tmp_path / "work.tar")
        assert tarfile.is_tarfile(tmp_path / "work.tar")
        await box.stop()
        assert (await box.resume()).state is State.RUNNING
    finally:
        await box.terminate(delete_files=True)
