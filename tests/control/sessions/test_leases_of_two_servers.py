from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from tests.support.calls import ADMIN
from tests.support.killed import killed

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.errors import Conflict, NotRunning, PlatformError, RunsElsewhere
from carrel.models import CommandRequest, SandboxRequest, State
from carrel.store.clock import database_clock
from carrel.store.leases import LeaseStore

REQUEST = SandboxRequest(context_id="c")


async def _let_leases_end(plane: ControlPlane, seconds: float = 3600.0) -> None:
    """As if the server had said nothing for so long."""
    leases = LeaseStore(plane._database, lambda: database_clock() - seconds)
    assert await leases.renew_all(plane.node, 1.0)


async def test_a_session_is_on_one_server_at_a_time(nodes: list[ControlPlane]) -> None:
    a, b = nodes
    info, started = await a.sessions.deploy_or_resume(ADMIN, REQUEST)
    assert started and info.node == "a"
    for call in (
        b.sessions.deploy_or_resume(ADMIN, REQUEST),
        b.sessions.stop("c"),
        b.sessions.terminate(ADMIN, "c"),
        b.sessions.find("c"),
        b.sessions.usage("c"),
        b.snapshots.take(ADMIN, "c"),
    ):
        with pytest.raises(RunsElsewhere, match="'a'") as caught:
            await call
        assert caught.value.extra["node"] == "a"
    assert (await b.sessions.get("c")).state is State.RUNNING
    await a.upkeep.renew_leases()
    await b.upkeep.renew_leases()
    assert (await a.operations.run_command(ADMIN, "c", CommandRequest(command="true"))).ok


