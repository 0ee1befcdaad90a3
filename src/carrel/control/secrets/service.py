"""Secrets of contexts and templates for callers: put, list, delete. Running sandboxes follow at once."""

from __future__ import annotations

from datetime import UTC, datetime

from carrel.control.secrets.values import SecretValues
from carrel.control.sessions.attachments import Attachments
from carrel.control.sessions.live import LiveSandbox, LiveSandboxes
from carrel.models import SecretList, SecretName
from carrel.secrets import ScopeKind
from carrel.store import SecretInfo
from carrel.store.secrets import places_of

Boxes = list[LiveSandbox]


class SecretService:
    """The secrets of every context and template. No method returns a value."""

    def __init__(self, values: SecretValues, live: LiveSandboxes, attachments: Attachments):
        self._values = values
        self._live = live
        self._attachments = attachments

    async def put(self, scope: str, name: str, value: bytes, *, kind: ScopeKind = "context") -> SecretName:
        """Store a secret, or its next version; running sandboxes get it at once."""
        if kind == "context":
            sandboxes = [places_of(scope, await self._values.templates_of(scope))]
        else:
            sandboxes = [places_of(box.record.context_id, [scope]) for box in self._using(kind, scope)]
        info = await self._values.put(kind, scope, name, value, sandboxes)
        await self._changed(kind, scope)
        return _shown(info)

    async def list(self, scope: str, *, kind: ScopeKind = "context") -> SecretList:
        """List names and versions, never values."""
        return SecretList(items=[_shown(info) for info in await self._values.list(kind, scope)])

    async def delete(self, scope: str, name: str, *, kind: ScopeKind = "context") -> None:
        """Delete a secret; running sandboxes lose it at once."""
        await self._values.delete(kind, scope, name)
        await self._changed(kind, scope)

    def _using(self, kind: ScopeKind, scope: str) -> Boxes:
        """Return the running sandboxes that have the secrets of a context or a template."""
        if kind == "template":
            return [box for box in self._live.all() if box.record.template == scope and box.record.acts_for is None]
        box = self._live.find(scope)
        return [] if box is None or box.record.context_id != scope else [box]

    async def _changed(self, kind: ScopeKind, scope: str) -> None:
        boxes = self._using(kind, scope)
        for name in (scope, *(box.record.id for box in boxes)) if kind == "context" else (None,):
            self._values.stale(name)
        await self._attachments.refresh(boxes)


def _shown(info: SecretInfo) -> SecretName:
    return SecretName(
        name=info.name,
        version=info.version,
        created_at=datetime.fromtimestamp(info.created_at, UTC),
        updated_at=datetime.fromtimestamp(info.updated_at, UTC),
    )
