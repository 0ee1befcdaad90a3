"""The terms a sandbox runs under: what is asked against what is promised, recorded and already running. Pure."""

from __future__ import annotations

from carrel.errors import Conflict
from carrel.models import SandboxRequest
from carrel.providers.base import Capability, Launch, Provider
from carrel.store import SessionRecord

LIMIT_CAPABILITY = {
    "cpus": Capability.LIMIT_CPUS,
    "memory_mb": Capability.LIMIT_MEMORY,
    "processes": Capability.LIMIT_PROCESSES,
}
"""The disk limit is not in here: the control plane watches workspaces itself, whatever the provider."""


def launch(record: SessionRecord, provider: Provider, workspace: str) -> Launch:
    """What the provider is told."""
    limits = record.limits
    return Launch(
        id=record.id,
        workspace=workspace,
        network=record.network,
        cpus=limits.cpus,
        memory_mb=limits.memory_mb,
        disk_mb=limits.disk_mb if Capability.LIMIT_DISK in provider.capabilities() else None,
        processes=limits.processes,
        env=record.env,
    )


def changes(record: SessionRecord) -> dict[str, object]:
    """What a new start writes over the record of an old one."""
    names = ("state", "provider", "isolation_level", "unsafe", "trust", "network", "limits", "env", "labels")
    return {name: getattr(record, name) for name in (*names, "last_activity_at", "idempotency_key")}


def refuse_differences(record: SessionRecord, request: SandboxRequest) -> None:
    """What is asked of a running sandbox and differs from what it has is refused, never ignored."""
    given = request.model_fields_set
    asked: list[tuple[str, object, object]] = []
    if request.provider != "auto":
        asked.append(("provider", request.provider, record.provider))
    if request.network is not None:
        asked.append(("network", request.network, record.network))
    if "trust" in given:
        asked.append(("trust", request.trust, record.trust))
    if request.env:
        asked.append(("env", request.env, dict(record.env)))
    for name, value in request.limits.model_dump(exclude_none=True).items():
        asked.append((f"limits.{name}", value, getattr(record.limits, name)))
    for field, wanted, present in asked:
        if wanted != present:
            shown = "other values" if field == "env" else f"{present!s}"
            raise Conflict(
                f"the sandbox of this context runs with {field} = {shown}",
                field=field,
                hint="leave the field out, or end the sandbox first: its files stay",
            )
