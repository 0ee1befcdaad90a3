from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.calls import decide_by

from carrel.audit import Filter, chain_of, verify
from carrel.config import Settings
from carrel.control.operations.call import Call
from carrel.control.operations.caller import OWN_WORK, Caller
from carrel.control.plane import ControlPlane
from carrel.errors import ApprovalNeeded, Conflict, Denied, NotFound, RunsElsewhere
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import (
    ApprovalDecision,
    CommandRequest,
    EditRequest,
    ExecuteRequest,
    PolicyDocuments,
    SandboxRequest,
    TerminateRequest,
)
from carrel.models.files import StatRequest
from carrel.models.operations import EDIT_FILE, STAT_FILE
from carrel.policy.verdict import Verdict

AGENT = Identity("agent:coder", OwnerKind.AGENT, frozenset({Scope.OPERATE}))
CODER = Caller(AGENT)
PERSON = Identity("person:ann", OwnerKind.PERSON, frozenset({Scope.APPROVE}))
POLICY: dict[str, object] = {
    "permissions": {
        "allow": ["shell(echo:*)", "file(read:${WORKSPACE}/**)", "file(write:${WORKSPACE}/**)"],
        "deny": ["shell(curl:*)"],
    }
}


async def _governed(plane: ControlPlane) -> None:
    await plane.policy_changes.put("c", PolicyDocuments(settings=POLICY), "person:ann")
    await plane.operations.deploy_or_resume(CODER, SandboxRequest(context_id="c"))


async def _records(plane: ControlPlane) -> list[tuple[str, str, str | None]]:
    await plane.audit.flush()
    page = await plane.audit.search(Filter(chain=chain_of("c")), limit=100)
    return [(record.name, record.decision, record.result) for record in reversed(page.items)]


async def test_an_operation_is_decided_dispatched_and_recorded(plane: ControlPlane) -> None:
    await _governed(plane)
    assert (await plane.operations.run_command(CODER, "c", CommandRequest(command="echo hi"))).stdout == "hi\n"
    with pytest.raises(Denied, match="curl is denied"):
        await plane.operations.run_command(CODER, "c", CommandRequest(command="echo $(curl x)"))
    with pytest.raises(NotFound):
        await plane.operations.forward(CODER, STAT_FILE, "c", StatRequest(path="absent"))
    assert await _records(plane) == [
        ("deploy_or_resume", "allow", "ok"),
        ("run_command", "allow", "ok"),
        ("run_command", "deny", "denied_by_policy"),
        ("stat", "allow", "file_not_found"),
    ]
    page = await plane.audit.search(Filter(chain=chain_of("c")), limit=1)
    assert (page.items[0].actor, page.items[0].agent, page.items[0].namespace) == ("agent:coder", "coder", "default")


async def test_what_asks_runs_once_after_approval(plane: ControlPlane) -> None:
    await _governed(plane)
    request = CommandRequest(command="touch made; echo made >> made")
    with pytest.raises(ApprovalNeeded) as caught:
        await plane.operations.run_command(CODER, "c", request)
    handle = caught.value.approval
    assert handle is not None
    await plane.decisions.decide(Caller(PERSON), handle, ApprovalDecision(approve=True))

    async def run() -> object:
        caller = Caller(AGENT, approval=handle)
        return await plane.operations.run_command(caller, "c", request)

    results = await asyncio.gather(*(asyncio.create_task(run()) for _ in range(4)), return_exceptions=True)
    assert sum(isinstance(result, Conflict) for result in results) == 3
    pieces = [piece async for piece in plane.operations.read_file(CODER, "c", "made")]
    assert pieces[1:] == [b"made\n"]
    with pytest.raises(Conflict, match="another operation"):
        caller = Caller(AGENT, approval=handle)
        await plane.operations.run_command(caller, "c", CommandRequest(command="rm -rf data"))
    assert ("run_command", "ask", "ok") in await _records(plane)


