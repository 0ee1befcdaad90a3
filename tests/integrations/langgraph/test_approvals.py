from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Interrupt
from tests.support.langgraph_ground import Ground

from carrel.errors import ApprovalNeeded, InvalidRequest
from carrel.integrations.langgraph import PendingApproval, Workspace, answer, at_rest, build_graph, pending
from carrel.integrations.langgraph.approvals import MOST_GIVEN, InterruptAnswer

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def waits(approval: str = "apr-1") -> PendingApproval:
    needed = ApprovalNeeded("x", operation="shell", reason="no rule", approval=approval, rule=None)
    return PendingApproval.of(needed, tool="run_command", summary="touch x", arguments={"a": 1}, context_id="c")


def result(*approvals: str) -> dict[str, Any]:
    interrupts = [Interrupt(value=waits(name).model_dump(), id=f"i-{name}") for name in approvals]
    return {"__interrupt__": [Interrupt(value="how old are you?", id="other"), *interrupts]}


@given(json_values)
def test_an_answer_of_any_form_is_understood_or_only_looks(value: Any) -> None:
    found = InterruptAnswer.read(value)
    assert found.decision in {"approve", "deny", "look"}
    assert not found.take()


@given(st.sampled_from(["approve", "deny", "look"]), st.none() | st.text(max_size=2000))
def test_an_answer_survives_the_checkpoint_and_is_taken_once(decision: Any, message: str | None) -> None:
    kept = InterruptAnswer.read(InterruptAnswer.give(decision, message).model_dump())
    assert (kept.decision, kept.message) == (decision, message)
    assert kept.take() and not kept.take()


def test_answers_that_nobody_takes_are_bounded() -> None:
    first = InterruptAnswer.give("look", None)
    for _ in range(MOST_GIVEN):
        last = InterruptAnswer.give("look", None)
    assert last.take() and not first.take()


def test_what_waits_is_told_from_other_interrupts() -> None:
    assert pending(None) == {} == pending({})
    found = pending(result("apr-1", "apr-2"))
    assert {each.approval for each in found.values()} == {"apr-1", "apr-2"} and "other" not in found


def test_one_of_several_is_answered_and_the_others_only_look() -> None:
    resume = answer(result("apr-1", "apr-2"), "deny", message="no", approval="apr-2").resume
    assert isinstance(resume, dict)
    assert [resume[name]["decision"] for name in ("i-apr-1", "i-apr-2")] == ["look", "deny"]


@pytest.mark.parametrize("source, approval", [({}, None), (result("apr-1"), "apr-2")])
def test_nothing_to_answer_is_an_error(source: dict[str, Any], approval: str | None) -> None:
    with pytest.raises(InvalidRequest):
        answer(source, "approve", approval=approval)


async def test_an_old_answer_is_not_given_to_the_inbox_by_a_later_approver(ground: Ground) -> None:
    """The graph keeps every answer and hears it again; only the one that was just given may decide."""
    graph = build_graph("shell", checkpointer=InMemorySaver())
    here: Any = {"configurable": {"thread_id": ground.context}}
    state = await graph.ainvoke({"messages": [("user", "touch x")]}, here, context=ground.workspace)
    state = await graph.ainvoke(answer(state, "approve"), here, context=ground.workspace)
    trusted = Workspace(ground.agent, approver=ground.person)
    state = await graph.ainvoke(answer(state, "look"), here, context=trusted)
    [still] = pending(state).values()
    assert (await ground.person.approvals.get(still.approval)).state == "pending"
    state = await graph.ainvoke(answer(state, "deny", message="never"), here, context=trusted)
    assert "never" in state["messages"][-1].text
    assert (await ground.person.approvals.get(still.approval)).state == "denied"


class Failing(InMemorySaver):
    """A database that goes away before the checkpoint of a given number is written."""

    left = 99

    async def aput(self, *args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("the database went away")
        return await super().aput(*args)


@pytest.mark.parametrize("written", range(1, 5))
async def test_a_thread_whose_step_was_not_settled_is_not_at_rest(ground: Ground, written: int) -> None:
    saver = Failing()
    graph = build_graph("shell", checkpointer=saver)
    here: Any = {"configurable": {"thread_id": ground.context}}
    assert at_rest(await graph.aget_state(here))
    saver.left = written
    with pytest.raises(ConnectionError):
        await graph.ainvoke({"messages": [("user", "echo x")]}, here, context=ground.workspace)
    assert not at_rest(await graph.aget_state(here))
    saver.left = 99
    result = await graph.ainvoke(None, here, context=ground.workspace)
    assert result["messages"][-1].text == "x" and at_rest(await graph.aget_state(here))
    assert await ground.ran("echo x") == 1
