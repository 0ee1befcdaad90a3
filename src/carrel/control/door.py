"""What goes through the one door: an operation, what policy decides of it, and how it went; and what a door is."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from carrel.errors import Denied
from carrel.metrics import outcome_of

log = logging.getLogger("carrel.operations")

Kind = Literal["shell", "file", "mcp", "network", "session"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing an agent asks for, as policy and audit see it."""

    kind: Kind
    name: str
    arguments: Mapping[str, object]
    actor: str
    sandbox_id: str
    context_id: str | None


@dataclass(frozen=True, slots=True)
class Decision:
    """What policy says of an operation."""

    verdict: Literal["allow", "deny", "ask"] = "allow"
    rule: str | None = None
    source: str | None = None
    reason: str = ""
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an operation went: the error's code, or None."""

    error: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)


SELF = "carrel"
"""The actor of carrel's own upkeep: it passes every door."""

ALLOW = Decision()
DONE = Outcome()
Decide = Callable[[Operation], Decision]
Record = Callable[[Operation, Decision, Outcome], None]


def allow_all(operation: Operation) -> Decision:
    """The policy of a server without one."""
    return ALLOW


def log_operation(operation: Operation, decision: Decision, outcome: Outcome) -> None:
    """The record of a server without an audit log."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug(
            "%s %s in %s by %s: %s %s",
            operation.kind,
            operation.name,
            operation.sandbox_id,
            operation.actor,
            decision.verdict,
            outcome.error or "done",
        )


def refusal(operation: Operation, decision: Decision) -> Denied:
    """The refusal object that every protocol shows."""
    asks = decision.verdict == "ask"
    reason = decision.reason or (
        "this needs a person's approval, and nobody can give it here" if asks else "policy denies this operation"
    )
    return Denied(
        reason,
        hint=decision.hint,
        operation=operation.kind,
        rule=decision.rule,
        source=decision.source,
        reason=reason,
        retry=False,
        approval=None,
    )


class Door(Protocol):
    """Where every operation is decided before it is dispatched, and recorded."""

    def admit(self, operation: Operation) -> AbstractAsyncContextManager[None]:
        """Let an operation in for as long as the block lasts, or raise `Denied`. What the block raises is recorded."""


class PlainDoor:
    """A door of two functions: one decides, one records. Nobody can be asked at it."""

    def __init__(self, decide: Decide = allow_all, record: Record = log_operation):
        self._decide = decide
        self._record = record

    @asynccontextmanager
    async def admit(self, operation: Operation) -> AsyncIterator[None]:
        """See `Door`."""
        decision = self._decide(operation)
        if decision.verdict != "allow":
            error = refusal(operation, decision)
            self._record(operation, decision, Outcome(error.code))
            raise error
        outcome = DONE
        try:
            yield
        except BaseException as error:
            outcome = Outcome(outcome_of(error))
            raise
        finally:
            self._record(operation, decision, outcome)
