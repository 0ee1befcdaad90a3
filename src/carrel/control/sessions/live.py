"""The running sandboxes in the memory of this process. Decides nothing about them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, Protocol

from blake3 import blake3

from carrel.control.supervisor.client import SupervisorClient
from carrel.errors import DatabaseUnavailable, PlatformError
from carrel.models import SandboxInfo, State
from carrel.primitives.cache import Cache
from carrel.providers import Masks
from carrel.providers.base import Handle, Provider
from carrel.store import SessionRecord, SessionStore

ATTACHED_S = 60.0
"""How long an environment that a sandbox has is not looked up again."""
MOST_ATTACHED = 256
MOST_STARVED = 1000
MOST_NAMED = 10
"""How many contexts on the same folder a notice names."""


class LiveSandbox:
    """The connection to a running sandbox, and facts about it that are needed often."""

    __slots__ = (
        "asks_as",
        "attached",
        "changed",
        "code_contexts",
        "connection",
        "delivered_secrets",
        "handle",
        "has_secrets",
        "in_flight",
        "instance",
        "last_activity",
        "leased_until",
        "link",
        "masks",
        "on_end",
        "only_for",
        "oom_kills",
        "over_quota",
        "packages",
        "provider",
        "record",
        "refused",
        "secrets_lock",
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
        """The name of this instance: the next sandbox of the session has another."""
        self.link = provider.link(handle)
        self.connection = SupervisorClient(self.link)
        self.last_activity = record.last_activity_at
        self.asks_as = ""
        """The name that approvals in it are for, if that is neither its context nor its id: an approval for one sandbox
        for calls without a context is valid in the next.
        """
        self.only_for: tuple[str, str | None] | None = None
        """For a sandbox for calls without a context: the caller whose calls it runs; None while it is a spare."""
        self.in_flight = 0
        self.used = False
        """Whether it was used since its disk was last measured."""
        self.used_bytes: int | None = None
        self.changed = True
        """Whether its files may have changed since the last snapshot."""
        self.to_push = False
        """Whether its files may have changed since the last push to the filespace."""
        self.masks: Masks | Literal["unknown"] | None = "unknown"
        """The masks that are enforced inside it since it started."""
        self.trusting = False
        """Whether it trusts the certificates of the proxy."""
        self.secrets_lock = asyncio.Lock()
        """Held while its secrets are delivered: of two changes the later one must come last."""
        self.delivered_secrets: Mapping[str, bytes] | None = None
        """The secrets that this server delivered last; None if unknown."""
        self.has_secrets = True
        """Whether it may have secrets that have to be removed."""
        self.packages: str | None = None
        """The environment of its template, once it is attached; empty if the template has none."""
        self.refused: tuple[PlatformError, float] | None = None
        """Why that environment could not be attached, and until when it is not tried again."""
        self.attached: Cache[str, str] = Cache(MOST_ATTACHED, ATTACHED_S)
        """The names of environments, by what calls asked for."""
        self.code_contexts: dict[str, str | None] = {}
        """The environment of each code context."""
        self.oom_kills = 0
        self.starved: Cache[str, bool] = Cache(MOST_STARVED)
        """For commands that were killed: whether memory ran out."""
        self.over_quota: str | None = None
        self.on_end: list[Callable[[LiveSandbox], None]] = []
        """Called when it is about to end."""
        self.leased_until = math.inf
        """Until when (monotonic) this server surely has the lease of the session."""

    def touch(self) -> None:
        """Record that the agent used it just now."""
        self.used = self.changed = self.to_push = True
        self.last_activity = time.time()

    def check_lease(self) -> None:
        """Raise when another server may have the session by now."""
        if time.monotonic() > self.leased_until:
            raise DatabaseUnavailable(
                f"the lease on session {self.record.id} could not be renewed in time",
                hint="the database may be out of reach; ask again",
                retry=True,
                retry_after=1,
            )


class Detach(Protocol):
    """Detaches the attachments of a sandbox."""

    def detach(self, box: LiveSandbox) -> None: ...


class LiveSandboxes:
    """Every running sandbox of this server, by its id and by its context."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveSandbox] = {}
        self._by_context: dict[str, str] = {}
        self.on_change: list[Callable[[], None]] = []
        """Called when a sandbox was added or removed."""

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[LiveSandbox]:
        return list(self._by_id.values())

    def get(self, session_id: str) -> LiveSandbox | None:
        return self._by_id.get(session_id)

    def find(self, name: str) -> LiveSandbox | None:
        """Return the sandbox with that id or of that context."""
        return self._by_id.get(name) or self._by_id.get(self._by_context.get(name, ""))

    def sharing(self, record: SessionRecord) -> list[str]:
        """Return the other contexts that work in the folder of a session, in one above it or in one below it."""
        path = record.workspace_path
        if path is None:
            return []
        others = ((box.record.owner, box.record.workspace_path) for box in self._by_id.values())
        return sorted(
            owner
            for owner, other in others
            if other is not None and owner != record.owner and os.path.commonpath((path, other)) in {path, other}
        )

    def add(self, box: LiveSandbox) -> None:
        self._by_id[box.record.id] = box
        if box.record.context_id is not None:
            self._by_context[box.record.context_id] = box.record.id
        self._changed()

    def _changed(self) -> None:
        for notify in self.on_change:
            notify()

    def has(self, box: LiveSandbox) -> bool:
        """Whether this instance is still registered."""
        return self._by_id.get(box.record.id) is box

    async def end(self, box: LiveSandbox, attachments: Detach) -> None:
        box.connection.close()
        attachments.detach(box)
        for notify in box.on_end:
            notify(box)
        await box.provider.remove(box.handle)
        if self.has(box):
            del self._by_id[box.record.id]
            if box.record.context_id is not None:
                self._by_context.pop(box.record.context_id, None)
            self._changed()


def info_of(record: SessionRecord, live: LiveSandboxes, last_activity_at: float | None = None) -> SandboxInfo:
    """Return a session as the API shows it, with a notice if other contexts work in its folder now."""
    info = record.info(last_activity_at)
    if record.state is State.RUNNING and (others := live.sharing(record)):
        shown = ", ".join(f"'{owner}'" for owner in others[:MOST_NAMED])
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        notice = f"other contexts work in this folder now: {shown}{more}"
        info.notice = notice if info.notice is None else f"{info.notice}; {notice}"
    return info


class SessionNotes:
    """Writes fields of session records that describe a session: its newest snapshot, a notice for its owner."""

    def __init__(self, live: LiveSandboxes, store: SessionStore):
        self._live = live
        self._store = store

    async def write(self, record: SessionRecord, **values: str | None) -> None:
        """Change fields in the record of a session, running or not."""
        box = self._live.get(record.id)
        if box is not None:
            box.record = replace(box.record, **values)  # type: ignore[arg-type]
        await self._store.update(record.id, values, fence=box.record.fence if box else None)