async def test_a_restart_keeps_what_waits_and_says_what_was_cut_off(settings: Settings) -> None:
    first = await ControlPlane.open(settings)
    await _governed(first)
    with pytest.raises(ApprovalNeeded) as caught:
        await first.operations.run_command(CODER, "c", CommandRequest(command="touch x"))
    await first.close()
    second = await ControlPlane.open(settings)
    try:
        [waiting] = (await second.approvals.page()).items
        assert waiting.id == caught.value.approval
        await second.operations.deploy_or_resume(CODER, SandboxRequest(context_id="c"))
        await second.decisions.decide(Caller(PERSON), waiting.id, ApprovalDecision(approve=True))
        caller = Caller(AGENT, approval=waiting.id)
        assert (await second.operations.run_command(caller, "c", CommandRequest(command="touch x"))).ok
    finally:
        await second.close()


async def test_upkeep_needs_no_leave_and_leaves_no_record(plane: ControlPlane) -> None:
    await _governed(plane)
    before = await _records(plane)
    await plane.upkeep.stop_idle()
    for box in plane.sessions.live():
        box.last_activity -= 3601
    await plane.upkeep.stop_idle()
    assert plane.sessions.live() == []
    assert await _records(plane) == before


async def test_two_servers_write_one_unbroken_chain(nodes: list[ControlPlane], tmp_path: Path) -> None:
    a, b = nodes
    await a.operations.deploy_or_resume(CODER, SandboxRequest(context_id="c"))
    for _ in range(5):
        await a.operations.run_command(CODER, "c", CommandRequest(command="true"))
        with pytest.raises(RunsElsewhere):
            await b.operations.deploy_or_resume(CODER, SandboxRequest(context_id="c"))
    await a.operations.stop(CODER, "c")
    await b.operations.deploy_or_resume(CODER, SandboxRequest(context_id="c"))
    await b.operations.run_command(CODER, "c", CommandRequest(command="true"))
    for plane in nodes:
        await plane.audit.flush()
        await plane.audit.seal()
    names = [name for name, _, _ in await _records(b)]
    assert names.count("run_command") == 6 and names.count("deploy_or_resume") == 7
    file = tmp_path / "export"
    with file.open("wb") as out:
        async for piece in b.audit.export():
            out.write(piece)
    with file.open("rb") as export:
        verdict = verify(export, keys=[a.audit.key.public, b.audit.key.public])
    assert verdict.ok, verdict


