"""What an agent must not get around: the rules of its context by making, forking or ending one, and a person's word by
waiting for it.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from pathlib import Path

import pytest
from tests.support.calls import ADMIN

from carrel.config import Settings
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.errors import AlreadyExists, ApprovalNeeded, Conflict, Denied, InvalidRequest
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import (
    ApprovalDecision,
    ApprovalState,
    CommandRequest,
    ExecuteRequest,
    MkdirRequest,
    MoveRequest,
    PolicyDocuments,
    SandboxRequest,
    TerminateRequest,
)
from carrel.models.files import DeleteRequest
from carrel.models.operations import DELETE_FILE, MAKE_DIRECTORY, MOVE_FILE

AGENT = Identity("agent:coder", OwnerKind.AGENT, frozenset({Scope.OPERATE}))
CODER = Caller(AGENT)
PERSON = Identity("person:ann", OwnerKind.PERSON, frozenset({Scope.APPROVE}))
YES = ApprovalDecision(approve=True)
FILES = ["file(read:${WORKSPACE}/**)", "file(write:${WORKSPACE}/**)"]


def _rules(allow: list[str], deny: list[str]) -> PolicyDocuments:
    return PolicyDocuments(settings={"permissions": {"allow": allow, "deny": deny}})


async def _made(plane: ControlPlane, context: str, rules: PolicyDocuments | None = None) -> None:
    if rules is not None:
        await plane.policy_changes.put(context, rules, "person:ann")
    await plane.operations.deploy_or_resume(CODER, SandboxRequest(context_id=context))


async def _run(plane: ControlPlane, context: str, command: str, caller: Caller = CODER) -> str:
    return (await plane.operations.run_command(caller, context, CommandRequest(command=command))).stdout


async def test_variables_of_a_sandbox_do_not_change_what_commands_run_without_a_person(plane: ControlPlane) -> None:
    await _made(plane, "c", _rules(["shell(ls:*)", *FILES], []))
    await plane.operations.write_file(CODER, "c", "bin/ls", b"#!/bin/sh\necho anything\n", mode="755")
    await plane.operations.stop(CODER, "c")
    wanted = SandboxRequest(context_id="c", env={"PATH": "/workspace/bin:/usr/bin:/bin", "MODE": "x"})
    with pytest.raises(ApprovalNeeded, match="PATH") as caught:
        await plane.operations.deploy_or_resume(CODER, wanted)
    handle = caught.value.approval or ""
    assert (await plane.approvals.get(handle)).arguments["env"] == {"PATH": "/workspace/bin:/usr/bin:/bin"}
    await plane.operations.deploy_or_resume(CODER, SandboxRequest(context_id="c", env={"MODE": "x"}))
    assert "bin\n" in await _run(plane, "c", "ls")
    await plane.operations.stop(CODER, "c")
    await plane.decisions.decide(Caller(PERSON), handle, YES)
    caller = Caller(AGENT, approval=handle)
    await plane.operations.deploy_or_resume(caller, wanted)
    caller = CODER
    assert await _run(plane, "c", "ls") == "anything\n"
    await plane.operations.deploy_or_resume(caller, wanted)  # it has it already: nobody is asked again


async def test_variables_are_held_by_the_template_of_a_context_to_be(settings: Settings, plane: ControlPlane) -> None:
    folder = Path(settings.data_dir) / "templates" / "careful"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps({"permissions": {"allow": ["shell(ls:*)"]}}))
    caller = CODER
    with pytest.raises(ApprovalNeeded):
        await plane.operations.deploy_or_resume(
            caller, SandboxRequest(context_id="c", template="careful", env={"LD_PRELOAD": "x.so"})
        )
    with pytest.raises(InvalidRequest, match="no template"):
        await plane.operations.deploy_or_resume(
            caller, SandboxRequest(context_id="c", template="carefull", env={"LD_PRELOAD": "x.so"})
        )
    await plane.operations.deploy_or_resume(caller, SandboxRequest(context_id="free", env={"LD_PRELOAD": ""}))


async def test_a_fork_does_not_replace_the_rules_of_a_deleted_context(plane: ControlPlane) -> None:
    await _made(plane, "strict", _rules(["shell(ls:*)"], ["shell(curl:*)"]))
    await plane.operations.terminate(CODER, "strict", TerminateRequest(delete_files=True))
    await _made(plane, "loose", _rules(["shell(ls:*)", "shell(curl:*)"], []))
    with pytest.raises(AlreadyExists):
        await plane.snapshots.fork(CODER, "loose", "strict")
    assert (await plane.policies.explain("strict", "curl x", None)).verdict == "deny"
    await plane.snapshots.fork(ADMIN, "loose", "strict")
    assert (await plane.policies.explain("strict", "curl x", None)).verdict == "allow", "who administers may"


async def test_a_terminated_context_is_held_by_its_template(settings: Settings, plane: ControlPlane) -> None:
    folder = Path(settings.data_dir) / "templates" / "careful"
    folder.mkdir(parents=True)
    rules = {"permissions": {"allow": FILES, "deny": ["file(read:${WORKSPACE}/private/**)"]}}
    (folder / "settings.json").write_text(json.dumps(rules))
    caller = CODER
    await plane.operations.deploy_or_resume(caller, SandboxRequest(context_id="c", template="careful"))
    await plane.filespaces.write(caller, "c", "private/x", b"x")
    with pytest.raises(Denied):
        await anext(plane.filespaces.read(caller, "c", "private/x"))
    await plane.operations.terminate(caller, "c", TerminateRequest())
    with pytest.raises(Denied):
        await anext(plane.filespaces.read(caller, "c", "private/x"))


async def _waiting(plane: ControlPlane, who: Caller, command: str) -> tuple[asyncio.Task[str], str]:
    task = asyncio.create_task(_run(plane, "c", command, who))
    while not (page := await plane.approvals.page(states=[ApprovalState.PENDING])).items:
        await asyncio.sleep(0.01)
    return task, page.items[0].id


async def test_what_is_denied_while_it_waits_is_not_done(plane: ControlPlane) -> None:
    await _made(plane, "c", _rules(["shell(ls:*)", *FILES], []))
    task, handle = await _waiting(plane, Caller(AGENT, wait_s=60), "touch made")
    await plane.policy_changes.put("c", _rules(["shell(ls:*)", *FILES], ["shell(touch:*)"]), "person:ann")
    await plane.decisions.decide(Caller(PERSON), handle, YES)
    with pytest.raises(Denied, match="touch is denied"):
        await task
    assert "made" not in await _run(plane, "c", "ls")


async def test_who_is_gone_when_it_is_decided_gets_nothing_done(plane: ControlPlane) -> None:
    await _made(plane, "c", _rules(["shell(ls:*)", *FILES], []))
    gone = asyncio.Event()
    task, handle = await _waiting(plane, Caller(AGENT, wait_s=60, gone=gone.is_set), "touch made")
    gone.set()
    await plane.decisions.decide(Caller(PERSON), handle, YES)
    with pytest.raises(ApprovalNeeded):
        await task
    assert "made" not in await _run(plane, "c", "ls")
    assert (await plane.approvals.get(handle)).used_at is None, "it can still be used with its id"


async def test_leave_to_delete_one_thing_is_not_leave_to_delete_all_below_it(plane: ControlPlane) -> None:
    await _made(plane, "c", _rules(["shell(ls:*)", *FILES], []))
    await plane.operations.forward(CODER, MAKE_DIRECTORY, "c", MkdirRequest(path="a/b"))
    with pytest.raises(ApprovalNeeded) as caught:
        await plane.operations.forward(CODER, DELETE_FILE, "c", DeleteRequest(path="a"))
    await plane.decisions.decide(Caller(PERSON), caught.value.approval or "", YES)
    caller = Caller(AGENT, approval=caught.value.approval)
    with pytest.raises(Conflict, match="another operation"):
        await plane.operations.forward(caller, DELETE_FILE, "c", DeleteRequest(path="a", recursive=True))


async def test_leave_to_run_something_with_files_is_for_those_files(plane: ControlPlane) -> None:
    await _made(plane, "c", _rules(FILES, []))
    shown = ExecuteRequest(language="shell", code="sh run.sh", files={"run.sh": b64encode(b"echo shown").decode()})
    with pytest.raises(ApprovalNeeded) as caught:
        await plane.tools.execute(CODER, "c", shown)
    await plane.decisions.decide(Caller(PERSON), caught.value.approval or "", YES)
    caller = Caller(AGENT, approval=caught.value.approval)
    other = shown.model_copy(update={"files": {"run.sh": b64encode(b"echo other").decode()}})
    with pytest.raises(Conflict, match="another operation"):
        await plane.tools.execute(caller, "c", other)
    assert (await plane.tools.execute(caller, "c", shown)).output == "shown\n"


async def test_what_is_denied_is_denied_with_all_around_it(plane: ControlPlane) -> None:
    rules = _rules(
        ["file(delete:${WORKSPACE}/**)", *FILES],
        ["file(delete:${WORKSPACE}/a/kept/**)", "file(read:${WORKSPACE}/b/c/private/**)"],
    )
    await _made(plane, "c", rules)
    await plane.operations.write_file(CODER, "c", "a/kept/x", b"1")
    await plane.operations.write_file(CODER, "c", "a/other/x", b"1")
    with pytest.raises(Denied, match="something in /workspace/a"):
        await plane.operations.forward(CODER, DELETE_FILE, "c", DeleteRequest(path="a", recursive=True))
    for source in ("a", "b", "b/c"):
        with pytest.raises(Denied, match="something in"):
            await plane.operations.forward(CODER, MOVE_FILE, "c", MoveRequest(source=source, destination="d"))
    await plane.operations.forward(CODER, DELETE_FILE, "c", DeleteRequest(path="a/other", recursive=True))
    await plane.operations.forward(CODER, MOVE_FILE, "c", MoveRequest(source="data", destination="d"))


async def test_a_snapshot_is_no_way_to_files_that_must_not_be_read(plane: ControlPlane) -> None:
    await _made(plane, "c")
    await plane.operations.write_file(CODER, "c", "private/x", b"hidden-thing")
    taken = await plane.snapshots.take(CODER, "c")

    async def exported(caller: Caller = CODER) -> bytes:
        return b"".join([piece async for piece in await plane.snapshots.export(caller, "c", taken.id)])

    assert b"hidden-thing" in await exported(), "where no rule is, everything is allowed"
    await plane.policy_changes.put("c", _rules(FILES, ["file(read:${WORKSPACE}/private/**)"]), "person:ann")
    with pytest.raises(Denied, match="something in /workspace"):
        await exported()
    assert b"hidden-thing" in await exported(ADMIN), "who administers may"
    await plane.policy_changes.put("c", _rules(FILES, ["file(read:/**/.env)"]), "person:ann")
    with pytest.raises(ApprovalNeeded):
        await exported()
    await plane.policy_changes.put("c", _rules(FILES, ["file(read:/etc/**)"]), "person:ann")
    assert b"hidden-thing" in await exported()


async def test_no_context_is_called_like_a_sandbox(plane: ControlPlane) -> None:
    """Who names a sandbox that is stopped would come to another's."""
    info, _ = await plane.operations.deploy_or_resume(CODER, SandboxRequest(context_id="c"))
    await plane.operations.stop(CODER, "c")
    with pytest.raises(InvalidRequest, match="form of a sandbox id"):
        await plane.operations.deploy_or_resume(CODER, SandboxRequest(context_id=info.id))
    with pytest.raises(InvalidRequest, match="form of a sandbox id"):
        await plane.snapshots.fork(CODER, "c", info.id)
    assert (await plane.sessions.get(info.id)).context_id == "c"
