from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.support.calls import ADMIN

from carrel.control.plane import ControlPlane
from carrel.errors import ArchiveUnavailable, LimitExceeded, PlatformError
from carrel.models import SandboxRequest, State
from carrel.models.files import StatRequest
from carrel.models.operations import STAT_FILE
from carrel.providers.base import Handle, Launch

REQUEST = SandboxRequest(context_id="c")


async def test_a_start_that_fails_leaves_nothing_and_may_be_repeated(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_launch: Launch) -> Handle:
        raise PlatformError("no more processes")

    for provider in plane.providers.values():
        monkeypatch.setattr(provider, "start", broken)
    with pytest.raises(PlatformError, match="no more processes"):
        await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    with pytest.raises(PlatformError, match="no more processes"):
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest())
    assert plane.driver.volumes() == [] and plane.sessions.live() == []
    failed = await plane.sessions.record("c")
    assert (failed.state, failed.error, failed.lease_owner) == (State.ERROR, "no more processes", None)
    monkeypatch.undo()
    assert (await plane.sessions.deploy_or_resume(ADMIN, REQUEST))[0].state is State.RUNNING


async def test_what_was_there_stays_when_a_resume_fails(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    await plane.operations.write_file(ADMIN, "c", "kept", b"x")
    await plane.sessions.stop("c")

    async def cut(_launch: Launch) -> Handle:
        raise asyncio.CancelledError

    for provider in plane.providers.values():
        monkeypatch.setattr(provider, "start", cut)
    with pytest.raises(asyncio.CancelledError):
        await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    monkeypatch.undo()
    await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    assert (await plane.operations.forward(ADMIN, STAT_FILE, "c", StatRequest(path="kept"))).size == 1


async def test_a_filespace_out_of_reach_does_not_keep_a_sandbox_from_starting(plane: ControlPlane) -> None:
    async def down(*_: object) -> None:
        raise ArchiveUnavailable("the bucket cannot be reached")

    plane.attachments.filespace.sync = down  # type: ignore[attr-defined]
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", filespace=True))
    assert info.state is State.RUNNING
    assert info.notice == "the filespace could not be synced: the bucket cannot be reached"


async def test_no_more_than_the_server_may_have(plane: ControlPlane) -> None:
    most = plane.settings.max_sandboxes
    results = await asyncio.gather(
        *(plane.sessions.deploy_or_resume(ADMIN, SandboxRequest()) for _ in range(most + 3)), return_exceptions=True
    )
    assert sum(isinstance(result, LimitExceeded) for result in results) == 3
    assert len(plane.sessions.live()) == most


async def test_a_record_left_in_the_middle_of_something_is_started_anew(plane: ControlPlane) -> None:
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
    await plane.sessions.stop("c")
    for state in (State.CREATING, State.IDLE_STOPPING, State.RUNNING, State.ERROR):
        await plane.store.update(info.id, state=state)
        again, started = await plane.sessions.deploy_or_resume(ADMIN, REQUEST)
        assert started and (again.id, again.state) == (info.id, State.RUNNING)
        record = await plane.sessions.record("c")
        assert replace(record, handle=None).node == plane.node
        await plane.sessions.stop("c")
