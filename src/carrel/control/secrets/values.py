"""The values of secrets: encrypted in the store, read for sandboxes and the proxy, and removed from everything that is
shown.

Only the methods for the files of a sandbox and for the proxy return values.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from carrel.control.governance.redaction import clean_error, in_thread_if_large
from carrel.control.sessions.lifecycle import LIVE
from carrel.control.sessions.live import LiveSandboxes
from carrel.control.sessions.owners import whose
from carrel.control.sessions.templates import Templates
from carrel.errors import CarrelError, LimitExceeded, NotFound, PlatformError
from carrel.primitives.cache import Cache
from carrel.primitives.keyed_lock import KeyedLocks
from carrel.redaction.redact import Redactor
from carrel.secrets import OVERHEAD, ScopeKind, Sealed, Vault, checked_name
from carrel.store import SecretInfo, SecretStore, SessionRecord
from carrel.store.secrets import Mark, places_of

log = logging.getLogger("carrel.secrets")

FRESH_S = 5.0
"""How long a change made by another server may go unnoticed."""
MOST_CACHED = 1024
ALTOGETHER = 1024 * 1024
"""Bytes of all secrets of a sandbox: its memory file system has room for twice as much."""

Names = list[str]
Named = list[tuple[str, bytes]]
Infos = list[SecretInfo]


@dataclass(frozen=True, slots=True)
class _Made:
    """A redactor, the values it was made from, and when they were read."""

    redactor: Redactor
    values: Mapping[str, bytes] = field(repr=False)
    former: Named = field(repr=False)
    at: float


@dataclass(eq=False, slots=True)
class _Making:
    """A redactor that is being made; stale if its secrets have changed meanwhile."""

    name: str
    stale: bool = False


class SecretValues:
    """The secrets of every context and template."""

    def __init__(self, vault: Vault, store: SecretStore, live: LiveSandboxes, templates: Templates):
        self._vault = vault
        self._store = store
        self._live = live
        self._templates = templates
        self._shapes = Redactor()
        self._redactors: Cache[str, _Made] = Cache(MOST_CACHED)
        self._making: list[_Making] = []
        self._locks = KeyedLocks()

    # storing

    async def put(
        self, kind: ScopeKind, scope: str, name: str, value: bytes, sandboxes: Sequence[Sequence[tuple[ScopeKind, str]]]
    ) -> SecretInfo:
        """Store a secret, or its next version. Refused when it does not fit into the `sandboxes` that get it."""
        sealed = self._vault.seal(kind, scope, name, value)
        return await self._store.put(
            kind, scope, name, sealed=sealed.data, key_id=sealed.key_id, sandboxes=sandboxes, check=_room
        )

    async def list(self, kind: ScopeKind, scope: str) -> Infos:
        """List names and versions, never values."""
        return await self._store.list(kind, scope)

    async def delete(self, kind: ScopeKind, scope: str, name: str) -> None:
        if not await self._store.delete(kind, scope, checked_name(name)):
            raise NotFound(f"{kind} '{scope}' has no secret '{name}'", field="name", hint="list them first")

    async def templates_of(self, context_id: str) -> Names:
        """Return the template of a context in a list, empty if it has none."""
        template = await self._templates.of(context_id)
        return [] if template is None else [template]

    async def missing(self, origin: str, context_id: str) -> Names:
        """Return the names of secrets of `origin` that the other context does not have."""
        own = {info.name for info in await self._store.list("context", context_id)}
        return [info.name for info in await self._store.list("context", origin) if info.name not in own]

    async def copy(self, origin: str, context_id: str, names: Sequence[str], given: Infos) -> None:
        """Copy secrets of its origin to a fork that does not run yet. Each copy is added to `given`, so that it can be
        undone when a later one fails.
        """
        places = [places_of(context_id, await self.templates_of(origin))]
        for name in names:
            record = await self._store.get("context", origin, name)
            if record is None:  # deleted meanwhile
                continue
            value = self._vault.unseal("context", origin, name, Sealed(record.key_id, record.sealed))
            sealed = self._vault.seal("context", context_id, name, value.get_secret_value())
            info = await self._store.put(
                "context", context_id, name, sealed=sealed.data, key_id=sealed.key_id, sandboxes=places, check=_room
            )
            given.append(info)
        self.stale(context_id)

    async def take_back(self, context_id: str, given: Infos) -> None:
        """Undo `copy` for a fork that failed; secrets that were put since then stay."""
        now = {info.name: info.version for info in await self._store.list("context", context_id)}
        for each in given:
            if now.get(each.name) == each.version:
                await self._store.delete("context", context_id, each.name)
        self.stale(context_id)

    async def forget(self, context_id: str) -> None:
        """Delete all secrets of a deleted context, and their former values."""
        await self._store.forget("context", context_id)
        self.stale(context_id)

    async def forget_former(self) -> None:
        """Delete former values of secrets that no running sandbox can have seen."""
        if await self._store.forget_former([state.value for state in LIVE]):
            self.stale(None)

    async def mark(self) -> Mark:
        """Return a value that changes when any server changes a secret."""
        return await self._store.mark()

    # reading

    async def values_of(self, record: SessionRecord) -> Mapping[str, bytes]:
        """Return the values of the secrets of a session. Only for its files and for the proxy."""
        return await self._values(whose(record), record.template)

    async def _values(self, context_id: str | None, template: str | None) -> dict[str, bytes]:
        templates = [] if template is None else [template]
        found: dict[str, bytes] = {}
        for record in await self._store.of_scope(context_id, templates):
            sealed = Sealed(record.key_id, record.sealed)
            value = self._vault.unseal(record.kind, record.scope, record.name, sealed)
            found[record.name] = value.get_secret_value()
        return found

    # redacting

    async def redactor(self, name: str | None) -> Redactor:
        """Return the redactor for the secrets of a context, or of an ephemeral sandbox, and for tokens of well-known
        formats.
        """
        if name is None:
            return self._shapes
        known = self._redactors.get(name)
        if known is not None and time.monotonic() - known.at < FRESH_S:
            return known.redactor
        async with self._locks.of(name):  # one caller makes it for all that wait
            known = self._redactors.get(name)
            if known is not None and time.monotonic() - known.at < FRESH_S:
                return known.redactor
            making = _Making(name)
            self._making.append(making)
            try:
                while True:
                    making.stale = False
                    made = await self._made(name, known)
                    if not making.stale:  # else a secret changed meanwhile
                        break
            finally:
                self._making.remove(making)
            self._redactors.put(name, made)
            return made.redactor

    async def _made(self, name: str, known: _Made | None) -> _Made:
        """Make a redactor; reuse the known one if nothing has changed."""
        now = time.monotonic()
        box = self._live.find(name)
        record = None if box is None else box.record
        context = name if record is None else whose(record)
        template = await self._templates.of(name) if record is None else record.template
        values, former = await self._values(context, template), await self._former(context, template)
        if not values and not former:
            redactor = self._shapes
        elif known is not None and (known.values, known.former) == (values, former):
            redactor = known.redactor
        else:
            redactor = await asyncio.to_thread(Redactor, values, former=former)
        return _Made(redactor, values, former, now)

    def stale(self, name: str | None) -> None:
        """Drop the redactors under a name, or all of them, and those that are being made."""
        if name is None:
            self._redactors.clear()
        else:
            self._redactors.pop(name)
        for each in self._making:
            each.stale = each.stale or name is None or each.name == name

    async def _former(self, context_id: str | None, template: str | None) -> Named:
        """Return the former values of secrets: running programs may still have them."""
        found: Named = []
        for record in await self._store.former(context_id, [] if template is None else [template]):
            try:
                value = self._vault.unseal(record.kind, record.scope, record.name, Sealed(record.key_id, record.sealed))
            except PlatformError as error:
                log.warning("a former value of a secret cannot be removed from outputs: %s", error)
                continue
            found.append((record.name, value.get_secret_value()))
        return found

    async def clean_text(self, name: str | None, text: str) -> str:
        """Remove secrets from a text."""
        return await in_thread_if_large(len(text), (await self.redactor(name)).text, text)

    async def clean_error(self, name: str | None, error: CarrelError) -> None:
        """Remove secrets from an error."""
        try:
            redactor = await self.redactor(name)
        except CarrelError:
            redactor = None
        clean_error(redactor, error)

    async def clean(self, name: str | None, arguments: Mapping[str, object]) -> dict[str, object]:
        """Remove secrets from arguments."""
        return await in_thread_if_large(len(repr(arguments)), (await self.redactor(name)).value, dict(arguments))


def _room(sizes: Mapping[str, int]) -> None:
    """Refuse secrets that do not fit into the memory file system of a sandbox."""
    together = sum(size - OVERHEAD for size in sizes.values())
    if together > ALTOGETHER:
        raise LimitExceeded(
            f"the secrets of a sandbox would have {together} bytes together, and there is room for {ALTOGETHER}",
            field="value",
            hint="delete what is not used any more, or keep large files in the workspace",
        )
