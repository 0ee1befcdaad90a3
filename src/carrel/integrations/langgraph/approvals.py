"""Approvals as interrupts of a graph, and the answers that resume it.

An answer does not decide by itself; carrel's list of approvals does. An answer means "look again". One made here by
`answer` is also sent to carrel, once, with the token of the approver. Only "deny" needs no decision: the operation is
then not run.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from langgraph.types import Command, Interrupt, StateSnapshot
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from carrel.errors import ApprovalNeeded, InvalidRequest
from carrel.primitives.cache import Cache

Decision = Literal["approve", "deny", "look"]

MOST_GIVEN = 4096
_given: Cache[str, bool] = Cache(MOST_GIVEN)


class PendingApproval(BaseModel):
    """The value of the interrupt: the operation that waits for approval, and the reason."""

    model_config = ConfigDict(extra="ignore")

    approval: str = Field(description="id of the approval")
    operation: str = Field(description="shell, file, network, mcp or session")
    tool: str
    summary: str = Field(description="the operation in one line")
    arguments: dict[str, object]
    reason: str
    rule: str | None = None
    hint: str | None = None
    expires_at: str | None = None
    context_id: str
    problem: str | None = Field(default=None, description="why an earlier answer could not be sent to carrel")

    @classmethod
    def of(
        cls, needed: ApprovalNeeded, *, tool: str, summary: str, arguments: Mapping[str, object], context_id: str
    ) -> PendingApproval:
        """Describe the approval that an operation needs."""
        extra = needed.extra
        return cls(
            approval=needed.approval or "",
            operation=str(extra.get("operation") or ""),
            tool=tool,
            summary=summary,
            arguments=dict(arguments),
            reason=needed.reason,
            rule=needed.rule,
            hint=needed.hint,
            expires_at=None if extra.get("expires_at") is None else str(extra["expires_at"]),
            context_id=context_id,
        )


class InterruptAnswer(BaseModel):
    """The value that a graph is resumed with."""

    model_config = ConfigDict(extra="ignore")

    decision: Decision = "look"
    message: str | None = Field(default=None, max_length=2000)
    nonce: str | None = Field(default=None, description="marks an answer that was given in this process")

    @classmethod
    def give(cls, decision: Decision, message: str | None) -> InterruptAnswer:
        """Make a new answer that can be taken once in this process."""
        nonce = secrets.token_hex(16)
        _given.put(nonce, True)
        return cls(decision=decision, message=message, nonce=nonce)

    def take(self) -> bool:
        """Return whether the answer was given in this process and not taken before.

        A graph stores its answers and reads them again whenever it is resumed, perhaps in a process of another person.
        """
        return self.nonce is not None and _given.pop(self.nonce) is True

    @classmethod
    def read(cls, value: object) -> InterruptAnswer:
        """Read an answer of any form. An answer that cannot be understood means "look again"."""
        if isinstance(value, str):
            value = {"decision": value}
        try:
            return cls.model_validate(value)
        except ValidationError:
            return cls()


def pending(source: StateSnapshot | Mapping[str, Any] | None) -> dict[str, PendingApproval]:
    """Return the approvals that a graph waits for, by id of the interrupt, from its state or the result of a run."""
    return {interrupt.id: known for interrupt in _interrupts(source) if (known := _known(interrupt)) is not None}


def at_rest(state: StateSnapshot) -> bool:
    """Return whether a thread has nothing more to do. If not, run the graph with `None` or with an answer.

    `state.next` is not enough: it is also empty when a process was killed between a step and its last write.
    """
    return not state.tasks


def answer(
    source: StateSnapshot | Mapping[str, Any],
    decision: Decision,
    *,
    message: str | None = None,
    approval: str | None = None,
) -> Command[Any]:
    """Return the input that resumes a graph. With `approval` the decision is for that one; the others look again.

    state = await graph.aget_state(config)
    await graph.ainvoke(answer(state, "approve"), config, context=Workspace(client, approver=approver))
    """
    waiting = pending(source)
    if not waiting or (approval is not None and all(each.approval != approval for each in waiting.values())):
        raise InvalidRequest(
            "the graph does not wait for this approval" if approval else "the graph waits for no approval",
            field="approval",
            hint="take the state of the graph as it is now",
        )
    given = InterruptAnswer.give(decision, message).model_dump()
    look = InterruptAnswer().model_dump()
    return Command(
        resume={
            interrupt: given if approval is None or each.approval == approval else look
            for interrupt, each in waiting.items()
        }
    )


def _interrupts(source: StateSnapshot | Mapping[str, Any] | None) -> Iterable[Interrupt]:
    if source is None:
        return ()
    if isinstance(source, StateSnapshot):
        return source.interrupts
    return source.get("__interrupt__") or ()


def _known(interrupt: Interrupt) -> PendingApproval | None:
    """None for an interrupt that is not carrel's."""
    try:
        return PendingApproval.model_validate(interrupt.value)
    except ValidationError:
        return None
