"""Calls of operations for tests, and policies that a test makes up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from carrel.control.operations.call import Call
from carrel.control.operations.caller import OWN_WORK, Caller
from carrel.control.plane import ControlPlane
from carrel.identity import ROOT, Identity, OwnerKind, Scope
from carrel.models.operations import TABLE, Operation
from carrel.policy.verdict import Verdict

ADMIN = Caller(ROOT)
"""The administrator of the server."""
_KINDS = {"agent": OwnerKind.AGENT, "person": OwnerKind.PERSON}


def caller_named(subject: str, scopes: frozenset[Scope] = frozenset({Scope.OPERATE})) -> Caller:
    """Somebody of that name, such as `agent:coder`."""
    kind = _KINDS.get(subject.partition(":")[0], OwnerKind.AGENT)
    return Caller(Identity(subject, kind, scopes))


def call(
    kind: str,
    name: str,
    arguments: Mapping[str, object],
    subject: str = "agent",
    sandbox_id: str = "sbx-1",
    context_id: str | None = None,
) -> Call:
    """A call by somebody of that name, or by carrel itself. The operation need not be of the kind it has in the table."""
    row = next((row for row in TABLE if (row.kind, row.name) == (kind, name)), None)
    if row is None:
        row = Operation(name, "shell", decides="command") if kind == "shell" else _undeclared(kind, name)
    return Call(row, arguments, caller_named(subject) if subject else OWN_WORK, sandbox_id, context_id)


def _undeclared(kind: str, name: str) -> Operation:
    same = next(row for row in TABLE if row.kind == kind)
    return Operation(name, same.kind, decides=same.decides)


def decide_by(plane: ControlPlane, decide: Callable[[Call], Verdict]) -> None:
    """Put a function in the place of a control plane's policies."""

    async def decided(call: Call, *_paths: str | None) -> Verdict:
        return decide(call)

    plane.policies.decide = decided  # type: ignore[method-assign]
