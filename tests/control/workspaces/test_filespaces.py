from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.calls import ADMIN, decide_by

from carrel.config import Settings
from carrel.control.operations.call import Call
from carrel.control.plane import ControlPlane
from carrel.control.workspaces.filespace_files import NOTICE
from carrel.errors import (
    ArchiveUnavailable,
    Conflict,
    Denied,
    FileMissing,
    InvalidPath,
    InvalidRequest,
    LimitExceeded,
    NotRunning,
)
from carrel.models import CommandRequest, Limits, PolicyDocuments, SandboxRequest, State, SyncDirection
from carrel.models.files import DeleteRequest, ListRequest
from carrel.models.operations import DELETE_FILE, LIST_FILES
from carrel.policy.verdict import Verdict
from carrel.workspaces.filespace_contents import GRACE_S


async def whole(plane: ControlPlane, context: str, path: str) -> bytes:
    parts = [part async for part in plane.filespaces.read(ADMIN, context, path)]
    data = b"".join(part for part in parts if isinstance(part, bytes))
    assert parts[0] == len(data)
    return data


async def inside(plane: ControlPlane, name: str, path: str) -> bytes:
    parts = [part async for part in plane.operations.read_file(ADMIN, name, path)]
    return b"".join(part for part in parts if isinstance(part, bytes))


async def names(plane: ControlPlane, context: str) -> list[str]:
    return [file.path for file in (await plane.filespaces.list(ADMIN, context)).items]


async def test_both_ways(plane: ControlPlane) -> None:
    await plane.filespaces.write(ADMIN, "c", "in.txt", b"given", mode=0o600)  # no sandbox has ever run
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.operations.write_file(ADMIN, "c", "out.txt", b"made")
    done = await plane.filespaces.sync(ADMIN, "c")
    assert (done.direction, done.pushed, done.pulled, done.pulled_bytes) == (SyncDirection.BOTH, 1, 1, 5)
    assert await inside(plane, "c", "in.txt") == b"given" and await whole(plane, "c", "out.txt") == b"made"
    page = await plane.filespaces.list(ADMIN, "c", limit=1)
    assert [(file.path, file.mode, file.size) for file in page.items] == [("in.txt", "600", 5)]
    rest = await plane.filespaces.list(ADMIN, "c", cursor=page.next)
    assert [file.path for file in rest.items] == ["out.txt"] and rest.next is None
    assert [file.path for file in (await plane.filespaces.list(ADMIN, "c", prefix="o")).items] == ["out.txt"]
    await plane.filespaces.delete(ADMIN, "c", "in.txt")
    pulled = await plane.filespaces.sync(ADMIN, "c", SyncDirection.PULL)
    assert (pulled.pull_deleted, pulled.pushed) == (1, 0)
    with pytest.raises(FileMissing):
        await inside(plane, "c", "in.txt")
    await plane.operations.forward(ADMIN, DELETE_FILE, "c", DeleteRequest(path="out.txt"))
    assert (await plane.filespaces.sync(ADMIN, "c", SyncDirection.PUSH)).push_deleted == 1
    assert await names(plane, "c") == []


async def test_a_session_with_a_filespace_is_synced_on_start_and_stop(plane: ControlPlane) -> None:
    await plane.filespaces.write(ADMIN, "auto", "data/in", b"one")
    request = SandboxRequest(context_id="auto", filespace=True)
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, request)
    assert info.filespace and await inside(plane, "auto", "data/in") == b"one"
    await plane.operations.write_file(ADMIN, "auto", "data/out", b"two")
    await plane.upkeep.push_filespaces()
    assert await whole(plane, "auto", "data/out") == b"two"
    await plane.operations.write_file(ADMIN, "auto", "data/out", b"three")
    await plane.sessions.stop("auto")
    assert await whole(plane, "auto", "data/out") == b"three"
    await plane.filespaces.write(ADMIN, "auto", "data/in", b"four")
    await plane.sessions.deploy_or_resume(ADMIN, request)
    assert await inside(plane, "auto", "data/in") == b"four"


async def test_streams_of_any_length_become_files_or_nothing(plane: ControlPlane) -> None:
    data = os.urandom(5 << 20)

    async def pieces(broken: bool = False) -> AsyncIterator[bytes]:
        for start in range(0, len(data), 1 << 19):
            yield data[start : start + (1 << 19)]
        if broken:
            raise ConnectionError

    made = await plane.filespaces.write(ADMIN, "s", "big", pieces())
    assert made.size == len(data) and await whole(plane, "s", "big") == data
    with pytest.raises(ConnectionError):
        await plane.filespaces.write(ADMIN, "s", "broken", pieces(broken=True))
    assert await names(plane, "s") == ["big"]
    assert os.listdir(Path(plane.layout.data_dir) / "filespaces/spool") == []


