"""What goes through the one door: an operation, what policy decides of it, and how it went; and what a door is."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from carrel.errors import Denied
from carrel.metrics import outcome_of
from carrel.policy.verdict import ALLOWED, Verdict

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
    asks_as: str = ""
    """Under which name a person is asked, when neither the context nor the sandbox is what an approval is for."""
    runs_in: str = ""
    """Which very sandbox it is dispatched to, by requests to its supervisor alone; empty for what goes other ways."""
    proxy_verdict: Verdict | None = None
    """Of an outbound connection: the verdict of the proxy, by the plan that it has. Admission is never milder, and
    leaves the audit record to the proxy's log: only the proxy knows when the connection opens and how it ends.
    """


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an operation went: the error's code, or None."""

    error: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)


class Traffic:
    """How many bytes an operation put into a sandbox or workspace, and how many it took out; None where none were.

    Counted as they were before secrets were taken out of them. `approval` is the one that the operation runs under.
    """

    __slots__ = ("approval", "bytes_in", "bytes_out")

    def __init__(self) -> None:
        self.approval: str | None = None
        self.bytes_in: int | None = None
        self.bytes_out: int | None = None

    def took(self, size: int) -> None:
        """Bytes went in."""
        self.bytes_in = size if self.bytes_in is None else self.bytes_in + size

    def gave(self, size: int) -> None:
        """Bytes came out."""
        self.bytes_out = size if self.bytes_out is None else self.bytes_out + size


SELF = "carrel"
"""The actor of carrel's own upkeep: it passes every door."""

DONE = Outcome()
Decide = Callable[[Operation], Verdict]
Record = Callable[[Operation, Verdict, Outcome], None]


def allow_all(operation: Operation) -> Verdict:
    """The policy of a server without one."""
    return ALLOWED


def log_operation(operation: Operation, verdict: Verdict, outcome: Outcome) -> None:
    """The record of a server without an audit log."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug(
            "%s %s in %s by %s: %s %s",
            operation.kind,
            operation.name,
            operation.sandbox_id,
            operation.actor,
            verdict.verdict,
            outcome.error or "done",
        )


def refusal(operation: Operation, verdict: Verdict) -> Denied:
    """The refusal object that every protocol shows."""
    asks = verdict.verdict == "ask"
    reason = verdict.reason or (
        "this needs a person's approval, and nobody can give it here" if asks else "policy denies this operation"
    )
    return Denied(
        reason,
        hint=verdict.hint,
        operation=operation.kind,
        rule=verdict.rule,
        source=verdict.source,
        reason=reason,
        retry=False,
        approval=None,
    )


class Door(Protocol):
    """Where every operation is decided before it is dispatched, and recorded."""

    def admit(self, operation: Operation) -> AbstractAsyncContextManager[Traffic]:
        """Let an operation in for as long as the block lasts, or raise `Denied`. What the block raises is recorded, and
        so is what it counts.
        """


class PlainDoor:
    """A door of two functions: one decides, one records. Nobody can be asked at it, and nothing is counted."""

    def __init__(self, decide: Decide = allow_all, record: Record = log_operation):
        self._decide = decide
        self._record = record

    @asynccontextmanager
    async def admit(self, operation: Operation) -> AsyncIterator[Traffic]:
        """See `Door`."""
        verdict = self._decide(operation)
        if verdict.verdict != "allow":
            error = refusal(operation, verdict)
            self._record(operation, verdict, Outcome(error.code))
            raise error
        outcome = DONE
        try:
            yield Traffic()
        except BaseException as error:
            outcome = Outcome(outcome_of(error))
            raise
        finally:
            self._record(operation, verdict, outcome)