@pytest.fixture
def pushed_only_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upkeep does not push files to filespaces."""
    monkeypatch.setattr("carrel.control.sessions.upkeep.PUSH_EVERY", 3600.0)


async def test_the_bytes_of_an_operation_are_in_its_record(pushed_only_when_told: None, plane: ControlPlane) -> None:
    caller = Caller(AGENT)
    do = plane.operations
    await do.deploy_or_resume(caller, SandboxRequest(context_id="c", filespace=True))
    await do.run_command(caller, "c", CommandRequest(command="cat; echo -n err >&2", stdin="é12"))
    await do.run_command(caller, "c", CommandRequest(command="printf '\\377\\376'"))
    started = await do.start_command(caller, "c", CommandRequest(command="cat", interactive=True))
    await do.send_input(caller, "c", started.id, b"12345", close=True)
    assert [chunk async for chunk in do.command_output(caller, "c", started.id)]
    await do.write_file(caller, "c", "small", b"1234567")

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        yield b"y" * 500

    await do.write_file(caller, "c", "big", pieces())
    assert [piece async for piece in do.read_file(caller, "c", "big", offset=1400)]
    await do.forward(caller, EDIT_FILE, "c", EditRequest(path="small", old="123", new="é"))
    await do.execute(caller, "c", ExecuteRequest(code="cat in; echo", files={"in": "YWJj"}))
    snapshot = await plane.snapshots.take(caller, "c")
    tar = [piece async for piece in await plane.snapshots.export(caller, "c", snapshot.id)]
    await plane.filespaces.write(caller, "c", "kept", b"123")
    assert [piece async for piece in plane.filespaces.read(caller, "c", "kept")]
    await plane.filespaces.sync(caller, "c")
    await do.forward(caller, STAT_FILE, "c", StatRequest(path="big"))
    await plane.audit.flush()
    page = await plane.audit.search(Filter(chain=chain_of("c")), limit=100)
    counted = [(record.name, record.bytes_in, record.bytes_out) for record in reversed(page.items)]
    assert counted == [
        ("deploy_or_resume", None, None),
        ("run_command", 4, 7),
        ("run_command", None, 2),
        ("start_command", None, None),
        ("send_input", 5, None),
        ("command_output", None, 5),
        ("write", 7, None),
        ("write", 1500, None),
        ("read", None, 100),
        ("edit", 2, None),
        ("execute", 3, 4),
        ("snapshot", None, None),
        ("export", None, len(b"".join(tar))),
        ("filespace_write", 3, None),
        ("filespace_read", None, 3),
        ("sync_filespace", 3, 1509),
        ("stat", None, None),
    ]


async def test_refusal_names_the_rule_and_each_outcome_is_recorded(plane: ControlPlane) -> None:
    def decide(asked: Call) -> Verdict:
        if asked.arguments.get("command") == "curl x":
            return Verdict("deny", "curl is denied for this agent", "shell(curl:*)", "settings.json", "use pip")
        return Verdict("ask") if asked.kind == "file" else Verdict()

    caller = Caller(AGENT)
    await plane.sessions.deploy_or_resume(caller, SandboxRequest(context_id="c", trust="high"))
    decide_by(plane, decide)
    with pytest.raises(Denied) as caught:
        await plane.operations.run_command(caller, "c", CommandRequest(command="curl x"))
    problem = caught.value.problem()
    expected = {
        "code": "denied_by_policy",
        "operation": "shell",
        "rule": "shell(curl:*)",
        "source": "settings.json",
        "reason": "curl is denied for this agent",
        "retry": False,
        "approval": None,
        "hint": "use pip",
    }
    assert {key: problem[key] for key in expected} == expected
    with pytest.raises(ApprovalNeeded):
        await plane.operations.write_file(caller, "c", "x", b"")
    await plane.operations.run_command(caller, "c", CommandRequest(command="true"))
    assert await _records(plane) == [
        ("run_command", "deny", "denied_by_policy"),
        ("write", "ask", "approval_needed"),
        ("run_command", "allow", "ok"),
    ]


async def test_starting_and_ending_sessions_is_admitted_too(plane: ControlPlane) -> None:
    seen: list[tuple[str, str | None]] = []

    def decide(asked: Call) -> Verdict:
        assert "s3cret" not in str(asked.arguments), "the values of variables are not for the record"
        seen.append((asked.name, asked.context_id))
        return Verdict("deny") if asked.context_id == "secret" else Verdict()

    decide_by(plane, decide)
    with pytest.raises(Denied):
        await plane.operations.deploy_or_resume(CODER, SandboxRequest(context_id="secret"))
    await plane.operations.deploy_or_resume(CODER, SandboxRequest(context_id="c", env={"KEY": "s3cret"}, trust="high"))
    await plane.operations.terminate(CODER, "c", TerminateRequest())
    with pytest.raises(NotFound):
        await plane.operations.terminate(CODER, "c", TerminateRequest())
    assert plane.sessions.live() == []
    assert seen == [("deploy_or_resume", "secret"), ("deploy_or_resume", "c"), ("terminate", "c")]
    assert [(name, result) for name, _, result in await _records(plane)] == [
        ("deploy_or_resume", "ok"),
        ("terminate", "ok"),
    ]


async def test_each_operation_is_counted_once_with_the_outcome_that_is_recorded(plane: ControlPlane) -> None:
    await _governed(plane)
    with pytest.raises(Denied):
        await plane.operations.run_command(CODER, "c", CommandRequest(command="curl x"))
    with pytest.raises(NotFound):
        await plane.operations.forward(CODER, STAT_FILE, "c", StatRequest(path="absent"))
    await plane.own_operations.health(OWN_WORK, "c")
    shown = plane.metrics.render()[0].decode()
    counted = {
        (match["kind"], match["name"], match["outcome"]): float(match["count"])
        for match in re.finditer(
            r'carrel_operation_seconds_count{kind="(?P<kind>\w+)",name="(?P<name>\w+)",'
            r'outcome="(?P<outcome>\w+)"} (?P<count>\S+)',
            shown,
        )
    }
    assert counted == {
        ("session", "deploy_or_resume", "ok"): 1.0,
        ("shell", "run_command", "denied_by_policy"): 1.0,
        ("file", "stat", "file_not_found"): 1.0,
    }
