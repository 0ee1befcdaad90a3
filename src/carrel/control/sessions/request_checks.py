"""Checks of a request for a sandbox against the settings, the record of the session and the running sandbox.

Refuses before anything is made; starts nothing.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace

from carrel.config import Settings
from carrel.control.sessions.lifecycle import LIVE, Event, next_state
from carrel.control.sessions.owners import BUILDS_IMAGE, LABEL
from carrel.control.sessions.placement import resolve
from carrel.errors import Conflict, InvalidRequest, Unsupported
from carrel.models import Network, SandboxRequest, State, Trust
from carrel.models.images import HOST_IMAGE
from carrel.providers import Masks
from carrel.providers.base import Capability, FolderMounts, Launch, Provider, RootImage
from carrel.providers.trust import stricter
from carrel.store import SessionRecord

_SANDBOX = re.compile(r"(sbx|eph)-[0-9a-f]{16}")
"""A sandbox is found by its id or its context, so a context must not look like an id."""


def new_record(
    request: SandboxRequest,
    existing: SessionRecord | None,
    key: str | None,
    settings: Settings,
    providers: Mapping[str, Provider],
    node: str,
    *,
    host_memory_mb: int,
    previous: SessionRecord | None,
) -> tuple[SessionRecord, Provider]:
    """Return the record and the provider of a sandbox to start. Everything that can be refused is refused here.

    `previous` is the newest session of the context. If it was ended for good, its files may still be there: they are
    trusted no more than before, unless the request names a trust.
    """
    if existing is None and _SANDBOX.fullmatch(request.context_id or ""):
        raise InvalidRequest(
            "a context cannot have the form of a sandbox id",
            field="context_id",
            hint="take another name for the context",
        )
    given = request.model_fields_set
    trust = _trust(request, existing, previous)
    explicit = {} if existing is None else existing.limits.model_dump(exclude_none=True)
    if (longest := settings.sandbox.lifetime_s) is not None and "lifetime_s" in explicit:
        explicit["lifetime_s"] = min(explicit["lifetime_s"], longest)  # the operator may have lowered it meanwhile
    explicit |= request.limits.model_dump(exclude_none=True)
    resolved = resolve(
        settings,
        providers,
        provider=request.provider,
        trust=trust,
        network=request.network or _kept_network(existing, trust),
        limits=explicit,
        host_memory_mb=host_memory_mb,
        needs=_needs(request, existing),
        least_level=_kept_level(existing, trust),
    )
    provider = resolved.provider
    now = time.time()
    ephemeral = request.context_id is None
    if ephemeral and request.filespace:
        raise InvalidRequest(
            "an ephemeral sandbox has no filespace", field="filespace", hint="make the sandbox with a context_id"
        )
    filespace = request.filespace
    if filespace is None:
        stored = not ephemeral and request.workspace_path is None
        filespace = existing.filespace if existing else settings.sandbox.filespace and stored
    record = SessionRecord(
        id=existing.id if existing else f"{'eph' if ephemeral else 'sbx'}-{secrets.token_hex(8)}",
        context_id=request.context_id,
        ephemeral=ephemeral,
        state=State.CREATING if existing is None else next_state(_settled(existing.state), Event.START),
        provider=provider.name,
        isolation_level=resolved.level,
        unsafe=provider.unsafe,
        trust=trust,
        network=resolved.network,
        limits=resolved.limits,
        env=request.env if existing is None or "env" in given else existing.env,
        labels=request.labels if existing is None or request.labels else existing.labels,
        idempotency_key=key or (existing.idempotency_key if existing else None),
        created_at=existing.created_at if existing else now,
        last_activity_at=now,
        node=node,
        fence=existing.fence if existing else 1,
        filespace=filespace,
        snapshot=existing.snapshot if existing else None,
        notice=existing.notice if existing else None,
        used_bytes=existing.used_bytes if existing else None,
        template=request.template,
        workspace_path=existing.workspace_path if existing else request.workspace_path,
        host_paths=existing.host_paths if existing else (),
        image=existing.image if existing else None,
        image_digest=existing.image_digest if existing else None,
        image_workdir=existing.image_workdir if existing else False,
    )
    if request.workspace_path not in {None, record.workspace_path}:
        raise Conflict(
            f"the files of this context are {record.workspace_path or 'in a workspace of carrel'}",
            field="workspace_path",
            hint="use another context for another folder",
        )
    if request.host_paths is not None:
        record = replace(record, host_paths=tuple(request.host_paths))
    if record.workspace_path is not None:
        if request.limits.disk_mb is not None:
            raise Unsupported(
                "the size of a folder of the host cannot be limited",
                field="limits.disk_mb",
                hint="leave the limit out, or let carrel store the workspace",
            )
        record = replace(record, limits=record.limits.model_copy(update={"disk_mb": None}), notice=None)
    return record, provider


def _trust(request: SandboxRequest, existing: SessionRecord | None, previous: SessionRecord | None) -> Trust:
    if "trust" in request.model_fields_set:
        return request.trust
    if existing is not None:
        return existing.trust
    if previous is not None and not previous.forgotten:
        return stricter(previous.trust, request.trust)
    return request.trust


def _kept_network(existing: SessionRecord | None, trust: Trust) -> Network | None:
    """Return the network that a session keeps. One that is trusted less than before gets that of its new trust."""
    if existing is None or stricter(existing.trust, trust) != existing.trust:
        return None
    return existing.network


def _kept_level(existing: SessionRecord | None, trust: Trust) -> int:
    """Return the least isolation of a session that has run before. Only a request with a higher trust lowers it."""
    if existing is None or stricter(existing.trust, trust) != trust:
        return 0
    return existing.isolation_level


def _needs(request: SandboxRequest, existing: SessionRecord | None) -> list[Capability]:
    """Return the capabilities that decide which provider is right, besides those for limits and network."""
    wanted = {
        Capability.FOLDERS: request.workspace_path or (existing and existing.workspace_path),
        Capability.IMAGES: request.image not in {None, HOST_IMAGE} or (existing and existing.image),
        Capability.IMAGE_BUILDS: request.labels.get(LABEL) == BUILDS_IMAGE,
    }
    return [capability for capability, needed in wanted.items() if needed]


def _settled(state: State) -> State:
    """Treat a session in a live state without a sandbox as stopped: its last server did not finish."""
    return next_state(state, Event.STOP) if state in LIVE else state


def launch(
    record: SessionRecord,
    provider: Provider,
    workspace: str,
    masks: Masks | None = None,
    *,
    trust: bool = False,
    folder: FolderMounts | None = None,
    image: RootImage | None = None,
) -> Launch:
    """Return what the provider needs to start a sandbox."""
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
        masks=masks,
        trust=trust,
        folder=folder,
        image=image,
    )


def changes(record: SessionRecord) -> dict[str, object]:
    """Return the fields that a new start writes over the record of an old one."""
    names = ("state", "provider", "isolation_level", "unsafe", "trust", "network", "limits", "env", "labels")
    more = (
        "last_activity_at",
        "idempotency_key",
        "node",
        "filespace",
        "notice",
        "agent",
        "host_paths",
        "ends_at",
        "image_workdir",
    )
    return {name: getattr(record, name) for name in (*names, *more)}


def refuse_differences(record: SessionRecord, request: SandboxRequest) -> None:
    """Refuse a request that differs from the running sandbox: differences are never ignored."""
    given = request.model_fields_set
    asked: list[tuple[str, object, object]] = []
    if request.provider != "auto":
        asked.append(("provider", request.provider, record.provider))
    if request.network is not None:
        asked.append(("network", request.network, record.network))
    if "trust" in given:
        asked.append(("trust", request.trust, record.trust))
    if request.template is not None:
        asked.append(("template", request.template, record.template))
    if request.filespace is not None:
        asked.append(("filespace", request.filespace, record.filespace))
    if request.image is not None:
        asked.append(("image", request.image, record.image or HOST_IMAGE))
    if request.start_in is not None:
        asked.append(("start_in", request.start_in, "image" if record.image_workdir else "workspace"))
    if request.workspace_path is not None:
        asked.append(("workspace_path", request.workspace_path, record.workspace_path))
    if request.host_paths is not None:
        asked.append(("host_paths", tuple(request.host_paths), record.host_paths))
    if request.env:
        asked.append(("env", request.env, dict(record.env)))
    for name, value in request.limits.model_dump(exclude_none=True).items():
        asked.append((f"limits.{name}", value, getattr(record.limits, name)))
    for field, wanted, present in asked:
        if wanted != present:
            shown = "other values" if field in {"env", "host_paths"} else f"{present!s}"
            raise Conflict(
                f"the sandbox of this context runs with {field} = {shown}",
                field=field,
                hint="leave the field out, or end the sandbox first: its files stay",
            )
