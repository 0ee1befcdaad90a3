from __future__ import annotations

import asyncio
import io
import json
import os
import time
from dataclasses import replace

import pytest
from tests.support.calls import ADMIN
from tests.support.no_events import no_event

from carrel.audit import AuditEntry, AuditLog, Filter, SigningKey, chain_of, verify
from carrel.config import Settings
from carrel.control.operations.caller import OWN_WORK, Caller
from carrel.control.plane import ControlPlane
from carrel.control.sessions import upkeep
from carrel.errors import Conflict, LimitExceeded, NotRunning
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import CommandRequest, Limits, MkdirRequest, SandboxRequest, State
from carrel.models.files import DeleteRequest, StatRequest
from carrel.models.operations import DELETE_FILE, MAKE_DIRECTORY, STAT_FILE
from carrel.store import Database
from carrel.store.audit import AuditStore
from carrel.store.batches import BatchesHere
from carrel.workspaces.layout import encode
from carrel.workspaces.usage import Usage, measure


async def test_a_full_workspace_ends_commands_and_refuses_writes(plane: ControlPlane) -> None:
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(limits=Limits(disk_mb=4)))
    do = plane.operations
    command = CommandRequest(command="while :; do head -c 1000000 /dev/zero >> data/fill; done", timeout=60)
    result = await do.start_command(ADMIN, info.id, command)
    ended = [chunk async for chunk in do.command_output(ADMIN, info.id, result.id)]
    assert ended[-1].stream == "end", "the janitor ended it"
    live = await plane.sessions.find(info.id)
    async with asyncio.timeout(10):
        while live.over_quota is None:
            await asyncio.sleep(0.02)
    for write in (
        do.write_file(ADMIN, info.id, "x", b"x"),
        do.forward(ADMIN, MAKE_DIRECTORY, info.id, MkdirRequest(path="d")),
    ):
        with pytest.raises(LimitExceeded) as caught:
            await write
        assert caught.value.field == "disk_mb"
    await do.forward(ADMIN, DELETE_FILE, info.id, DeleteRequest(path="data/fill"))
    async with asyncio.timeout(10):
        while live.over_quota is not None:
            await asyncio.sleep(0.02)
    assert (await do.write_file(ADMIN, info.id, "x", b"x")).size == 1


async def test_a_full_workspace_is_logged_once(
    plane: ControlPlane, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    async def counted(path: str, **bounds: int) -> Usage:
        nonlocal looks
        looks += 1
        return await measure(path, **bounds)

    monkeypatch.setattr(upkeep, "measure", counted)
    monkeypatch.setattr(upkeep, "BUSY_EVERY", 0.01)
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(limits=Limits(disk_mb=1)))
    fill = "for each in 1 2 3 4; do head -c 700000 /dev/zero > $each; done"
    await plane.operations.run_command(ADMIN, info.id, CommandRequest(command=fill))
    live = await plane.sessions.find(info.id)
    async with asyncio.timeout(30):
        while live.over_quota is None:
            await asyncio.sleep(0.02)
        over = looks
        while looks < over + 4:
            await asyncio.sleep(0.02)
    assert [record.levelname for record in caplog.records if "its commands are ended" in record.message] == ["WARNING"]


async def test_activity_is_written_down_and_upkeep_is_none(plane: ControlPlane) -> None:
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest())
    await plane.operations.run_command(ADMIN, info.id, CommandRequest(command="true"))
    live = await plane.sessions.find(info.id)
    await plane.upkeep.flush()
    record = await plane.store.get(info.id)
    assert record is not None and record.last_activity_at == live.last_activity > info.last_activity_at.timestamp()
    before = live.last_activity
    await plane.upkeep.watch_disks()
    await plane.own_operations.health(OWN_WORK, info.id)
    assert live.last_activity == before


async def test_an_idle_sandbox_is_stopped_and_its_files_wait(plane: ControlPlane) -> None:
    request = SandboxRequest(context_id="idle")
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, request)
    other, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="busy"))
    throwaway, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest())
    await plane.operations.write_file(ADMIN, info.id, "kept", b"x")
    await plane.operations.start_command(ADMIN, other.id, CommandRequest(command="sleep 600"))
    await plane.upkeep.stop_idle()
    assert len(plane.sessions.live()) == 3, "nobody was idle for an hour"
    for box in plane.sessions.live():
        box.last_activity -= 3601
    await plane.upkeep.stop_idle()
    async with asyncio.timeout(30):
        while len(plane.sessions.live()) > 1:  # one that has just begun may have a process of its start left
            for box in plane.sessions.live():
                box.last_activity -= 3601
            await plane.upkeep.stop_idle()
    assert [box.record.id for box in plane.sessions.live()] == [other.id], "a running command is use"
    assert (await plane.sessions.get(info.id)).state is State.STOPPED
    assert (await plane.sessions.get(throwaway.id)).state is State.TERMINATED
    again, started = await plane.sessions.deploy_or_resume(ADMIN, request)
    assert started and again.id == info.id
    assert (await plane.operations.forward(ADMIN, STAT_FILE, info.id, StatRequest(path="kept"))).size == 1


async def test_a_sandbox_that_is_used_meanwhile_is_not_stopped(plane: ControlPlane) -> None:
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    box = await plane.sessions.find(info.id)
    horizon = box.last_activity - 1
    assert not await plane.sessions.stop_idle(box, horizon)
    box.in_flight += 1
    assert not await plane.sessions.stop_idle(box, box.last_activity + 1)
    box.in_flight -= 1
    assert await plane.sessions.stop_idle(box, box.last_activity + 1)
    assert not await plane.sessions.stop_idle(box, box.last_activity + 1), "it is stopped already"


