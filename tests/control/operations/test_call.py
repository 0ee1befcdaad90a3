from __future__ import annotations

import pytest
from tests.support.calls import call

from carrel.control.operations.call import SELF, Call, Traffic, refusal
from carrel.control.operations.caller import OWN_WORK, Caller
from carrel.errors import Denied, from_problem
from carrel.identity import Identity, OwnerKind
from carrel.models.operations import STOP
from carrel.policy.verdict import Verdict


def test_owner_is_the_context_else_the_sandbox() -> None:
    owners = [call("session", "stop", {}, "agent", *place).owner for place in (("s", "c"), ("s", None), ("", None))]
    assert owners == ["c", "s", None]


def test_subject_is_the_caller_or_carrel_itself() -> None:
    who = Caller(Identity("agent:a", OwnerKind.AGENT, frozenset()), request_id="r-1")
    assert (Call(STOP, {}, who).subject, Call(STOP, {}, OWN_WORK).subject) == ("agent:a", SELF)


def test_traffic_is_none_until_something_is_counted() -> None:
    traffic = Traffic()
    assert (traffic.bytes_in, traffic.bytes_out) == (None, None)
    traffic.count_in(0)
    traffic.count_out(2)
    traffic.count_out(3)
    assert (traffic.bytes_in, traffic.bytes_out) == (0, 5)


def test_refusal_says_what_decided_and_survives_the_wire() -> None:
    error = refusal("shell", Verdict("deny", "no curl", "shell(curl:*)", "settings.json", "use pip"))
    again = from_problem(error.problem())
    assert isinstance(again, Denied)
    assert (again.rule, again.reason, again.hint, again.extra["retry"]) == (
        "shell(curl:*)",
        "no curl",
        "use pip",
        False,
    )


@pytest.mark.parametrize(("verdict", "word"), [("deny", "policy denies"), ("ask", "approval")])
def test_refusal_without_a_reason_has_one(verdict: str, word: str) -> None:
    assert word in refusal("shell", Verdict(verdict)).reason  # type: ignore[arg-type]
