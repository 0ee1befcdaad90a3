"""Secrets of contexts: kept sealed, given to running sandboxes as files, and taken out of everything that is shown.

No method gives a value back. Knows no supervisor: `operations` delivers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime

from carrel.control.live import LiveSandbox, LiveSandboxes
from carrel.errors import NotFound
from carrel.events.redact import Redactor
from carrel.models import SecretList, SecretName
from carrel.secrets import Sealed, Vault, checked_name
from carrel.store import SecretInfo, SecretStore

log = logging.getLogger("carrel.secrets")

FRESH_S = 5.0
"""How long a change made by another server may stay unseen."""
MOST_CACHED = 1024


Deliver = Callable[[LiveSandbox, Mapping[str, bytes]], Awaitable[None]]


async def _nowhere(_box: LiveSandbox, _values: Mapping[str, bytes]) -> None:
    return


class Secrets:
    """The secrets of every context."""

    def __init__(self, vault: Vault, store: SecretStore, live: LiveSandboxes):
        self._vault = vault
        self._store = store
        self._live = live
        self._shapes = Redactor()
        self.deliver: Deliver = _nowhere
        """How they get into a sandbox."""
        self._redactors: OrderedDict[str, tuple[Redactor, float]] = OrderedDict()

    async def put(self, context_id: str, name: str, value: bytes) -> SecretName:
        """Keep a secret, or the next version of it; a running sandbox has it at once."""
        sealed = self._vault.seal("context", context_id, name, value)
        info = await self._store.put("context", context_id, name, sealed=sealed.data, key_id=sealed.key_id)
        await self._changed(context_id)
        return _shown(info)

    async def list(self, context_id: str) -> SecretList:
        """Names and versions, never values."""
        return SecretList(items=[_shown(info) for info in await self._store.list("context", context_id)])

    async def delete(self, context_id: str, name: str) -> None:
        """Forget a secret; a running sandbox loses it at once."""
        if not await self._store.delete("context", context_id, checked_name(name)):
            raise NotFound(f"context '{context_id}' has no secret '{name}'", field="name", hint="list them first")
        await self._changed(context_id)

    async def _changed(self, context_id: str) -> None:
        self._redactors.pop(context_id, None)
        box = self._live.find(context_id)
        if box is not None and box.record.context_id == context_id:
            await self.give(box)

    async def give(self, box: LiveSandbox) -> None:
        """Make the secrets of its context those of a running sandbox."""
        values = await self._values(box.record.context_id)
        if not values and not box.has_secrets:
            return
        box.has_secrets = True
        await self.deliver(box, values)

    async def _values(self, context_id: str | None) -> dict[str, bytes]:
        if context_id is None:
            return {}
        found: dict[str, bytes] = {}
        for record in await self._store.of_scope(context_id):
            sealed = Sealed(record.key_id, record.sealed)
            value = self._vault.unseal(record.kind, record.scope, record.name, sealed)
            found[record.name] = value.get_secret_value()
        return found

    # taking out

    async def redactor(self, context_id: str | None) -> Redactor:
        """What takes the secrets of a context, and tokens of well-known shapes, out of what is shown."""
        if context_id is None:
            return self._shapes
        known = self._redactors.get(context_id)
        now = time.monotonic()
        if known is not None and now - known[1] < FRESH_S:
            return known[0]
        values = await self._values(context_id)
        made = await asyncio.to_thread(Redactor, values) if values else self._shapes
        self._redactors[context_id] = (made, now)
        self._redactors.move_to_end(context_id)
        while len(self._redactors) > MOST_CACHED:
            self._redactors.popitem(last=False)
        return made

    async def clean(self, context_id: str | None, arguments: Mapping[str, object]) -> dict[str, object]:
        """Arguments as they may be shown."""
        return (await self.redactor(context_id)).value(dict(arguments))


def _shown(info: SecretInfo) -> SecretName:
    return SecretName(
        name=info.name,
        version=info.version,
        created_at=datetime.fromtimestamp(info.created_at, UTC),
        updated_at=datetime.fromtimestamp(info.updated_at, UTC),
    )