async def test_many_at_once_on_two_servers_make_one_sandbox(nodes: list[ControlPlane]) -> None:
    calls = [nodes[number % 2].sessions.deploy_or_resume(ADMIN, REQUEST) for number in range(20)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    made = [result for result in results if not isinstance(result, BaseException)]
    assert len({info.id for info, _ in made}) == 1
    assert sum(started for _, started in made) == 1
    assert all(isinstance(result, RunsElsewhere) for result in results if isinstance(result, BaseException))
    assert sorted(len(plane.sessions.live()) for plane in nodes) == [0, 1]
    volumes = [name for plane in nodes for name in os.listdir(plane.driver.directory)]
    assert volumes == ["ctx-c"], "what lost the race left nothing"


async def test_a_server_whose_lease_was_taken_gives_its_sandbox_up(nodes: list[ControlPlane]) -> None:
    a, b = nodes
    info, _ = await a.sessions.deploy_or_resume(ADMIN, REQUEST)
    await a.operations.write_file(ADMIN, "c", "kept", b"archived")
    await a.snapshots.checkpoint(await a.sessions.record("c"))
    await a.operations.write_file(ADMIN, "c", "kept", b"lost with its server")
    await _let_leases_end(a)
    resumed, started = await b.sessions.deploy_or_resume(ADMIN, REQUEST)
    assert (resumed.id, resumed.node, started) == (info.id, "b", True)
    assert (await b.operations.run_command(ADMIN, "c", CommandRequest(command="cat kept"))).stdout == "archived"
    with pytest.raises(Conflict, match="lease"):
        await a.snapshots._notes.write(await a.sessions.record("c"), notice="a does not know yet")
    await a.upkeep.renew_leases()
    assert a.sessions.live() == []
    assert (await b.sessions.get("c")).state is State.RUNNING
    await b.upkeep.renew_leases()
    assert (await b.operations.run_command(ADMIN, "c", CommandRequest(command="true"))).ok


async def test_a_server_that_was_away_does_not_go_on_after_a_second_server_is_gone_too(
    nodes: list[ControlPlane],
) -> None:
    a, b = nodes
    await a.sessions.deploy_or_resume(ADMIN, REQUEST)
    before = await a.sessions.record("c")
    await _let_leases_end(a)
    await b.sessions.deploy_or_resume(ADMIN, REQUEST)
    await b.operations.write_file(ADMIN, "c", "answered", b"by b")
    await _let_leases_end(b)
    with pytest.raises(RunsElsewhere):
        await a.sessions.adopt(before)  # as a recovery that read the record before
    await a.upkeep.renew_leases()
    assert a.sessions.live() == [], "its files are older than what b answered"
    found = await a.sessions.record("c")
    assert (found.node, found.lease_owner) == ("b", "b")
    await b.upkeep.renew_leases()
    assert (await b.operations.run_command(ADMIN, "c", CommandRequest(command="cat answered"))).stdout == "by b"


async def test_a_late_renewal_is_no_loss_when_nobody_took_the_session(nodes: list[ControlPlane]) -> None:
    a, _ = nodes
    await a.sessions.deploy_or_resume(ADMIN, REQUEST)
    box = await a.sessions.find("c")
    fence = box.record.fence
    await _let_leases_end(a)
    box.leased_until = 0.0
    with pytest.raises(PlatformError, match="could not be renewed"):
        await a.operations.run_command(ADMIN, "c", CommandRequest(command="true"))
    await a.upkeep.renew_leases()
    assert box.record.fence > fence
    assert (await a.operations.run_command(ADMIN, "c", CommandRequest(command="true"))).ok
    await a.sessions.stop("c")


async def test_the_sessions_of_a_silent_server_are_settled(nodes: list[ControlPlane]) -> None:
    a, b = nodes
    await a.sessions.deploy_or_resume(ADMIN, REQUEST)
    fleeting, _ = await a.sessions.deploy_or_resume(ADMIN, SandboxRequest())
    await b.upkeep.renew_leases()
    assert (await b.sessions.get("c")).state is State.RUNNING, "its lease holds"
    await _let_leases_end(a)
    await b.upkeep.renew_leases()
    found = await b.sessions.get("c")
    assert (found.state, found.notice) == (State.STOPPED, "server 'a' no longer answers")
    assert (await b.sessions.get(fleeting.id)).state is State.TERMINATED
    resumed, _ = await b.sessions.deploy_or_resume(ADMIN, REQUEST)
    assert resumed.notice is not None and "had archived nothing" in resumed.notice
    await a.upkeep.renew_leases()
    assert a.sessions.live() == [], "it is shut out even if it comes back"
    assert (await b.sessions.get("c")).state is State.RUNNING


async def test_a_server_that_was_thought_dead_and_is_back_goes_on(nodes: list[ControlPlane]) -> None:
    a, b = nodes
    await a.sessions.deploy_or_resume(ADMIN, REQUEST)
    await _let_leases_end(a)
    await b.upkeep.renew_leases()
    assert (await b.sessions.get("c")).state is State.STOPPED
    await a.upkeep.renew_leases()
    found = await b.sessions.get("c")
    assert (found.state, found.node, found.notice) == (State.RUNNING, "a", None)
    assert (await a.operations.run_command(ADMIN, "c", CommandRequest(command="true"))).ok
    with pytest.raises(RunsElsewhere):
        await b.sessions.deploy_or_resume(ADMIN, REQUEST)


async def test_a_restarted_server_has_its_sessions_back_at_once(node_settings: list[Settings]) -> None:
    first = await ControlPlane.open(node_settings[0])
    await first.sessions.deploy_or_resume(ADMIN, REQUEST)
    fence = (await first.sessions.record("c")).fence
    await killed(first)
    second = await ControlPlane.open(node_settings[0])  # as if the first had been killed
    try:
        assert second.recovered.adopted == 1
        assert (await second.sessions.record("c")).fence > fence
        with pytest.raises(Conflict, match="lease"):
            await first.snapshots._notes.write(await first.sessions.record("c"), notice="a ghost")
    finally:
        await second.close()
        await first.close()


async def test_a_session_that_is_being_taken_over_does_not_run_yet(nodes: list[ControlPlane]) -> None:
    a, b = nodes
    await a.sessions.deploy_or_resume(ADMIN, REQUEST)
    await _let_leases_end(a)
    with pytest.raises(NotRunning, match="'a', which no longer answers"):
        await b.sessions.find("c")
    taken = await b.sessions._leases.take(await b.sessions.record("c"))  # as at the begin of a start
    with pytest.raises(NotRunning):
        await b.sessions.find("c")
    await b.sessions._leases.hand_back(taken, "a")
    await a.upkeep.renew_leases()
    with pytest.raises(RunsElsewhere, match="'a'"):
        await b.sessions.find("c")


async def test_a_start_that_loses_its_lease_leaves_the_session_to_the_other(
    nodes: list[ControlPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = nodes
    slots = a.sessions._starting._slots
    start = slots.start

    async def robbed(*arguments: Any, **more: Any) -> Any:
        handle = await start(*arguments, **more)
        await _let_leases_end(a)
        await b.sessions.deploy_or_resume(ADMIN, REQUEST)
        return handle

    monkeypatch.setattr(slots, "start", robbed)
    with pytest.raises(RunsElsewhere, match="the lease"):
        await a.sessions.deploy_or_resume(ADMIN, REQUEST)
    assert a.sessions.live() == [] and await a.providers["namespace"].running() == []
    found = await a.sessions.get("c")
    assert (found.state, found.node, found.error) == (State.RUNNING, "b", None)
    assert (await b.operations.run_command(ADMIN, "c", CommandRequest(command="true"))).ok
