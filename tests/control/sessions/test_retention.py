from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.calls import ADMIN

from carrel.audit import Filter, chain_of
from carrel.config import Settings, load
from carrel.control.plane import ControlPlane
from carrel.control.sessions.retention import DAY_S, warning_s
from carrel.models import CommandRequest, SandboxRequest, State, TerminateRequest
from carrel.workspaces.volumes.doctor import retention

OLD = 1.0


@pytest.fixture
def settings(settings: Settings) -> Settings:
    sandbox = settings.sandbox.model_copy(update={"workspace_ttl_days": 7.0})
    return settings.model_copy(update={"sandbox": sandbox})


async def _unused(plane: ControlPlane, name: str, *, ended: bool = False) -> str:
    """A context that was used long ago; its session."""
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id=name))
    await plane.operations.run_command(ADMIN, name, CommandRequest(command="echo x > kept"))
    if ended:
        await plane.operations.terminate(ADMIN, name, TerminateRequest())
    else:
        await plane.sessions.stop(name)
    await plane.store.update(info.id, last_activity_at=OLD)
    return info.id


async def _swept(plane: ControlPlane, *ids: str) -> None:
    """Two sweeps, and between them the time that a warning gives."""
    await plane.retention.sweep()
    for each in ids:
        await plane.store.update(each, expires_at=OLD)
    await plane.retention.sweep()


def test_the_default_depends_on_who_shares_the_database() -> None:
    assert load({}, environ={}).workspace_ttl_days is None
    assert load({"database": "sqlite:////tmp/x"}, environ={}).workspace_ttl_days is None
    for url in ("postgresql://h/d", "postgres://h/d"):
        assert load({"database": url}, environ={}).workspace_ttl_days == 7.0
        assert load({"database": url, "sandbox.workspace_ttl_days": 0}, environ={}).workspace_ttl_days is None
    assert load({"sandbox.workspace_ttl_days": 2}, environ={}).workspace_ttl_days == 2.0
    assert (retention(None).found, retention(2.0).found) == ("kept for ever", "deleted after 2 days without use")
    assert (warning_s(30 * DAY_S), warning_s(DAY_S)) == (DAY_S, DAY_S / 7)


async def test_an_old_workspace_is_deleted_after_a_warning(plane: ControlPlane) -> None:
    young, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="young"))
    await plane.sessions.stop("young")
    old, running = await _unused(plane, "old"), await _unused(plane, "running")
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="running"))
    await plane.store.update(running, last_activity_at=OLD)
    await plane.retention.sweep()
    warned = await plane.sessions.get("old")
    assert warned.state is State.STOPPED and await plane.workspaces.exists("old"), "it is warned of first"
    assert warned.expires_at is not None and warned.notice is not None and "deleted on" in warned.notice
    await plane.retention.sweep()
    assert await plane.workspaces.exists("old"), "not before the time of the warning has passed"
    await plane.store.update(old, expires_at=OLD)
    await plane.retention.sweep()
    assert (await plane.sessions.get(old)).state is State.TERMINATED
    left = {name: await plane.workspaces.exists(name) for name in ("old", "young", "running")}
    assert left == {"old": False, "young": True, "running": True}
    assert (await plane.sessions.get(young.id)).notice is None
    await plane.audit.flush()
    found = (await plane.audit.search(Filter(chain=chain_of("old")), limit=100)).items
    assert [each.name for each in found if each.actor == "carrel"] == ["expire_workspace", "warn_of_deletion"]


async def test_use_after_the_warning_keeps_the_workspace(plane: ControlPlane) -> None:
    old = await _unused(plane, "old")
    await plane.retention.sweep()
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="old"))
    assert (info.expires_at, info.notice) == (None, None)
    await plane.sessions.stop("old")
    await _swept(plane, old)
    assert await plane.workspaces.exists("old")
    assert (await plane.sessions.get("old")).expires_at is None


@pytest.mark.parametrize("ended", [False, True])
async def test_a_snapshot_that_was_asked_for_outlives_the_workspace(plane: ControlPlane, ended: bool) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.operations.run_command(ADMIN, "c", CommandRequest(command="echo asked > kept"))
    asked = await plane.snapshots.take(ADMIN, "c")
    old = await _unused(plane, "c", ended=ended)
    await _swept(plane, old)
    assert not await plane.workspaces.exists("c")
    assert [each.id for each in (await plane.workspaces._store.all_ready("c"))] == [asked.id]
    again = await plane.store.get(old)
    assert again is not None and again.expires_at is None
    await plane.retention.sweep()
    assert (await plane.store.get(old)) == again, "there is nothing more to warn of"
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    result = await plane.operations.run_command(ADMIN, "c", CommandRequest(command="cat kept"))
    assert result.stdout == "asked\n", "the next start brings it back"


async def test_the_files_of_a_terminated_context_are_swept_too(plane: ControlPlane) -> None:
    old = await _unused(plane, "old", ended=True)
    assert await plane.workspaces.exists("old")
    await plane.retention.sweep()
    assert (await plane.sessions.get(old)).expires_at is not None
    await plane.store.update(old, expires_at=OLD)
    await plane.retention.sweep()
    assert not await plane.workspaces.exists("old")


async def test_without_a_time_to_live_everything_is_kept(settings: Settings) -> None:
    sandbox = settings.sandbox.model_copy(update={"workspace_ttl_days": None})
    plane = await ControlPlane.open(settings.model_copy(update={"sandbox": sandbox}))
    try:
        ids = [await _unused(plane, "stopped"), await _unused(plane, "ended", ended=True)]
        await _swept(plane, *ids)
        assert [await plane.workspaces.exists(name) for name in ("stopped", "ended")] == [True, True]
        report = await plane.host_report()
        assert "kept for ever" in [check.found for check in report.checks]
    finally:
        await plane.close()


async def test_a_template_with_rules_outlives_the_sweep(settings: Settings, plane: ControlPlane) -> None:
    folder = Path(settings.data_dir) / "templates" / "careful"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({"permissions": {"allow": ["shell(ls:*)"]}}))
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", template="careful"))
    await plane.sessions.stop("c")
    await plane.store.update(info.id, last_activity_at=OLD)
    await _swept(plane, info.id)
    assert not await plane.workspaces.exists("c")
    assert await plane.templates.of("c") == "careful", "nobody gets rid of rules by waiting"


async def test_metrics_of_stopped_workspaces_are_there_after_a_restart(settings: Settings) -> None:
    plane = await ControlPlane.open(settings)
    try:
        info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="team:c"))
        await plane.operations.run_command(
            ADMIN, "team:c", CommandRequest(command="head -c 3000000 /dev/urandom > data/x")
        )
        await plane.sessions.stop("team:c")
        await _unused(plane, "ended", ended=True)
    finally:
        await plane.close()
    plane = await ControlPlane.open(settings)
    try:
        await plane.store.update(info.id, used_bytes=None)  # as an older carrel left it
        await plane.retention.recall()
        text = plane.metrics.render()[0].decode()
        assert 'carrel_workspace_bytes{agent="",context_id="team:c",namespace="team"} 3' in text
        assert 'carrel_workspace_bytes{agent="",context_id="ended",namespace="default"}' in text
        again = await plane.store.get(info.id)
        assert again is not None and (again.used_bytes or 0) >= 3_000_000
        assert f'{{agent="",context_id="ended",namespace="default"}} {OLD}' in text
    finally:
        await plane.close()
