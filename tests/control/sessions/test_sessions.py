from __future__ import annotations

import asyncio
import os

import pytest
from tests.support.calls import ADMIN

from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.errors import (
    ApprovalNeeded,
    CarrelError,
    Conflict,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    NotRunning,
    PlatformError,
    Unsupported,
)
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import (
    ApprovalDecision,
    ApprovalScope,
    CommandRequest,
    Limits,
    Network,
    PolicyDocuments,
    SandboxRequest,
    State,
    TerminateRequest,
    Trust,
)
from carrel.models.files import StatRequest
from carrel.models.operations import STAT_FILE
from carrel.providers.base import Launch

ASKS = CommandRequest(command="perl -e 1")
PERSON = Identity("user:p", OwnerKind.PERSON, frozenset({Scope.APPROVE}))


def workspaces(plane: ControlPlane) -> list[str]:
    return sorted(name for name in os.listdir(plane.driver.directory))


def sockets(plane: ControlPlane) -> list[str]:
    return [name for _, _, files in os.walk(plane.layout.run) for name in files if "sbx-" in name or "eph-" in name]


async def test_many_callers_get_one_sandbox(plane: ControlPlane) -> None:
    answers = await asyncio.gather(
        *[plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c")) for _ in range(25)]
    )
    assert len({info.id for info, _ in answers}) == 1
    assert [started for _, started in answers].count(True) == 1
    assert len(plane.sessions.live()) == 1


async def test_durable_files_outlive_the_sandbox(plane: ControlPlane) -> None:
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", labels={"a": "b"}))
    await plane.operations.write_file(ADMIN, info.id, "data/kept", b"x")
    stopped = await plane.sessions.stop("c")
    assert stopped.state is State.STOPPED
    with pytest.raises(NotRunning) as caught:
        await plane.operations.run_command(ADMIN, "c", CommandRequest(command="true"))
    assert "deploy_or_resume" in (caught.value.hint or "")
    again, started = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    assert started and again.id == info.id and again.labels == {"a": "b"}
    result = await plane.operations.run_command(ADMIN, "c", CommandRequest(command="cat data/kept"))
    assert result.stdout == "x"


async def test_terminate_keeps_a_durable_workspace_and_delete_does_not(plane: ControlPlane) -> None:
    first, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.operations.write_file(ADMIN, "c", "kept", b"x")
    ended = await plane.sessions.terminate(ADMIN, "c", "done")
    assert ended.state is State.TERMINATED
    assert (await plane.sessions.terminate(ADMIN, first.id)).state is State.TERMINATED
    second, started = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    assert started and second.id != first.id
    assert (await plane.operations.forward(ADMIN, STAT_FILE, "c", StatRequest(path="kept"))).size == 1
    await plane.sessions.terminate(ADMIN, first.id, delete_workspace=True)
    assert (await plane.operations.forward(ADMIN, STAT_FILE, "c", StatRequest(path="kept"))).size == 1, (
        "it belongs to the newer session"
    )
    await plane.sessions.terminate(ADMIN, "c", delete_workspace=True)
    assert workspaces(plane) == []


@pytest.mark.parametrize("how", ["kept", "deleted", "expired"])
async def test_what_a_deleted_context_had_is_forgotten(plane: ControlPlane, how: str) -> None:
    rules = {"permissions": {"allow": ["shell(true)"], "deny": ["shell(reboot)"]}}
    for name in ("c", "other"):
        await plane.policy_changes.put(name, PolicyDocuments(settings=rules), "a test")
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id=name))
        await plane.secrets.put(name, "TOKEN", b"value-of-" + name.encode())
        await plane.secrets.put(name, "TOKEN", b"newer-of-" + name.encode())
        with pytest.raises(ApprovalNeeded) as asked:
            await plane.operations.run_command(ADMIN, name, ASKS)
        grant = ApprovalDecision(approve=True, scope=ApprovalScope.CONTEXT)
        await plane.decisions.decide(Caller(PERSON), str(asked.value.extra["approval"]), grant)
        await plane.operations.run_command(ADMIN, name, ASKS)
    if how == "expired":
        await plane.sessions.stop("c")
        await plane.store.update((await plane.sessions.get("c")).id, last_activity_at=1.0)
        assert await plane.sessions.expire(await plane.sessions.record("c"), 2.0)
    else:
        await plane.operations.terminate(ADMIN, "c", TerminateRequest(delete_files=how == "deleted"))
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    left = how == "kept"
    assert len((await plane.secrets.list("c")).items) == left
    assert (await plane.policies.get("c")).settings == rules, "nobody gets rid of rules by deleting"
    if left:
        assert (await plane.operations.run_command(ADMIN, "c", ASKS)).exit_code == 0
    else:
        with pytest.raises(ApprovalNeeded):
            await plane.operations.run_command(ADMIN, "c", ASKS)
        assert "value-of-c" in (await plane.secret_values.redactor("c")).text("value-of-c newer-of-c")
    assert len((await plane.secrets.list("other")).items) == 1
    assert (await plane.policies.get("other")).settings == rules
    assert (await plane.operations.run_command(ADMIN, "other", ASKS)).exit_code == 0


async def test_ephemeral_leaves_nothing(plane: ControlPlane) -> None:
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest())
    assert info.ephemeral and info.context_id is None and info.id.startswith("eph-")
    assert len(workspaces(plane)) == 1
    await plane.sessions.terminate(ADMIN, info.id)
    assert workspaces(plane) == [] and sockets(plane) == []
    assert (await plane.sessions.page()).items == []


