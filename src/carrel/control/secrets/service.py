"""Secrets of contexts and templates: kept sealed, given to running sandboxes as files, and taken out of everything that
is shown.

No method gives a value back but for the one the proxy needs. Knows no supervisor: `operations` delivers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from carrel.control.governance.redaction import apart
from carrel.control.mcp.request_checks import whose
from carrel.control.sessions.lifecycle import LIVE
from carrel.control.sessions.live import LiveSandbox, LiveSandboxes
from carrel.errors import LimitExceeded, NotFound, PlatformError, Unsupported
from carrel.models import SecretList, SecretName
from carrel.providers.base import Capability
from carrel.redaction.redact import Redactor
from carrel.secrets import OVERHEAD, ScopeKind, Sealed, Vault, checked_name
from carrel.store import SecretInfo, SecretStore, SessionRecord
from carrel.store.secrets import Mark, places_of

log = logging.getLogger("carrel.secrets")

FRESH_S = 5.0
"""How long a change made by another server may stay unseen."""
MOST_CACHED = 1024
ALTOGETHER = 1024 * 1024
"""Bytes of all the secrets of a sandbox: what its memory file system has room for, twice."""


Boxes = list[LiveSandbox]
Names = list[str]
Named = list[tuple[str, bytes]]
Shown = list[SecretName]
Deliver = Callable[[LiveSandbox, Mapping[str, bytes]], Awaitable[None]]


Dress = Callable[[SessionRecord, Mapping[str, bytes]], Awaitable[Mapping[str, bytes]]]
"""Makes of the secrets of a session the files that its sandbox gets."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A redactor, what it was made of, and when that was read."""

    redactor: Redactor
    values: Mapping[str, bytes] = field(repr=False)
    former: Named = field(repr=False)
    at: float


@dataclass(eq=False, slots=True)
class _Making:
    """A redactor that is being made; stale when its secrets have changed meanwhile."""

    name: str
    stale: bool = False


async def _nowhere(_box: LiveSandbox, _values: Mapping[str, bytes]) -> None:
    return


async def _as_they_are(_record: SessionRecord, values: Mapping[str, bytes]) -> Mapping[str, bytes]:
    return values


async def _nobody(_context_id: str | None) -> None:
    return


async def _none(_name: str) -> str | None:
    return None


