"""A call: one operation that somebody asks for, as policy, approvals and the audit log see it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from carrel.control.operations.caller import Caller
from carrel.errors import Denied
from carrel.models.operations import Kind, Operation
from carrel.policy.verdict import Verdict

SELF = "carrel"
"""The subject of carrel's own work, which is neither decided nor recorded."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operation. `caller` is who asks; None for carrel's own upkeep."""

    operation: Operation
    arguments: Mapping[str, object]
    caller: Caller | None
    sandbox_id: str = ""
    context_id: str | None = None
    asks_as: str = ""
    """Under which name a person is asked, when neither the context nor the sandbox is what an approval is for."""
    runs_in: str = ""
    """Which very sandbox it is dispatched to, by requests to its supervisor alone; empty for what goes other ways."""

    proxy_verdict: Verdict | None = None
    """Of an outbound connection: the verdict of the proxy, by the plan that it has. Admission is never milder, and
    leaves the audit record to the proxy's log: only the proxy knows when the connection opens and how it ends.
    """

    @property
    def kind(self) -> Kind:
        """The kind of the operation."""
        assert self.operation.kind is not None, f"{self.operation.name} is no operation by itself"
        return self.operation.kind

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.operation.name

    @property
    def owner(self) -> str | None:
        """The context it is for, or the sandbox that has none; None for what belongs to neither."""
        return self.context_id or self.sandbox_id or None

    @property
    def subject(self) -> str:
        """The name of who asks."""
        return SELF if self.caller is None else self.caller.identity.subject


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


def refusal(kind: Kind, verdict: Verdict, *, field: str | None = None) -> Denied:
    """The refusal of an operation of a kind, as every protocol shows it."""
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
