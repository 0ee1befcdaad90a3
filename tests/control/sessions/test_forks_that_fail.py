"""A fork that cannot be made leaves nothing, and can be tried again."""

from __future__ import annotations

import os

import pytest
from tests.support.calls import ADMIN
from tests.support.environments_ground import attach, context, sources, stocked

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.control.sessions.live import LiveSandbox
from carrel.errors import CarrelError, LimitExceeded, NotFound, PlatformError
from carrel.models import McpServerRequest, PolicyDocuments, SandboxRequest, State
from carrel.workspaces.layout import encode

RULES = {"permissions": {"allow": ["shell(echo:*)"]}}
EARLIER = {"permissions": {"allow": ["shell(true)"]}}


async def _settings(plane: ControlPlane, name: str) -> object:
    return (await plane.policies.get(name)).settings


def _files(plane: ControlPlane, name: str) -> bool:
    return os.path.exists(plane.driver.path(encode(name, ephemeral=False)))


async def test_no_room_for_its_sandbox(settings: Settings) -> None:
    plane = await ControlPlane.open(settings.model_copy(update={"max_sandboxes": 1}))
    try:
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="origin"))
        await plane.policy_changes.put("origin", PolicyDocuments(settings=RULES), "tests")
        await plane.policy_changes.put("known", PolicyDocuments(settings=EARLIER), "tests")
        await plane.secrets.put("known", "KEY", b"given-before")
        await plane.secrets.put("origin", "OTHER", b"of-the-origin")
        for name, before in (("fresh", None), ("known", EARLIER)):
            with pytest.raises(LimitExceeded):
                await plane.snapshots.fork(ADMIN, "origin", name)
            assert await _settings(plane, name) == before and not _files(plane, name)
        assert [each.name for each in (await plane.secrets.list("known")).items] == ["KEY"]
        assert (await plane.secrets.list("fresh")).items == [], "no secret stays with a fork that was not made"
    finally:
        await plane.close()


async def test_its_files_cannot_be_had(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="origin"))
    await plane.policy_changes.put("origin", PolicyDocuments(settings=RULES), "tests")
    snapshot = await plane.snapshots.take(ADMIN, "origin")
    plane.driver.delete_snapshot(snapshot.id)
    with pytest.raises(CarrelError):
        await plane.snapshots.fork(ADMIN, "origin", "twin", snapshot.id)
    assert await _settings(plane, "twin") is None and not _files(plane, "twin")
    twin = await plane.snapshots.fork(ADMIN, "origin", "twin")
    assert twin.state is State.RUNNING and await _settings(plane, "twin") == RULES


async def test_its_sandbox_does_not_start(plane: ControlPlane) -> None:
    async with stocked() as index:
        origin = await context(plane, index, "origin")
        env = await attach(plane, origin, "nail")
        await plane.mcp.add(ADMIN, origin, "notes", McpServerRequest(command=["true"]))
        let_out, failing = plane.egress.attach, True

        async def fail(box: LiveSandbox) -> None:
            if failing and box.record.context_id == "twin":
                raise PlatformError("not now")
            await let_out(box)

        plane.egress.attach = fail  # type: ignore[method-assign]
        with pytest.raises(PlatformError, match="not now"):
            await plane.snapshots.fork(ADMIN, origin, "twin")
        with pytest.raises(NotFound):
            await plane.sessions.record("twin")
        assert (await plane.policies.get("twin")).sources is None and not _files(plane, "twin")
        assert await plane.environments._store.holds("twin") == []
        assert await plane.mcp._store.list("twin") == []

        failing = False
        twin = await plane.snapshots.fork(ADMIN, origin, "twin")
        assert twin.state is State.RUNNING and (await plane.policies.get("twin")).sources == sources(index)
        assert [each.name for each in (await plane.envs.list(ADMIN, "twin")).items] == [env.name]
        assert [each.name for each in (await plane.mcp.list(ADMIN, "twin")).items] == ["notes"]
