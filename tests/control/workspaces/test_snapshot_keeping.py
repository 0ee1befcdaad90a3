from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.calls import ADMIN

from carrel.control.plane import ControlPlane
from carrel.control.workspaces.snapshot_keeping import KEPT, context_of, volume_of
from carrel.errors import Conflict, NotFound, PlatformError
from carrel.models import SandboxRequest, State
from carrel.store.snapshots import SnapshotStatus, SnapshotStore

REQUEST = SandboxRequest(context_id="a:b")


async def test_names(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest())
    kept, fleeting = await plane.sessions.record("a:b"), await plane.sessions.record(info.id)
    assert (context_of(kept), volume_of(kept), volume_of(fleeting)) == ("a:b", "ctx-a+b", f"eph-{info.id}")
    with pytest.raises(Conflict, match="keeps nothing"):
        context_of(fleeting)


async def test_nothing_is_synced_while_a_snapshot_is_taken(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    record = await plane.sessions.record("a:b")
    async with plane.workspaces.keeping.still("a:b"):
        taking = asyncio.ensure_future(plane.workspaces.keeping.take(record, "request"))
        async with plane.workspaces.keeping.still("other"):
            assert not taking.done()
    assert (await taking).status is SnapshotStatus.READY


async def test_a_snapshot_that_fails_keeps_the_last_good_one_and_makes_the_session_say_so(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    good = await plane.snapshots.take(ADMIN, "a:b")

    def full(*_: object) -> None:
        raise PlatformError("cannot take the snapshot: No space left on device")

    monkeypatch.setattr(plane.driver, "snapshot", full)
    with pytest.raises(PlatformError, match="No space left"):
        await plane.snapshots.take(ADMIN, "a:b")
    stopped = await plane.sessions.stop("a:b")
    assert stopped.state is State.ERROR
    assert stopped.error is not None and "No space left" in stopped.error
    assert stopped.snapshot == good.id
    monkeypatch.undo()
    assert (await plane.sessions.deploy_or_resume(ADMIN, REQUEST))[0].state is State.RUNNING


async def test_a_deletion_that_was_cut_short_is_finished(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    taken = await plane.snapshots.take(ADMIN, "a:b")
    store = SnapshotStore(plane._database)
    await store.start_deletion("a:b", taken.id)
    with pytest.raises(Conflict):
        await plane.snapshots.restore(ADMIN, "a:b", taken.id)
    await plane.upkeep.catch_up()
    assert await store.get(taken.id) is None
    assert plane.driver.snapshots() == []


async def test_the_last_archived_snapshot_stays_though_it_is_old(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    record = await plane.sessions.record("a:b")
    keeping = plane.workspaces.keeping
    archived = await keeping.take(record, "checkpoint")
    await keeping.archive(archived)
    for _ in range(KEPT + 1):
        await keeping.take(record, "checkpoint")
    assert await keeping.prune("a:b")
    left = [snapshot.id for snapshot in await SnapshotStore(plane._database).all_ready("a:b")]
    assert len(left) == KEPT + 1 and left[-1] == archived.id


async def test_a_fork_does_not_send_its_origins_content_again(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    await plane.operations.write_file(ADMIN, "a:b", "big", bytes(range(256)) * 4096)
    await plane.snapshots.take(ADMIN, "a:b")
    await plane.upkeep.catch_up()
    archive = Path(plane.layout.data_dir) / "archive"
    before = sum(path.stat().st_size for path in archive.rglob("*") if path.is_file())
    await plane.snapshots.fork(ADMIN, "a:b", "twin")
    await plane.snapshots.take(ADMIN, "twin")
    await plane.upkeep.catch_up()
    after = sum(path.stat().st_size for path in archive.rglob("*") if path.is_file())
    assert after - before < 100_000


async def test_a_snapshot_in_use_is_deleted_when_its_last_user_has_left(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    await plane.operations.write_file(ADMIN, "a:b", "file", b"x" * 3_000_000)
    taken = await plane.snapshots.take(ADMIN, "a:b")
    first, second = [await plane.snapshots.export(ADMIN, "a:b", taken.id) for _ in range(2)]
    await plane.snapshots.delete(ADMIN, "a:b", taken.id)
    assert [info.error for info in (await plane.snapshots.page(ADMIN, "a:b")).items] == ["it is being deleted"]
    with pytest.raises((Conflict, NotFound)):
        await plane.snapshots.export(ADMIN, "a:b", taken.id)
    assert len(b"".join([piece async for piece in first])) > 3_000_000
    assert taken.id in plane.driver.snapshots()
    await second.aclose()  # type: ignore[attr-defined]
    assert taken.id not in plane.driver.snapshots()
    assert (await plane.snapshots.page(ADMIN, "a:b")).items == []


async def test_an_old_automatic_snapshot_can_be_restored_though_the_stop_takes_another(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    record = await plane.sessions.record("a:b")
    ids = []
    for number in range(KEPT):
        await plane.operations.write_file(ADMIN, "a:b", "file", str(number).encode())
        ids.append((await plane.workspaces.keeping.take(record, "checkpoint")).id)
        await plane.workspaces.keeping.archive_and_prune(await plane.snapshots._ready(ids[-1], "a:b"))
    await plane.snapshots.restore(ADMIN, "a:b", ids[0])
    assert [piece async for piece in plane.operations.read_file(ADMIN, "a:b", "file")] == [1, b"0"]
