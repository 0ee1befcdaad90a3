"""A call: one operation with its arguments and its caller, as policy, approvals and the audit log see it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from carrel.control.operations.caller import Caller, OwnWork
from carrel.errors import Denied
from carrel.models.operations import Kind, Operation
from carrel.policy.verdict import Verdict

SELF = "carrel"
"""The subject of carrel's own work, which is neither decided nor recorded."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operation."""

    operation: Operation
    arguments: Mapping[str, object]
    caller: Caller | OwnWork
    sandbox_id: str = ""
    context_id: str | None = None
    asks_as: str = ""
    """The name that an approval is for, when that is neither the context nor the sandbox."""
    runs_in: str = ""
    """The sandbox instance whose supervisor performs it; empty for operations that need no supervisor."""

    proxy_verdict: Verdict | None = None
    """For an outbound connection: the verdict of the proxy. Admission is never milder, and leaves the audit record to
    the log of the proxy: only the proxy knows when the connection opens and how it ends.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.caller, Caller | OwnWork):
            raise TypeError(f"a call needs a caller: {self.operation.name}")

    @property
    def kind(self) -> Kind:
        assert self.operation.kind is not None, f"{self.operation.name} is no operation by itself"
        return self.operation.kind

    @property
    def name(self) -> str:
        return self.operation.name

    @property
    def owner(self) -> str | None:
        """The context, or the sandbox if it has no context; None for an operation on neither."""
        return self.context_id or self.sandbox_id or None

    @property
    def subject(self) -> str:
        """The name of the caller."""
        return SELF if isinstance(self.caller, OwnWork) else self.caller.identity.subject


class Traffic:
    """Bytes that an operation put into a sandbox or workspace, and bytes that it took out; None for none.

    Counted before secrets are removed. `approval` is the approval that the operation runs under, `record` its number in
    the audit log, and `told` what only its event says: how a command ended.
    """

    __slots__ = ("approval", "bytes_in", "bytes_out", "record", "told")

    def __init__(self) -> None:
        self.approval: str | None = None
        self.bytes_in: int | None = None
        self.bytes_out: int | None = None
        self.record: int | None = None
        self.told: Mapping[str, object] = {}

    def count_in(self, size: int) -> None:
        self.bytes_in = size if self.bytes_in is None else self.bytes_in + size

    def count_out(self, size: int) -> None:
        self.bytes_out = size if self.bytes_out is None else self.bytes_out + size


def refusal(kind: Kind, verdict: Verdict, *, field: str | None = None) -> Denied:
    """Return the refusal of an operation, as every protocol shows it."""
    reason = verdict.reason or (
        "this needs a person's approval, and nobody can give it here"
        if verdict.asks
        else "policy denies this operation"
    )
    return Denied(
        reason,
        field=field,
        hint=verdict.hint,
        operation=kind,
        rule=verdict.rule,
        source=verdict.source,
        reason=reason,
        retry=False,
        approval=None,
    )
