"""What waits for a person, as an interrupt of the graph, and the answer that lets it go on.

An answer decides nothing by itself: carrel's inbox does. It says "look again", or, made here by `answer`, it is carried
there once for who may decide. Only "deny" needs nobody: what is not to be done is not done.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from langgraph.types import Command, Interrupt, StateSnapshot
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from carrel.errors import ApprovalNeeded, InvalidRequest

Decision = Literal["approve", "deny", "look"]

MOST_GIVEN = 4096
_given: dict[str, None] = {}
_SPACES = re.compile(r" {4,}")


def one_line(text: str, longest: int = 500) -> str:
    """An agent's words for a person who decides: without what a terminal would obey, or what hides the rest of them."""
    line = "".join(c if c.isprintable() else "⏎" if c == "\n" else "�" for c in text.strip())
    line = _SPACES.sub(lambda found: f" [{len(found[0])} spaces] ", line)
    left = len(line) - longest
    return line if left <= 0 else f"{line[:longest]} […] and {left} characters more, which are not shown"


class PendingApproval(BaseModel):
    """The value of the interrupt: the operation that waits, and why."""

    model_config = ConfigDict(extra="ignore")

    approval: str = Field(description="id in carrel's inbox")
    operation: str = Field(description="shell, file, network, mcp or session")
    tool: str
    summary: str = Field(description="what is asked for, in one line")
    arguments: dict[str, object]
    reason: str
    rule: str | None = None
    hint: str | None = None
    expires_at: str | None = None
    context_id: str
    problem: str | None = Field(default=None, description="why an earlier answer could not be given to the inbox")

    @classmethod
    def of(
        cls, needed: ApprovalNeeded, *, tool: str, summary: str, arguments: Mapping[str, object], context_id: str
    ) -> PendingApproval:
        """The approval that an operation needs."""
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
    """What a graph is resumed with."""

    model_config = ConfigDict(extra="ignore")

    decision: Decision = "look"
    message: str | None = Field(default=None, max_length=2000)
    nonce: str | None = Field(default=None, description="of an answer that was given in this process")

    @classmethod
    def give(cls, decision: Decision, message: str | None) -> InterruptAnswer:
        """A new answer, given here and now."""
        given = cls(decision=decision, message=message, nonce=secrets.token_hex(16))
        if given.nonce is not None:
            _given[given.nonce] = None
            while len(_given) > MOST_GIVEN:
                del _given[next(iter(_given))]
        return given

    def take(self) -> bool:
        """Whether it was given in this process and not taken before.

        A graph keeps its answers and hears them again whenever it is resumed, perhaps where another person decides.
        """
        return self.nonce is not None and _given.pop(self.nonce, self) is None

    @classmethod
    def read(cls, value: object) -> InterruptAnswer:
        """An answer of any form; what cannot be understood only says "look again"."""
        if isinstance(value, str):
            value = {"decision": value}
        try:
            return cls.model_validate(value)
        except ValidationError:
            return cls()


def pending(source: StateSnapshot | Mapping[str, Any] | None) -> dict[str, PendingApproval]:
    """What a graph waits for, by the id of the interrupt: of its state, or of the result of a run."""
    return {interrupt.id: known for interrupt in _interrupts(source) if (known := _known(interrupt)) is not None}


def at_rest(state: StateSnapshot) -> bool:
    """Whether a thread has nothing more to do; else it goes on with `None`, or with an answer to what it waits for.

    `state.next` does not tell: it is empty too where a step was done and its process killed before that was settled.
    """
    return not state.tasks


def answer(
    source: StateSnapshot | Mapping[str, Any],
    decision: Decision,
    *,
    message: str | None = None,
    approval: str | None = None,
) -> Command[Any]:
    """The input that resumes a graph: for all that waits, or for the one `approval`; the others only look again."""
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