async def test_what_cannot_be_a_file_is_refused(plane: ControlPlane) -> None:
    for path in ("", "/a", "a//b", "a/", ".", "a/../b", "x\0y", "n" * 256, "d/" * 2500 + "f", "\ud800", "a/.venv/x"):
        with pytest.raises(InvalidPath) as caught:
            await plane.filespaces.write(ADMIN, "p", path, b"x")
        assert caught.value.field == "path" and caught.value.hint
        with pytest.raises(InvalidPath):
            await plane.filespaces.delete(ADMIN, "p", path)
    for context in ("", "../x", "-a", "x" * 129):
        with pytest.raises(InvalidRequest):
            await plane.filespaces.list(ADMIN, context)
        with pytest.raises(InvalidRequest):
            await plane.filespaces.write(ADMIN, context, "f", b"x")
    with pytest.raises(FileMissing):
        await plane.filespaces.delete(ADMIN, "p", "absent")
    with pytest.raises(FileMissing):
        await whole(plane, "p", "absent")
    with pytest.raises(NotRunning):
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="stopped"))
        await plane.sessions.stop("stopped")
        await plane.filespaces.sync(ADMIN, "stopped")
    ephemeral, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest())
    with pytest.raises(Conflict, match="ephemeral"):
        await plane.filespaces.sync(ADMIN, ephemeral.id)


async def test_caps(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="small", limits=Limits(disk_mb=1)))
    await plane.filespaces.write(ADMIN, "small", "f", bytes(600_000))
    with pytest.raises(LimitExceeded):
        await plane.filespaces.write(ADMIN, "small", "g", bytes(600_000))
    await plane.filespaces.write(ADMIN, "small", "f", bytes(900_000))  # what it replaces makes room
    await plane.operations.write_file(ADMIN, "small", "local", bytes(500_000))
    with pytest.raises(LimitExceeded):
        await plane.filespaces.sync(ADMIN, "small")
    with pytest.raises(FileMissing):
        await inside(plane, "small", "f")
    assert await names(plane, "small") == ["f"]
    info = await plane.sessions.get("small")
    assert info.state is State.RUNNING and info.notice is not None and info.notice.startswith(NOTICE)
    await plane.filespaces.delete(ADMIN, "small", "f")
    await plane.filespaces.sync(ADMIN, "small")
    assert (await plane.sessions.get("small")).notice is None


async def test_storage_out_of_reach_is_told_and_made_up_for(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="down"))
    await plane.operations.write_file(ADMIN, "down", "f", b"x")
    archive = Path(plane.settings.archive_url)
    if archive.exists():
        shutil.rmtree(archive)
    archive.write_bytes(b"in the way")
    with pytest.raises(ArchiveUnavailable):
        await plane.filespaces.sync(ADMIN, "down")
    info = await plane.sessions.get("down")
    assert info.state is State.RUNNING and info.notice is not None and info.notice.startswith(NOTICE)
    assert await names(plane, "down") == []
    archive.unlink()
    assert (await plane.filespaces.sync(ADMIN, "down")).pushed == 1
    assert (await plane.sessions.get("down")).notice is None


async def test_a_file_that_is_hidden_is_pulled_before_a_start_and_never_into_what_runs(plane: ControlPlane) -> None:
    """A mask lies on a file: one that is put in its place by a rename would be seen inside."""
    rules = {
        "deny": ["file(read:${WORKSPACE}/key)", "file(read:${WORKSPACE}/later/**)", "file(read:${WORKSPACE}/**/.env)"]
    }
    allow = {"allow": ["shell(cat:*)", "file(write:${WORKSPACE}/**)"]}
    await plane.policy_changes.put("c", PolicyDocuments(settings={"permissions": {**allow, **rules}}), "person:ann")
    await plane.filespaces.write(ADMIN, "c", "key", b"first", mode=0o644)
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", filespace=True))

    async def seen(path: str) -> str:
        command = CommandRequest(command=["cat", path])
        return (await plane.operations.run_command(ADMIN, "c", command)).stdout

    assert await seen("key") == ""
    for path in ("key", "later/made", "deep/down/.env"):
        await plane.filespaces.write(ADMIN, "c", path, b"second")
        with pytest.raises(Conflict, match="which the policy hides") as caught:
            await plane.filespaces.sync(ADMIN, "c", SyncDirection.PULL)
        assert "stop the sandbox" in (caught.value.hint or "")
        assert await seen(path) == "", "nothing of it was written"
        await plane.operations.stop(ADMIN, "c")
        await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
        assert await seen(path) == "", "it is there now, and hidden"
        workspace = plane.sessions.live()[0].workspace
        assert Path(workspace, path).read_bytes() == b"second"
    await plane.filespaces.write(ADMIN, "c", "open", b"to all")
    assert (await plane.filespaces.sync(ADMIN, "c", SyncDirection.PULL)).pulled == 1
    assert await seen("open") == "to all"
    await plane.filespaces.write(ADMIN, "c", "key", b"third")
    plane.sessions.live()[0].masks = "unknown"  # as of a sandbox that was taken over
    with pytest.raises(Conflict):
        await plane.filespaces.sync(ADMIN, "c")


