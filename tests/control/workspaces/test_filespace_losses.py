"""Ways in which a filespace once lost files, or got what is none."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tests.support.calls import ADMIN

from carrel.control.plane import ControlPlane
from carrel.control.sessions.attachments import LaunchPlan
from carrel.control.workspaces.filespace_bases import FilespaceBases
from carrel.errors import PlatformError
from carrel.models import SandboxRequest, SyncDirection

REQUEST = SandboxRequest(context_id="c", filespace=True)


async def names(plane: ControlPlane) -> list[str]:
    return [file.path for file in (await plane.filespaces.list(ADMIN, "c")).items]


async def test_a_kill_between_deleting_the_volume_and_forgetting_the_base(plane: ControlPlane) -> None:
    """What `terminate(delete_files=True)` leaves when the server is killed after `delete_volume`."""
    await plane.filespaces.write(ADMIN, "c", "precious", b"x")
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    record = await plane.sessions.record("c")
    await plane.sessions.terminate(ADMIN, "c", snapshot=False)
    await plane.workspaces.discard(record)  # ... killed here: the base is still there
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    await plane.filespaces.sync(ADMIN, "c", SyncDirection.BOTH)
    assert await names(plane) == ["precious"]


async def test_a_start_that_fails_after_the_pull(plane: ControlPlane) -> None:
    """No kill needed: the new volume is taken back, what the sync remembers of it is not."""
    await plane.filespaces.write(ADMIN, "c", "precious", b"x")
    filespace = plane.attachments.filespace
    pull = filespace.prepare

    async def pull_and_fail(plan: LaunchPlan, workspace: str) -> LaunchPlan:
        await pull(plan, workspace)
        raise PlatformError("the host is out of something")

    filespace.prepare = pull_and_fail  # type: ignore[method-assign]
    try:
        await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    except PlatformError:
        pass
    filespace.prepare = pull  # type: ignore[method-assign]
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    await plane.filespaces.sync(ADMIN, "c", SyncDirection.BOTH)
    assert await names(plane) == ["precious"]


async def test_a_push_while_the_workspace_is_deleted(plane: ControlPlane) -> None:
    """A push by the janitor that has begun sees the files go, and deletes them in the filespace."""
    await plane.filespaces.write(ADMIN, "c", "precious", b"x")
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    box = plane.sessions.live()[0]
    async with plane.workspaces.keeping.still("c"):  # a sync is under way
        ending = asyncio.ensure_future(plane.sessions.terminate(ADMIN, "c", delete_workspace=True))
        while plane.sessions.live():  # the sandbox has ended, its files come next
            await asyncio.sleep(0.01)
        assert not ending.done()
        assert os.path.exists(box.workspace)
    await ending


async def test_what_is_remembered_is_written_aside_and_left_by_a_kill(tmp_path: Path) -> None:
    from carrel.workspaces.filespace_sync import save_base

    bases = str(tmp_path / "bases")
    FilespaceBases(bases, alone=True)
    pid = os.fork()
    if pid == 0:  # killed before the rename
        os.rename = lambda *_, **__: os._exit(0)  # type: ignore[assignment]
        save_base(os.path.join(bases, "ctx-c"), b"x")
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.listdir(bases)
    FilespaceBases(bases, alone=True)  # the next start
    assert os.listdir(bases) == []


async def test_a_file_that_the_supervisor_is_writing_is_no_file_yet(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    await plane.operations.write_file(ADMIN, "c", ".carrel-" + "0" * 32, b"half")  # the name of a supervisor's draft
    await plane.filespaces.sync(ADMIN, "c", SyncDirection.PUSH)
    assert await names(plane) == []
