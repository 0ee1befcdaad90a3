from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.calls import ADMIN
from tests.support.s3 import S3Server

from carrel.config import Settings, load
from carrel.control.plane import ControlPlane
from carrel.control.workspaces.snapshot_keeping import KEPT
from carrel.errors import Conflict, LimitExceeded, NotFound, SnapshotDamaged
from carrel.models import CommandRequest, Limits, SandboxRequest, State
from carrel.models.files import StatRequest
from carrel.models.operations import STAT_FILE
from carrel.workspaces.layout import encode

REQUEST = SandboxRequest(context_id="c")


@pytest.fixture(params=["directory", "btrfs"])
async def plane(request: pytest.FixtureRequest, settings: Settings) -> AsyncIterator[ControlPlane]:
    plane = await ControlPlane.open(settings.model_copy(update={"volumes": request.param}))
    yield plane
    await plane.close()


async def _write(plane: ControlPlane, text: str, name: str = "c") -> None:
    await plane.operations.write_file(ADMIN, name, "file", text.encode())


async def _read(plane: ControlPlane, name: str = "c") -> str:
    return (await plane.operations.run_command(ADMIN, name, CommandRequest(command="cat file"))).stdout


async def test_a_stop_keeps_a_snapshot_in_the_archive_and_a_resume_has_the_files(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    await _write(plane, "one")
    stopped = await plane.sessions.stop("c")
    assert (stopped.state, stopped.notice, stopped.error) == (State.STOPPED, None, None)
    [snapshot] = (await plane.snapshots.page(ADMIN, "c")).items
    assert (snapshot.id, snapshot.status, snapshot.reason, snapshot.archived) == (
        stopped.snapshot,
        "ready",
        "stop",
        True,
    )
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    assert await _read(plane) == "one"


async def test_only_the_newest_of_those_nobody_asked_for_stay(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    wanted = await plane.snapshots.take(ADMIN, "c")
    record = await plane.sessions.record("c")
    for number in range(KEPT + 2):
        await _write(plane, str(number))
        await plane.snapshots.checkpoint(record)
    found = (await plane.snapshots.page(ADMIN, "c")).items
    assert [each.reason for each in found] == ["checkpoint"] * KEPT + ["request"]
    assert found[-1].id == wanted.id
    assert set(plane.driver.snapshots()) == {each.id for each in found}
    await plane.snapshots.restore(ADMIN, "c", found[0].id)
    assert await _read(plane) == str(KEPT + 1)


async def test_a_lost_workspace_comes_back_from_the_archive(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    await _write(plane, "kept")
    stopped = await plane.sessions.stop("c")
    assert stopped.snapshot is not None
    plane.driver.delete_volume("ctx-c")
    plane.driver.delete_snapshot(stopped.snapshot)
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    assert await _read(plane) == "kept"


async def test_a_snapshot_that_is_only_in_the_archive_can_do_what_others_can(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    await _write(plane, "one")
    first = await plane.snapshots.take(ADMIN, "c")
    await plane.operations.write_file(ADMIN, "c", "more", b"m")
    second = await plane.snapshots.take(ADMIN, "c")
    await plane.upkeep.catch_up()
    assert all(each.archived for each in (await plane.snapshots.page(ADMIN, "c")).items)
    plane.driver.delete_snapshot(first.id)
    changes = await plane.snapshots.diff(ADMIN, "c", first.id, second.id)
    assert [(each.path, each.kind) for each in changes.items] == [("more", "added")]
    tar = b"".join([piece async for piece in await plane.snapshots.export(ADMIN, "c", first.id)])
    assert b"file" in tar and b"one" in tar
    await plane.snapshots.fork(ADMIN, "c", "d", first.id)
    assert await _read(plane, "d") == "one"
    with pytest.raises(NotFound):
        await plane.operations.forward(ADMIN, STAT_FILE, "d", StatRequest(path="more"))
    await plane.snapshots.restore(ADMIN, "c", first.id)
    with pytest.raises(NotFound):
        await plane.operations.forward(ADMIN, STAT_FILE, "c", StatRequest(path="more"))
    assert not [name for name in os.listdir(plane.layout.cache) if name.startswith("snapshot-")]


async def test_the_last_good_snapshot_is_used_when_the_newest_is_damaged(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    await _write(plane, "good")
    await plane.sessions.stop("c")
    archive = Path(plane.layout.data_dir) / "archive"
    good = {path for path in archive.rglob("*") if path.is_file()}
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    await _write(plane, "damaged")
    newest = (await plane.sessions.stop("c")).snapshot
    assert newest is not None
    for path in set(archive.rglob("*")) - good:
        if path.is_file() and newest not in path.name:  # the content, not the manifest
            path.write_bytes(path.read_bytes()[:-8])
    plane.driver.delete_volume("ctx-c")
    plane.driver.delete_snapshot(newest)
    resumed, _ = await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    assert await _read(plane) == "good"
    assert resumed.notice is not None and newest in resumed.notice and "last good" in resumed.notice


async def test_nothing_whole_left_is_an_error_and_not_an_empty_workspace(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    stopped = await plane.sessions.stop("c")
    assert stopped.snapshot is not None
    plane.driver.delete_volume("ctx-c")
    plane.driver.delete_snapshot(stopped.snapshot)
    shutil.rmtree(Path(plane.layout.data_dir) / "archive")
    with pytest.raises(SnapshotDamaged, match=stopped.snapshot):
        await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    assert (await plane.sessions.get("c")).state is State.ERROR
    assert not plane.driver.exists("ctx-c")
    await plane.sessions.terminate(ADMIN, "c", delete_workspace=True)
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)


async def test_deleting_leaves_nothing(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    await _write(plane, "x")
    await plane.sessions.stop("c")
    await plane.sessions.terminate(ADMIN, "c", delete_workspace=True)
    assert plane.driver.volumes() == plane.driver.snapshots() == []
    archive = Path(plane.layout.data_dir) / "archive"
    assert not [path for path in archive.rglob("*ctx-c*") if path.is_file()]


@pytest.mark.parametrize(("snapshot", "kept"), [(None, 1), (True, 1), (False, 0)])
async def test_terminate_takes_a_last_snapshot_unless_told_not_to(
    plane: ControlPlane, snapshot: bool | None, kept: int
) -> None:
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    await plane.sessions.terminate(ADMIN, "c", "done", snapshot=snapshot)
    assert len((await plane.snapshots.page(ADMIN, info.id)).items) == kept


async def test_a_workspace_holds_no_more_than_its_cap(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", limits=Limits(disk_mb=20)))
    if plane.driver.kernel_quota:
        result = await plane.operations.run_command(
            ADMIN, "c", CommandRequest(command="head -c 100M /dev/urandom > big")
        )
        assert not result.ok and "quota" in result.stderr.lower()
        with pytest.raises(LimitExceeded):
            await plane.operations.write_file(ADMIN, "c", "more", os.urandom(4 << 20))
    usage = await plane.sessions.usage("c")
    assert usage.limit_bytes == 20 << 20
    assert usage.enforced_by == ("kernel" if plane.driver.kernel_quota else "watch")
    await plane.sessions.stop("c")
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", limits=Limits(disk_mb=40)))
    assert plane.driver.cap(encode("c", ephemeral=False)) == 40 << 20


async def test_a_context_moves_to_another_server_and_back(nodes: list[ControlPlane]) -> None:
    a, b = nodes
    await a.sessions.deploy_or_resume(ADMIN, REQUEST)
    await _write(a, "from a")
    first = await a.snapshots.take(ADMIN, "c")
    await a.upkeep.catch_up()
    await a.sessions.stop("c")
    moved, started = await b.sessions.deploy_or_resume(ADMIN, REQUEST)
    assert started and moved.node == "b"
    assert await _read(b) == "from a"
    await _write(b, "from b")
    await b.sessions.stop("c")
    await a.sessions.deploy_or_resume(ADMIN, REQUEST)
    assert await _read(a) == "from b", "what lay there of an earlier time is not taken for the newest"
    await a.sessions.stop("c")
    assert b.driver.exists("ctx-c")
    await b.retention.sweep()
    assert not b.driver.exists("ctx-c"), "the copy that is of no use is removed"
    restored = await b.snapshots.restore(ADMIN, "c", first.id)
    assert (restored.state, restored.node) == (State.STOPPED, "b")
    await b.sessions.deploy_or_resume(ADMIN, REQUEST)
    assert await _read(b) == "from a"


async def test_the_newest_files_are_waited_for_while_their_server_cannot_archive_them(
    node_settings: list[Settings],
) -> None:
    archive = Path(node_settings[0].data_dir).parent / "archive"
    broken = node_settings[0].model_copy(update={"archive": None})
    flags = {"archive": str(Path(node_settings[0].data_dir) / "server.db" / "no-directory")}
    a = await ControlPlane.open(broken.model_copy(update={"archive": load(flags, environ={}).archive}))
    b = await ControlPlane.open(node_settings[1])
    try:
        Path(flags["archive"]).parent.write_text("a file in the way")
        await a.sessions.deploy_or_resume(ADMIN, REQUEST)
        await _write(a, "only on a")
        stopped = await a.sessions.stop("c")
        assert stopped.state is State.STOPPED, "work goes on without the archive"
        assert stopped.notice is not None and "snapshots wait on this server" in stopped.notice
        with pytest.raises(Conflict, match="server 'a' and not in the archive yet"):
            await b.sessions.deploy_or_resume(ADMIN, REQUEST)
        assert (await b.sessions.get("c")).node == "a"
        Path(flags["archive"]).parent.unlink()
        Path(flags["archive"]).parent.mkdir()
        archive.mkdir(exist_ok=True)
        Path(flags["archive"]).symlink_to(archive)
        await a.upkeep.catch_up()
        assert (await a.sessions.get("c")).notice is None
        await b.sessions.deploy_or_resume(ADMIN, REQUEST)
        assert await _read(b) == "only on a"
    finally:
        await b.close()
        await a.close()


async def test_a_bucket_that_is_out_of_reach_is_caught_up_with_and_another_server_resumes_from_it(
    node_settings: list[Settings], s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    archive = load({"archive": s3.url(uuid.uuid4().hex)}, environ={}).archive
    a, b = [await ControlPlane.open(each.model_copy(update={"archive": archive})) for each in node_settings]
    try:
        await a.sessions.deploy_or_resume(ADMIN, REQUEST)
        await _write(a, "before")
        await a.snapshots.checkpoint(await a.sessions.record("c"))
        assert (await a.sessions.get("c")).notice is None
        s3.stop()
        try:
            await _write(a, "after")
            await a.snapshots.checkpoint(await a.sessions.record("c"))
            notice = (await a.sessions.get("c")).notice
            assert notice is not None and "snapshots wait on this server" in notice
            stopped = await a.sessions.stop("c")
            assert (stopped.state, stopped.error) == (State.STOPPED, None)
        finally:
            s3.start()
        await a.upkeep.catch_up()
        assert (await a.sessions.get("c")).notice is None
        await b.sessions.deploy_or_resume(ADMIN, REQUEST)
        assert await _read(b) == "after"
    finally:
        await b.close()
        await a.close()
