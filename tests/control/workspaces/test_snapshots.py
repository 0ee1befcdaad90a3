from __future__ import annotations

import io
import os
import tarfile

import pytest
from tests.support.calls import ADMIN

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.errors import AlreadyExists, Conflict, NotFound, PlatformError
from carrel.models import CommandRequest, Limits, SandboxRequest, State
from carrel.store.snapshots import SnapshotRecord, SnapshotStatus, SnapshotStore
from carrel.workspaces.layout import encode


async def _write(plane: ControlPlane, name: str, text: str) -> None:
    await plane.operations.write_file(ADMIN, name, "data/file", text.encode())


async def _read(plane: ControlPlane, name: str) -> str:
    return (await plane.operations.run_command(ADMIN, name, CommandRequest(command="cat data/file"))).stdout


async def test_a_snapshot_is_restored_under_a_running_sandbox(plane: ControlPlane) -> None:
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="a:b"))
    await _write(plane, info.id, "first")
    first = await plane.snapshots.take(ADMIN, "a:b")
    assert (first.status, first.parent, first.context_id) == ("ready", None, "a:b")
    await _write(plane, info.id, "second")
    second = await plane.snapshots.take(ADMIN, info.id)
    assert second.parent == first.id
    assert [each.id for each in (await plane.snapshots.page(ADMIN, "a:b")).items] == [second.id, first.id]
    changes = await plane.snapshots.diff(ADMIN, "a:b", first.id, second.id)
    assert [(change.path, change.kind) for change in changes.items] == [("data/file", "changed")]
    restored = await plane.snapshots.restore(ADMIN, "a:b", first.id)
    assert restored.state is State.RUNNING and restored.id == info.id
    assert await _read(plane, "a:b") == "first"
    await plane.snapshots.restore(ADMIN, "a:b", second.id)
    assert await _read(plane, "a:b") == "second"


async def test_a_stopped_workspace_is_restored_and_stays_stopped(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await _write(plane, "c", "kept")
    snapshot = await plane.snapshots.take(ADMIN, "c")
    await _write(plane, "c", "lost")
    await plane.sessions.stop("c")
    assert (await plane.snapshots.restore(ADMIN, "c", snapshot.id)).state is State.STOPPED
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    assert await _read(plane, "c") == "kept"


async def test_a_fork_has_the_files_and_settings_and_goes_its_own_way(plane: ControlPlane) -> None:
    request = SandboxRequest(context_id="one", limits=Limits(processes=99), env={"A": "b"}, labels={"l": "m"})
    await plane.sessions.deploy_or_resume(ADMIN, request)
    await _write(plane, "one", "shared")
    twin = await plane.snapshots.fork(ADMIN, "one", "two")
    assert (twin.state, twin.context_id, twin.limits.processes, twin.labels) == (State.RUNNING, "two", 99, {"l": "m"})
    assert await _read(plane, "two") == "shared"
    echo = await plane.operations.run_command(ADMIN, "two", CommandRequest(command="echo $A"))
    assert echo.stdout == "b\n"
    await _write(plane, "two", "changed")
    assert await _read(plane, "one") == "shared"
    with pytest.raises(AlreadyExists):
        await plane.snapshots.fork(ADMIN, "one", "two")
    before = (await plane.snapshots.page(ADMIN, "one")).items[-1]
    await _write(plane, "one", "later")
    await plane.snapshots.fork(ADMIN, "one", "three", before.id)
    assert await _read(plane, "three") == "shared"


async def test_a_snapshot_is_a_tar(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="t"))
    await _write(plane, "t", "packed")
    snapshot = await plane.snapshots.take(ADMIN, "t")
    data = b"".join([chunk async for chunk in await plane.snapshots.export(ADMIN, "t", snapshot.id)])
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        member = archive.extractfile("data/file")
        assert member is not None and member.read() == b"packed"


async def test_what_is_not_there_or_not_ready_is_refused(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="mine"))
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="other"))
    throwaway, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest())
    with pytest.raises(Conflict, match="ephemeral"):
        await plane.snapshots.take(ADMIN, throwaway.id)
    theirs = await plane.snapshots.take(ADMIN, "other")
    for call in (
        plane.snapshots.restore(ADMIN, "mine", theirs.id),
        plane.snapshots.restore(ADMIN, "mine", "snap-absent"),
        plane.snapshots.fork(ADMIN, "mine", "new", theirs.id),
        plane.snapshots.delete(ADMIN, "mine", theirs.id),
        plane.snapshots.export(ADMIN, "mine", theirs.id),
    ):
        with pytest.raises(NotFound) as caught:
            await call
        assert caught.value.field == "snapshot_id"
    assert not os.path.exists(plane.driver.path(encode("new", ephemeral=False)))


async def test_deleting_the_files_deletes_the_snapshots(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="gone"))
    kept = await plane.snapshots.take(ADMIN, "gone")
    dropped = await plane.snapshots.take(ADMIN, "gone")
    await plane.snapshots.delete(ADMIN, "gone", dropped.id)
    assert [each.id for each in (await plane.snapshots.page(ADMIN, "gone")).items] == [kept.id]
    await plane.sessions.terminate(ADMIN, "gone", delete_workspace=True)
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="gone"))
    assert (await plane.snapshots.page(ADMIN, "gone")).items == []


async def test_a_restart_settles_what_was_being_made(settings: Settings) -> None:
    plane = await ControlPlane.open(settings)
    try:
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="r"))
        whole = await plane.snapshots.take(ADMIN, "r")
        store = SnapshotStore(plane._database)
        await store.insert(SnapshotRecord("snap-half", "r", "directory", 1.0))
        record = await store.get(whole.id)
        assert record is not None
        await store.delete(whole.id)
        await store.insert(SnapshotRecord(whole.id, "r", "directory", record.created_at))
    finally:
        await plane.close()
    plane = await ControlPlane.open(settings)
    try:
        store = SnapshotStore(plane._database)
        half, again = await store.get("snap-half"), await store.get(whole.id)
        assert half is not None and half.status is SnapshotStatus.FAILED
        assert again is not None and (again.status, again.bytes) == (SnapshotStatus.READY, whole.bytes)
    finally:
        await plane.close()


async def test_snapshot_of_a_workspace_that_could_not_be_made_tells_why(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_volume: str, _cap: int | None) -> None:
        raise PlatformError("the disk that holds /data/pool.btrfs is full")

    monkeypatch.setattr(plane.driver, "create", full)
    with pytest.raises(PlatformError, match=r"/data/pool.btrfs is full"):
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    with pytest.raises(
        Conflict, match=r"'c' has no files on this server: the disk that holds /data/pool.btrfs is full"
    ):
        await plane.snapshots.take(ADMIN, "c")
    with pytest.raises(Conflict, match="no files"):
        await plane.snapshots.fork(ADMIN, "c", "d")