async def test_what_is_common_travels_with_the_workspace(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="t"))
    await plane.operations.write_file(ADMIN, "t", "f", b"x")
    assert await plane.workspaces.keeping.base.get("t") == b""
    await plane.filespaces.sync(ADMIN, "t")
    base = await plane.workspaces.keeping.base.get("t")
    await plane.filespaces.write(ADMIN, "t", "g", b"y")
    await plane.filespaces.sync(ADMIN, "t")
    assert await plane.workspaces.keeping.base.get("t") != base
    await plane.workspaces.keeping.base.set("t", base)
    assert await plane.workspaces.keeping.base.get("t") == base
    assert (await plane.filespaces.sync(ADMIN, "t")).conflicts == []
    await plane.workspaces.keeping.base.set("t", b"")
    assert await plane.workspaces.keeping.base.get("t") == b""
    await plane.workspaces.keeping.base.forget("t")
    assert (await plane.filespaces.sync(ADMIN, "t")).pushed == 0


async def test_a_deleted_workspace_leaves_the_filespace(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="w", filespace=True))
    await plane.operations.write_file(ADMIN, "w", "f", b"kept")
    await plane.sessions.stop("w")
    await plane.sessions.terminate(ADMIN, "w", delete_workspace=True)
    assert await names(plane, "w") == ["f"]
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="w", filespace=True))
    assert await inside(plane, "w", "f") == b"kept"
    await plane.sessions.terminate(ADMIN, "w")
    await plane.filespaces.forget(ADMIN, "w")
    await plane.filespaces.forget(ADMIN, "w")
    assert await names(plane, "w") == [] and await plane.workspaces.keeping.base.get("w") == b""
    assert not list(Path(plane.settings.archive_url).glob("filespace/ctx-w/*"))


async def test_contents_nobody_names_are_collected(plane: ControlPlane) -> None:
    first = await plane.filespaces.write(ADMIN, "g", "f", b"first")
    second = await plane.filespaces.write(ADMIN, "g", "f", b"second")
    stored = Path(plane.settings.archive_url) / "filespace/ctx-g"
    assert await plane.attachments.filespace.collect("g") == 0
    for path in stored.iterdir():
        os.utime(path, (path.stat().st_mtime - GRACE_S - 60,) * 2)
    assert await plane.attachments.filespace.collect("g") == 1
    assert [path.name for path in stored.iterdir()] == [second.hash] and first.hash != second.hash


async def test_many_syncs_at_once_go_one_after_the_other(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="m"))
    for number in range(20):
        await plane.operations.write_file(ADMIN, "m", f"f{number}", b"x")
    syncs = [asyncio.create_task(plane.filespaces.sync(ADMIN, "m")) for _ in range(4)]
    syncs[1].cancel()
    done = await asyncio.gather(*syncs, return_exceptions=True)
    assert isinstance(done[1], asyncio.CancelledError)
    assert sum(each.pushed for each in done if not isinstance(each, BaseException)) == 20
    assert len(await names(plane, "m")) == 20


async def test_everything_passes_the_door(settings: Settings) -> None:
    seen: list[tuple[str, str, object]] = []

    def decide(operation: Call) -> Verdict:
        if operation.kind == "file" or operation.name == "sync_filespace":
            seen.append((operation.kind, operation.name, operation.arguments.get("path")))
            return Verdict("deny", reason="not today")
        return Verdict()

    plane = await ControlPlane.open(settings)
    decide_by(plane, decide)
    try:
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="d"))
        for work in (
            plane.filespaces.sync(ADMIN, "d"),
            plane.filespaces.list(ADMIN, "d", prefix="p"),
            anext(plane.filespaces.read(ADMIN, "d", "f")),
            plane.filespaces.write(ADMIN, "d", "f", b"x"),
            plane.filespaces.delete(ADMIN, "d", "f"),
        ):
            with pytest.raises(Denied):
                await work
    finally:
        await plane.close()
    assert seen == [
        ("session", "sync_filespace", None),
        ("file", "filespace_list", "p"),
        ("file", "filespace_read", "f"),
        ("file", "filespace_write", "f"),
        ("file", "filespace_delete", "f"),
    ]


async def test_another_server_goes_on_with_what_was_common(nodes: list[ControlPlane]) -> None:
    first, second = nodes
    request = SandboxRequest(context_id="n", filespace=True)
    await first.sessions.deploy_or_resume(ADMIN, request)
    await first.operations.write_file(ADMIN, "n", "stays", b"1")
    await first.operations.write_file(ADMIN, "n", "goes", b"2")
    await first.sessions.stop("n")
    await second.filespaces.delete(ADMIN, "n", "goes")
    await second.filespaces.write(ADMIN, "n", "comes", b"3")
    await second.sessions.deploy_or_resume(ADMIN, request)
    listing = await second.operations.forward(ADMIN, LIST_FILES, "n", ListRequest(path="."))
    assert {"stays", "comes"} <= {file.path for file in listing.items}
    assert "goes" not in {file.path for file in listing.items}
    done = await second.filespaces.sync(ADMIN, "n")
    assert (done.pushed, done.pulled, done.conflicts) == (0, 0, [])
    assert await names(second, "n") == ["comes", "stays"]
