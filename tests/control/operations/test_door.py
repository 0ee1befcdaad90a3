from __future__ import annotations

import logging

import pytest

from carrel.config import Settings
from carrel.control.operations.door import (
    DONE,
    Operation,
    Outcome,
    PlainDoor,
    allow_all,
    log_operation,
    refusal,
)
from carrel.control.plane import ControlPlane
from carrel.errors import Denied, NotFound, from_problem
from carrel.models import CommandRequest, SandboxRequest, TerminateRequest
from carrel.policy.verdict import ALLOWED, Verdict

ASKED = Operation("shell", "run_command", {"command": "curl x"}, "agent", "sbx-1", "c")


async def test_the_door_decides_and_records(settings: Settings) -> None:
    seen: list[tuple[str, str, str | None]] = []

    def decide(operation: Operation) -> Verdict:
        if operation.arguments.get("command") == "curl x":
            return Verdict("deny", "curl is denied for this agent", "shell(curl:*)", "settings.json", "use pip")
        return Verdict("ask") if operation.kind == "file" else Verdict()

    def record(operation: Operation, decision: Verdict, outcome: Outcome) -> None:
        seen.append((operation.name, decision.verdict, outcome.error))

    plane = await ControlPlane.open(settings, door=PlainDoor(decide, record))
    try:
        await plane.sessions.deploy_or_resume(SandboxRequest(context_id="c", trust="high"))
        with pytest.raises(Denied) as caught:
            await plane.operations.run_command("c", CommandRequest(command="curl x"), "agent")
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
        with pytest.raises(Denied):
            await plane.operations.write_file("c", "x", b"")
        await plane.operations.run_command("c", CommandRequest(command="true"))
        assert seen == [
            ("run_command", "deny", "denied_by_policy"),
            ("write", "ask", "denied_by_policy"),
            ("run_command", "allow", None),
        ]
    finally:
        await plane.close()


async def test_sessions_pass_the_door_too(settings: Settings) -> None:
    seen: list[tuple[str, str, str | None]] = []

    def decide(operation: Operation) -> Verdict:
        return Verdict("deny") if operation.context_id == "secret" else ALLOWED

    def record(operation: Operation, decision: Verdict, outcome: Outcome) -> None:
        assert "env" not in operation.arguments, "secrets of the environment are not for the record"
        seen.append((operation.name, decision.verdict, outcome.error))

    plane = await ControlPlane.open(settings, door=PlainDoor(decide, record))
    try:
        with pytest.raises(Denied):
            await plane.operations.deploy_or_resume(SandboxRequest(context_id="secret"))
        await plane.operations.deploy_or_resume(SandboxRequest(context_id="c", env={"KEY": "s3cret"}, trust="high"))
        await plane.operations.terminate("c", TerminateRequest())
        with pytest.raises(NotFound):
            await plane.operations.terminate("c", TerminateRequest())
        assert plane.sessions.live() == []
    finally:
        await plane.close()
    assert seen == [
        ("deploy_or_resume", "deny", "denied_by_policy"),
        ("deploy_or_resume", "allow", None),
        ("terminate", "allow", None),
    ]


def test_a_refusal_says_what_decided_and_survives_the_wire() -> None:
    error = refusal(ASKED, Verdict("deny", "no curl", "shell(curl:*)", "settings.json", "use pip"))
    again = from_problem(error.problem())
    assert isinstance(again, Denied)
    assert (again.rule, again.reason, again.hint, again.extra["retry"]) == (
        "shell(curl:*)",
        "no curl",
        "use pip",
        False,
    )


@pytest.mark.parametrize(("verdict", "word"), [("deny", "policy denies"), ("ask", "approval")])
def test_a_refusal_without_a_reason_has_one(verdict: str, word: str) -> None:
    assert word in refusal(ASKED, Verdict(verdict)).reason  # type: ignore[arg-type]


def test_without_a_policy_all_is_allowed_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert allow_all(ASKED).verdict == "allow"
    with caplog.at_level(logging.DEBUG, "carrel.operations"):
        log_operation(ASKED, ALLOWED, DONE)
        log_operation(ASKED, ALLOWED, Outcome("not_found"))
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == ["done", "not_found"]
    assert "curl" not in caplog.text, "what a command says may be secret"
