"""The running sandboxes as this process holds them. Decides nothing about them."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, Protocol

from blake3 import blake3

from carrel.control.supervisor.client import SupervisorClient
from carrel.errors import PlatformError
from carrel.primitives.cache import Cache
from carrel.providers import Masks
from carrel.providers.base import Handle, Provider
from carrel.store import SessionRecord, SessionStore

ATTACHED_S = 60.0
"""How long an environment that a sandbox has is not looked up again."""
MOST_ATTACHED = 256
MOST_STARVED = 1000


class LiveSandbox:
    """The way to a sandbox, and what must be quick to look up."""

    __slots__ = (
        "asks_as",
        "attached",
        "changed",
        "code_contexts",
        "connection",
        "given",
        "giving",
        "handle",
        "has_secrets",
        "in_flight",
        "instance",
        "last_activity",
        "leased_until",
        "masks",
        "on_end",
        "only_for",
        "oom_kills",
        "over_quota",
        "packages",
        "provider",
        "record",
        "refused",
        "starved",
        "to_push",
        "trusting",
        "used",
        "used_bytes",
        "workspace",
    )

    def __init__(self, record: SessionRecord, provider: Provider, handle: Handle, workspace: str):
        self.record = record
        self.provider = provider
        self.handle = handle
        self.workspace = workspace
        self.instance = blake3(json.dumps(handle, sort_keys=True).encode()).hexdigest()[:32]
        """The name of this very sandbox: the next one of the session has another."""
        self.connection = SupervisorClient(str(handle["socket"]))
        self.last_activity = record.last_activity_at
        self.asks_as = ""
        """Who asks a person in it when neither its context nor itself does: what was approved for one sandbox of these
        calls is approved for the next.
        """
        self.only_for: tuple[str, str | None] | None = None
        """Of a sandbox for calls without a context: whose calls it runs; nobody's while it is a spare."""
        self.in_flight = 0
        self.used = False
        self.used_bytes: int | None = None
        """Whether it was used since its disk was last measured."""
        self.changed = True
        """Whether it may have changed its files since the last snapshot."""
        self.to_push = False
        """Whether it may have changed its files since the last push to the filespace."""
        self.masks: Masks | Literal["unknown"] | None = "unknown"
        """What of the policy holds inside it since it started."""
        self.trusting = False
        """Whether it was started to trust the certificates of the proxy."""
        self.giving = asyncio.Lock()
        """Held while it gets its secrets: of two changes the later one must come last."""
        self.given: Mapping[str, bytes] | None = None
        """The secrets that this server gave it last; None when that is not known."""
        self.has_secrets = True
        """Whether it may have secrets, which may have to be taken away."""
        self.packages: str | None = None
        """The environment of its template, once its Python has it; empty when there is none."""
        self.refused: tuple[PlatformError, float] | None = None
        """Why it could not have it, and until when that is not tried again."""
        self.attached: Cache[str, str] = Cache(MOST_ATTACHED, ATTACHED_S)
        """The names of environments, by what calls asked for."""
        self.code_contexts: dict[str, str | None] = {}
        """The environment of each code context that was asked for."""
        self.oom_kills = 0
        self.starved: Cache[str, bool] = Cache(MOST_STARVED)
        """Of commands that were killed: whether it was for want of memory."""
        self.over_quota: str | None = None
        self.on_end: list[Callable[[LiveSandbox], None]] = []
        """Called when it is about to end, for those who use it."""
        self.leased_until = math.inf
        """Until when this server surely has the session, by the monotonic clock."""

    def touch(self) -> None:
        """The agent used it just now."""
        self.used = self.changed = self.to_push = True
        self.last_activity = time.time()

    def check_lease(self) -> None:
        """Refuse to go on when another server may have the session by now."""
        if time.monotonic() > self.leased_until:
            raise PlatformError(
                f"the lease on session {self.record.id} could not be renewed in time",
                hint="the database may be out of reach; ask again",
            )


class Detach(Protocol):
    """Detaches everything from a sandbox that is about to end."""

    def detach(self, box: LiveSandbox) -> None: ...


class LiveSandboxes:
    """Every running sandbox of this server, by its id and by its context."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveSandbox] = {}
        self._by_context: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[LiveSandbox]:
        """The sandboxes that run now."""
        return list(self._by_id.values())

    def get(self, session_id: str) -> LiveSandbox | None:
        """The one with that id."""
        return self._by_id.get(session_id)

    def find(self, name: str) -> LiveSandbox | None:
        """The one with that id or of that context."""
        return self._by_id.get(name) or self._by_id.get(self._by_context.get(name, ""))

    def add(self, box: LiveSandbox) -> None:
        """One that was started or taken over."""
        self._by_id[box.record.id] = box
        if box.record.context_id is not None:
            self._by_context[box.record.context_id] = box.record.id

    def has(self, box: LiveSandbox) -> bool:
        """Whether this very sandbox still runs, as far as is known."""
        return self._by_id.get(box.record.id) is box

    async def end(self, box: LiveSandbox, attachments: Detach) -> None:
        """End a sandbox and forget it."""
        box.connection.close()
        attachments.detach(box)
        for told in box.on_end:
            told(box)
        await box.provider.remove(box.handle)
        if self.has(box):
            del self._by_id[box.record.id]
            if box.record.context_id is not None:
                self._by_context.pop(box.record.context_id, None)


class SessionNotes:
    """The notes of every session of this server."""

    def __init__(self, live: LiveSandboxes, store: SessionStore):
        self._live = live
        self._store = store

    async def write(self, record: SessionRecord, **values: str | None) -> None:
        """Change fields of a session's record, of a running one too."""
        box = self._live.get(record.id)
        if box is not None:
            box.record = replace(box.record, **values)  # type: ignore[arg-type]
        await self._store.update(record.id, values, fence=box.record.fence if box else None)