async def test_the_audit_log_is_kept_for_as_long_as_it_is_set(settings: Settings) -> None:
    old = time.time() - 3 * 86_400
    database = await Database.open(settings.database_url)
    key = SigningKey.load(settings.data_dir)
    before = AuditLog(AuditStore(database, BatchesHere(database)), key, "n", no_event, clock=lambda: old)
    await before.open()
    for number in range(10):
        (
            await before.begin(AuditEntry(chain_of("c"), "agent:a", "shell", "run_command", arguments={"n": number}))
        ).end()
    await before.close()
    await database.close()
    audit = settings.audit.model_copy(update={"keep_days": 2})
    plane = await ControlPlane.open(settings.model_copy(update={"node": "n", "audit": audit}))
    try:
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
        await plane.operations.run_command(ADMIN, "c", CommandRequest(command="true"))
        done = await plane.upkeep.prune_audit()
        assert done.records == 20 and done.before.timestamp() % 86_400 == 0
        assert (await plane.upkeep.prune_audit()).records == 0, "the rest is younger"
        await plane.audit.flush()
        names = [each.name for each in (await plane.audit.search(Filter(), limit=100)).items]
        assert sorted(names) == ["prune_audit", "run_command"]
        data = b"".join([piece async for piece in plane.audit.export()])
        verdict = verify(io.BytesIO(data), keys=[key.public])
        assert verdict.ok and verdict.pruned == 1, "what is left verifies from the signed head on"
    finally:
        await plane.close()


async def test_the_audit_log_is_kept_for_ever_by_default(plane: ControlPlane) -> None:
    with pytest.raises(Conflict, match="for ever"):
        await plane.upkeep.prune_audit()


def _described(plane: ControlPlane, context: str) -> dict[str, object]:
    with open(os.path.join(plane.driver.path(encode(context, ephemeral=False)), ".context.json")) as file:
        found: dict[str, object] = json.load(file)
    return found


async def test_the_description_of_a_workspace_is_true(plane: ControlPlane) -> None:
    agent = Identity("agent:coder-1", OwnerKind.AGENT, frozenset({Scope.OPERATE}))
    info, _ = await plane.operations.deploy_or_resume(Caller(agent), SandboxRequest(context_id="team:c"))
    assert info.agent == "coder-1"
    first = _described(plane, "team:c")
    assert (first["agent"], first["namespace"], first["disk_usage_bytes"]) == ("coder-1", "team", 0)
    await plane.operations.run_command(ADMIN, "team:c", CommandRequest(command="head -c 3000000 /dev/urandom > data/x"))
    box = await plane.sessions.find("team:c")
    box.used_bytes = 3_000_000  # as the watch finds it
    await plane.upkeep.describe()
    running = _described(plane, "team:c")
    assert running["disk_usage_bytes"] == 3_000_000 and str(running["last_accessed_at"]) > str(
        first["last_accessed_at"]
    )
    record = await plane.store.get(info.id)
    assert record is not None and record.used_bytes == 3_000_000
    await plane.operations.run_command(
        ADMIN, "team:c", CommandRequest(command="rm data/x; rm .context.json; mkdir .context.json")
    )
    await plane.operations.run_command(ADMIN, "team:c", CommandRequest(command="ln -s /etc/passwd .context.json.new"))
    await plane.sessions.stop("team:c")
    record = await plane.store.get(info.id)
    assert record is not None and record.used_bytes is not None and record.used_bytes < 3_000_000
    again, _ = await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="team:c"))
    assert again.agent == "coder-1", "it stays whose it was"
    await plane.operations.run_command(ADMIN, "team:c", CommandRequest(command="rm -r .context.json"))
    await plane.sessions.stop("team:c")
    last, record = _described(plane, "team:c"), await plane.store.get(info.id)
    assert record is not None
    assert (last["agent"], last["namespace"], last["disk_usage_bytes"]) == ("coder-1", "team", record.used_bytes)


async def test_a_workspace_that_a_person_made_belongs_to_its_template(settings: Settings, plane: ControlPlane) -> None:
    os.makedirs(os.path.join(settings.data_dir, "templates", "research"))
    info, _ = await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", template="research"))
    other, _ = await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="d"))
    assert (info.agent, other.agent) == ("research", None)
    assert _described(plane, "c")["agent"] == "research" and _described(plane, "d")["namespace"] == "default"


async def test_a_sandbox_ends_with_its_lifetime_while_a_command_runs(plane: ControlPlane) -> None:
    info, _ = await plane.sessions.deploy_or_resume(
        ADMIN, SandboxRequest(context_id="c", limits=Limits(lifetime_s=600))
    )
    assert info.ends_at is not None and 590 < info.ends_at.timestamp() - time.time() <= 600
    await plane.operations.run_command(ADMIN, "c", CommandRequest(command="echo kept > data/x"))
    await plane.operations.start_command(ADMIN, "c", CommandRequest(command="sleep 60"))
    box = await plane.sessions.find("c")
    await plane.upkeep.end_lifetimes()
    assert plane.sessions.find_live("c") is box
    box.record = replace(box.record, ends_at=time.time())
    await plane.upkeep.end_lifetimes()
    with pytest.raises(NotRunning, match="is stopped: its lifetime is over"):
        await plane.sessions.find("c")
    resumed, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    assert resumed.snapshot is not None and resumed.limits.lifetime_s == 600
    assert resumed.ends_at is not None and resumed.ends_at > info.ends_at
    result = await plane.operations.run_command(ADMIN, "c", CommandRequest(command="cat data/x"))
    assert result.stdout == "kept\n"