class Secrets:
    """The secrets of every context and template."""

    def __init__(self, vault: Vault, store: SecretStore, live: LiveSandboxes):
        self._vault = vault
        self._store = store
        self._live = live
        self._shapes = Redactor()
        self.deliver: Deliver = _nowhere
        """How they get into a sandbox."""
        self.dress: Dress = _as_they_are
        self.on_changed: Callable[[str | None], Awaitable[None]] = _nobody
        """Told of a context whose secrets have changed; None when those of many have."""
        self.template_of: Callable[[str], Awaitable[str | None]] = _none
        """The template of a context."""
        self._redactors: OrderedDict[str, _Made] = OrderedDict()
        self._making: list[_Making] = []
        self._mark: Mark | None = None

    async def put(self, scope: str, name: str, value: bytes, *, kind: ScopeKind = "context") -> SecretName:
        """Keep a secret, or the next version of it; running sandboxes have it at once."""
        sealed = self._vault.seal(kind, scope, name, value)
        if kind == "context":
            sandboxes = [places_of(scope, await self._templates(scope))]
        else:
            sandboxes = [places_of(box.record.context_id, [scope]) for box in self._using(kind, scope)]
        info = await self._store.put(
            kind, scope, name, sealed=sealed.data, key_id=sealed.key_id, sandboxes=sandboxes, check=_room
        )
        await self._changed(kind, scope)
        return _shown(info)

    async def missing(self, origin: str, context_id: str) -> Names:
        """The names of the secrets that a context has and another has not."""
        own = {info.name for info in await self._store.list("context", context_id)}
        return [info.name for info in await self._store.list("context", origin) if info.name not in own]

    async def copy(self, origin: str, context_id: str, names: Sequence[str], given: Shown) -> None:
        """Give a fork that does not run yet secrets of its origin. What it has been given is added to `given`, one by
        one, so that it can be taken back when a later one cannot be given.
        """
        places = [places_of(context_id, await self._templates(origin))]
        for name in names:
            record = await self._store.get("context", origin, name)
            if record is None:  # deleted meanwhile
                continue
            value = self._vault.unseal("context", origin, name, Sealed(record.key_id, record.sealed))
            sealed = self._vault.seal("context", context_id, name, value.get_secret_value())
            info = await self._store.put(
                "context", context_id, name, sealed=sealed.data, key_id=sealed.key_id, sandboxes=places, check=_room
            )
            given.append(_shown(info))
        self._stale(context_id)

    async def take_back(self, context_id: str, given: Shown) -> None:
        """Take back what `copy` gave to a fork that could not be made; what others have put since stays."""
        now = {info.name: info.version for info in await self._store.list("context", context_id)}
        for each in given:
            if now.get(each.name) == each.version:
                await self._store.delete("context", context_id, each.name)
        self._stale(context_id)

    async def list(self, scope: str, *, kind: ScopeKind = "context") -> SecretList:
        """Names and versions, never values."""
        return SecretList(items=[_shown(info) for info in await self._store.list(kind, scope)])

    async def delete(self, scope: str, name: str, *, kind: ScopeKind = "context") -> None:
        """Forget a secret; running sandboxes lose it at once."""
        if not await self._store.delete(kind, scope, checked_name(name)):
            raise NotFound(f"{kind} '{scope}' has no secret '{name}'", field="name", hint="list them first")
        await self._changed(kind, scope)

    async def forget(self, context_id: str) -> None:
        """Forget all secrets of a context that is gone, and what they were before."""
        await self._store.forget("context", context_id)
        self._stale(context_id)

    async def forget_former(self) -> None:
        """Forget the former values of secrets that no sandbox which still runs can have seen."""
        if await self._store.forget_former([state.value for state in LIVE]):
            self._stale(None)

    def _using(self, kind: ScopeKind, scope: str) -> Boxes:
        """The running sandboxes that have the secrets of a context or a template."""
        if kind == "template":
            return [box for box in self._live.all() if box.record.template == scope and box.record.acts_for is None]
        box = self._live.find(scope)
        return [] if box is None or box.record.context_id != scope else [box]

    async def _changed(self, kind: ScopeKind, scope: str) -> None:
        boxes = self._using(kind, scope)
        for name in (scope, *(box.record.id for box in boxes)) if kind == "context" else (None,):
            self._stale(name)
        # One that cannot be reached must not keep the others from it.
        failures = await asyncio.gather(*map(self.give, boxes), return_exceptions=True)
        await self.on_changed(scope if kind == "context" else None)
        for failure in failures:
            if failure is not None:
                raise failure

    async def values_of(self, record: SessionRecord) -> Mapping[str, bytes]:
        """The values, for who puts them into requests outside of the sandbox. Nobody else may ask."""
        return await self._values(whose(record), record.template)

    async def give(self, box: LiveSandbox) -> None:
        """Make the secrets of its context and its template those of a running sandbox."""
        record = box.record
        self._stale(record.context_id or record.id)  # it was made before the template was known
        async with box.giving:
            values = await self.dress(record, await self._values(whose(record), record.template))
            if values == box.given or (not values and not box.has_secrets):
                return
            if values:
                box.provider.require(Capability.SECRETS)
            elif Capability.SECRETS not in box.provider.capabilities():
                return
            box.has_secrets, box.given = True, None
            self._stale(record.context_id or record.id)  # one made meanwhile may not know what another server put
            await self.deliver(box, values)
            box.given = values

    async def catch_up(self) -> None:
        """Give running sandboxes what another server has changed."""
        mark = await self._store.mark()
        if mark == self._mark:
            return
        self._stale(None)
        boxes = [box for box in self._live.all() if box.record.acts_for is None]
        failures = await asyncio.gather(*map(self.give, boxes), return_exceptions=True)
        for box, failure in zip(boxes, failures, strict=True):
            if failure is not None:
                log.warning("sandbox %s does not have its secrets as they are now: %s", box.record.id, failure)
        if all(failure is None or isinstance(failure, Unsupported) for failure in failures):  # else it is tried again
            self._mark = mark

    async def _values(self, context_id: str | None, template: str | None) -> dict[str, bytes]:
        templates = [] if template is None else [template]
        found: dict[str, bytes] = {}
        for record in await self._store.of_scope(context_id, templates):
            sealed = Sealed(record.key_id, record.sealed)
            value = self._vault.unseal(record.kind, record.scope, record.name, sealed)
            found[record.name] = value.get_secret_value()
        return found

    async def _templates(self, name: str) -> Names:
        template = await self.template_of(name)
        return [] if template is None else [template]

    # taking out

    async def redactor(self, name: str | None) -> Redactor:
        """What takes the secrets of a context, or of an ephemeral sandbox, and tokens of well-known shapes out of what
        is shown.
        """
        if name is None:
            return self._shapes
        known = self._redactors.get(name)
        if known is not None and time.monotonic() - known.at < FRESH_S:
            return known.redactor
        making = _Making(name)
        self._making.append(making)
        try:
            while True:
                making.stale = False
                made = await self._made(name, known)
                if not making.stale:  # else a secret was changed meanwhile
                    break
        finally:
            self._making.remove(making)
        self._redactors[name] = made
        self._redactors.move_to_end(name)
        while len(self._redactors) > MOST_CACHED:
            self._redactors.popitem(last=False)
        return made.redactor

    async def _made(self, name: str, known: _Made | None) -> _Made:
        """What is known already, if nothing has changed since."""
        now = time.monotonic()
        box = self._live.find(name)
        record = None if box is None else box.record
        context = name if record is None else whose(record)
        template = await self.template_of(name) if record is None else record.template
        values, former = await self._values(context, template), await self._former(context, template)
        if not values and not former:
            redactor = self._shapes
        elif known is not None and (known.values, known.former) == (values, former):
            redactor = known.redactor
        else:
            redactor = await asyncio.to_thread(Redactor, values, former=former)
        return _Made(redactor, values, former, now)

    def _stale(self, name: str | None) -> None:
        """What was made of the secrets under a name, or of all, is not used any more; nor is what is being made."""
        if name is None:
            self._redactors.clear()
        else:
            self._redactors.pop(name, None)
        for each in self._making:
            each.stale = each.stale or name is None or each.name == name

    async def _former(self, context_id: str | None, template: str | None) -> Named:
        """The values that secrets had before: what runs may have kept them."""
        found: Named = []
        for record in await self._store.former(context_id, [] if template is None else [template]):
            try:
                value = self._vault.unseal(record.kind, record.scope, record.name, Sealed(record.key_id, record.sealed))
            except PlatformError as error:
                log.warning("a former value of a secret cannot be taken out of outputs: %s", error)
                continue
            found.append((record.name, value.get_secret_value()))
        return found

    async def clean_text(self, name: str | None, text: str) -> str:
        """A text as it may be shown."""
        return await apart(len(text), (await self.redactor(name)).text, text)

    async def clean(self, name: str | None, arguments: Mapping[str, object]) -> dict[str, object]:
        """Arguments as they may be shown."""
        return await apart(len(repr(arguments)), (await self.redactor(name)).value, dict(arguments))


def _room(sizes: Mapping[str, int]) -> None:
    """Refuse what the memory file system of a sandbox would not hold."""
    together = sum(size - OVERHEAD for size in sizes.values())
    if together > ALTOGETHER:
        raise LimitExceeded(
            f"the secrets of a sandbox would have {together} bytes together, and there is room for {ALTOGETHER}",
            field="value",
            hint="delete what is not used any more, or keep large files in the workspace",
        )


def _shown(info: SecretInfo) -> SecretName:
    return SecretName(
        name=info.name,
        version=info.version,
        created_at=datetime.fromtimestamp(info.created_at, UTC),
        updated_at=datetime.fromtimestamp(info.updated_at, UTC),
    )
