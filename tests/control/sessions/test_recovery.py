from __future__ import annotations

import os
from dataclasses import replace

from tests.support.calls import ADMIN
from tests.support.killed import killed

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.models import CommandRequest, SandboxRequest, State
from carrel.models.files import StatRequest
from carrel.models.operations import STAT_FILE
from carrel.providers.base import Capability


async def test_shutdown_stops_and_a_new_server_resumes(settings: Settings, plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest())
    await plane.operations.write_file(ADMIN, "c", "kept", b"x")
    await plane.sessions.shutdown()
    await killed(plane)
    assert plane.sessions.live() == []
    assert list(os.listdir(plane.driver.directory)) == ["ctx-c"]
    other = await ControlPlane.open(plane.settings)
    try:
        assert (await other.sessions.get("c")).state is State.STOPPED
        await other.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
        assert (await other.operations.forward(ADMIN, STAT_FILE, "c", StatRequest(path="kept"))).size == 1
    finally:
        await other.close()


async def test_sandboxes_survive_a_stop_if_the_operator_wants_that(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    fleeting, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest())
    survives = Capability.SURVIVES_RESTART in plane.sessions.live()[0].provider.capabilities()
    started = await plane.operations.start_command(ADMIN, "c", CommandRequest(command="read line < /dev/null; echo on"))
    await plane.sessions.shutdown(survive=True)
    await killed(plane)
    other = await ControlPlane.open(plane.settings)
    try:
        assert (await other.sessions.get("c")).state is (State.RUNNING if survives else State.STOPPED)
        assert (await other.sessions.get(fleeting.id)).state is State.TERMINATED
        if survives:
            assert (await other.operations.command_result(ADMIN, "c", started.id)).stdout == "on\n"
    finally:
        await other.close()


async def test_a_new_server_takes_over_what_lives_and_cleans_the_rest(plane: ControlPlane) -> None:
    lives, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="lives"))
    dead, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="dead"))
    fleeting, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest())
    survives = Capability.SURVIVES_RESTART in plane.sessions.live()[0].provider.capabilities()
    gone = [box for box in plane.sessions.live() if box.record.id != lives.id]
    await killed(plane)  # else it would find out by itself that they are dead
    for box in gone:
        await box.provider.remove(box.handle)
    await killed(plane)  # what removed them was connected for that
    record = await plane.store.get(lives.id)
    assert record is not None
    await plane.store.insert(replace(record, id="sbx-half", context_id="half", state=State.CREATING, handle=None))
    plane.driver.create("eph-orphan", None)
    other = await ControlPlane.open(plane.settings)
    try:
        assert (await other.sessions.get("dead")).state is State.STOPPED
        assert (await other.sessions.get("half")).state is State.STOPPED
        assert (await other.sessions.get(fleeting.id)).state is State.TERMINATED
        assert dead.context_id == "dead"
        names = set(os.listdir(plane.driver.directory))
        assert names <= {"ctx-lives", "ctx-dead"}
        if survives:
            assert other.recovered.adopted == 1
            result = await other.operations.run_command(ADMIN, "lives", CommandRequest(command="echo here"))
            assert result.stdout == "here\n"
    finally:
        await other.close()