async def test_the_same_key_gives_the_same_sandbox(plane: ControlPlane) -> None:
    answers = await asyncio.gather(
        *[plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(), "key-1") for _ in range(5)]
    )
    assert len({info.id for info, _ in answers}) == 1
    with pytest.raises(Conflict) as caught:
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="other"), "key-1")
    assert caught.value.field == "Idempotency-Key"
    await plane.sessions.terminate(ADMIN, answers[0][0].id)
    info, started = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(), "key-1")
    assert not started and info.state is State.TERMINATED


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (SandboxRequest(context_id="c", provider="hypervisor"), InvalidRequest, "provider"),
        (
            SandboxRequest(context_id="c", provider="process", network=Network.NONE, trust=Trust.HIGH),
            Unsupported,
            "provider",
        ),
        (SandboxRequest(provider="process", trust=Trust.HIGH, limits=Limits(cpus=1)), Unsupported, "provider"),
        (SandboxRequest(network=Network.HOST), InvalidRequest, "network"),
    ],
)
async def test_what_cannot_be_had_is_refused_and_leaves_nothing(
    plane: ControlPlane, request_: SandboxRequest, error: type[CarrelError], field: str
) -> None:
    with pytest.raises(error) as caught:
        await plane.sessions.deploy_or_resume(ADMIN, request_)
    assert caught.value.field == field and caught.value.hint
    assert (await plane.store.page(limit=10))[0] == []
    assert workspaces(plane) == []


async def test_what_differs_from_the_running_sandbox_is_refused(plane: ControlPlane) -> None:
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    for request, field in (
        (SandboxRequest(context_id="c", provider="other"), "provider"),
        (SandboxRequest(context_id="c", limits=Limits(timeout_s=7)), "limits.timeout_s"),
        (SandboxRequest(context_id="c", env={"A": "b"}), "env"),
        (SandboxRequest(context_id="c", trust=Trust.LOW), "trust"),
    ):
        with pytest.raises(Conflict) as caught:
            await plane.sessions.deploy_or_resume(ADMIN, request)
        assert caught.value.field == field
    same = SandboxRequest(context_id="c", provider=info.provider, network=info.network, labels={"n": "1"})
    again, started = await plane.sessions.deploy_or_resume(ADMIN, same)
    assert not started and again.labels == {"n": "1"}


async def test_no_more_than_the_server_allows(plane: ControlPlane) -> None:
    results = await asyncio.gather(
        *[plane.sessions.deploy_or_resume(ADMIN, SandboxRequest()) for _ in range(8)], return_exceptions=True
    )
    assert sum(isinstance(each, LimitExceeded) for each in results) == 2
    assert len(workspaces(plane)) == 6


async def test_a_failed_start_leaves_nothing(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(launch: Launch) -> None:
        raise OSError("no room for another sandbox")

    provider = plane.providers[plane.settings.sandbox.provider if "namespace" not in plane.providers else "namespace"]
    monkeypatch.setattr(provider, "start", broken)
    for request in (SandboxRequest(), SandboxRequest(context_id="c")):
        with pytest.raises((PlatformError, NotRunning)):
            await plane.sessions.deploy_or_resume(ADMIN, request, f"key {request.context_id}")
    assert workspaces(plane) == [] and sockets(plane) == [] and plane.sessions.live() == []
    states = {record.ephemeral: record.state for record in (await plane.store.page(limit=10))[0]}
    assert states == {True: State.TERMINATED, False: State.ERROR}
    monkeypatch.undo()
    _, started = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"), "key c")
    assert started


async def test_a_dead_sandbox_is_started_anew_on_its_files(plane: ControlPlane) -> None:
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.operations.write_file(ADMIN, "c", "kept", b"x")
    box = plane.sessions.live()[0]
    await box.provider.remove(box.handle)
    again, started = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    assert started and again.id == info.id
    assert (await plane.operations.forward(ADMIN, STAT_FILE, "c", StatRequest(path="kept"))).size == 1


async def test_a_sandbox_found_dead_is_recorded(plane: ControlPlane) -> None:
    durable, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    fleeting, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest())
    for box in plane.sessions.live():
        await box.provider.remove(box.handle)
    for name in (durable.id, fleeting.id):
        with pytest.raises((PlatformError, NotRunning)):
            await plane.operations.run_command(ADMIN, name, CommandRequest(command="true"))
    async with asyncio.timeout(10):  # upkeep may have found them first, and is still ending them
        for name, state in ((durable.id, State.ERROR), (fleeting.id, State.TERMINATED)):
            while (await plane.sessions.get(name)).state is not state:
                await asyncio.sleep(0.01)
    assert workspaces(plane) == ["ctx-c"]


async def test_pages(plane: ControlPlane) -> None:
    made = [(await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest()))[0].id for _ in range(3)]
    first = await plane.sessions.page(limit=2)
    second = await plane.sessions.page(limit=2, cursor=first.next)
    assert [info.id for info in first.items + second.items] == made[::-1]
    assert second.next is None
    with pytest.raises(InvalidRequest):
        await plane.sessions.page(cursor="nonsense")
    with pytest.raises(NotFound):
        await plane.sessions.get("absent")
