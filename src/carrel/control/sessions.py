"""Sessions: get or create, find, end. Binds contexts to sandboxes, one per context however many ask at once.

Chooses providers and writes records; what happens inside a sandbox is the business of `operations`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from weakref import WeakValueDictionary

from carrel.config import Settings
from carrel.control.connection import SupervisorConnection
from carrel.control.lifecycle import LIVE, Event, next_state
from carrel.control.terms import LIMIT_CAPABILITY, changes, launch, refuse_differences
from carrel.errors import (
    CarrelError,
    Conflict,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    NotRunning,
    PlatformError,
)
from carrel.models import Limits, Network, SandboxInfo, SandboxPage, SandboxRequest, State
from carrel.providers import choose
from carrel.providers.base import NETWORK_CAPABILITY, Handle, Provider
from carrel.store import SessionRecord, SessionStore
from carrel.workspaces.layout import Layout

log = logging.getLogger("carrel.sessions")

LISTED = tuple(state for state in State if state is not State.TERMINATED)
_PARALLEL_ENDS = 32


class LiveSandbox:
    """A running sandbox as this process holds it: the way to it, and what must be quick to look up."""

    __slots__ = (
        "connection",
        "handle",
        "in_flight",
        "last_activity",
        "oom_kills",
        "over_quota",
        "provider",
        "record",
        "used",
        "workspace",
    )

    def __init__(self, record: SessionRecord, provider: Provider, handle: Handle, workspace: str):
        self.record = record
        self.provider = provider
        self.handle = handle
        self.workspace = workspace
        self.connection = SupervisorConnection(str(handle["socket"]))
        self.last_activity = record.last_activity_at
        self.in_flight = 0
        self.used = False
        self.oom_kills = 0
        self.over_quota: str | None = None


class Sessions:
    """Every session of this server."""

    def __init__(self, settings: Settings, store: SessionStore, layout: Layout, providers: Mapping[str, Provider]):
        self._settings = settings
        self._store = store
        self._layout = layout
        self._providers = dict(providers)
        self._live: dict[str, LiveSandbox] = {}
        self._by_context: dict[str, str] = {}
        self._starting = 0
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._closing = False
        self.on_deleted: Callable[[str], Awaitable[None]] = _nothing
        """Called with the context whose workspace was deleted."""

    # finding

    def live(self) -> list[LiveSandbox]:
        """The sandboxes that run now."""
        return list(self._live.values())

    async def find(self, name: str) -> LiveSandbox:
        """The running sandbox with that id or of that context; `NotFound`, or `NotRunning` if it ended."""
        box = self._running(name)
        if box is not None:
            return box
        record = await self._record(name)
        raise NotRunning(
            f"sandbox '{name}' is {record.state}",
            field="id",
            hint="deploy_or_resume starts it again" if record.state is not State.TERMINATED else "make a new one",
        )

    async def get(self, name: str) -> SandboxInfo:
        """A session by its id or its context."""
        return self._info(await self._record(name))

    async def page(
        self,
        *,
        limit: int = 100,
        cursor: str | None = None,
        states: Iterable[State] | None = None,
        context_id: str | None = None,
    ) -> SandboxPage:
        """Sessions, newest first; without `states` those that are not terminated."""
        records, following = await self._store.page(
            limit=limit, cursor=cursor, states=LISTED if states is None else states, context_id=context_id
        )
        return SandboxPage(items=[self._info(record) for record in records], next=following)

    # making

    async def deploy_or_resume(
        self, request: SandboxRequest, idempotency_key: str | None = None
    ) -> tuple[SandboxInfo, bool]:
        """The running sandbox of a context, started if need be. Says also whether a sandbox was started."""
        if idempotency_key is None:
            return await self._deploy(request, None)
        async with self._lock(f"key {idempotency_key}"):
            made = await self._store.of_key(idempotency_key)
            if made is None:
                return await self._deploy(request, idempotency_key)
            if made.context_id != request.context_id:
                raise Conflict(
                    "this idempotency key was used for another request",
                    field="Idempotency-Key",
                    hint="take a new key for a new request",
                )
            if made.ephemeral or made.state is State.TERMINATED:
                return self._info(made), False
            return await self._deploy(request, None)

    async def _deploy(self, request: SandboxRequest, key: str | None) -> tuple[SandboxInfo, bool]:
        if self._closing:
            raise PlatformError("the server is shutting down", hint="ask again when it is back")
        if request.context_id is None:
            record, provider = self._plan(request, None, key)
            return await self._start(record, provider, fresh=True), True
        async with self._lock(f"context {request.context_id}"):
            box = self._running(request.context_id)
            existing = box.record if box else await self._store.of_context(request.context_id)
            if existing is not None and existing.state is State.RUNNING:
                if box is not None and await box.provider.alive(box.handle):
                    return await self._reuse(box, request), False
                refuse_differences(existing, request)
                if box is not None:
                    await self._drop(box)
            record, provider = self._plan(request, existing, key)
            return await self._start(record, provider, fresh=existing is None), True

    async def _reuse(self, box: LiveSandbox, request: SandboxRequest) -> SandboxInfo:
        refuse_differences(box.record, request)
        box.last_activity = time.time()
        if request.labels and dict(box.record.labels) != request.labels:
            await self._store.update(box.record.id, labels=request.labels)
            box.record = replace(box.record, labels=request.labels)
        return self._info(box.record)

    def _plan(
        self, request: SandboxRequest, existing: SessionRecord | None, key: str | None
    ) -> tuple[SessionRecord, Provider]:
        """Everything that can be refused is refused here, before anything is made."""
        given = request.model_fields_set
        trust = request.trust if existing is None or "trust" in given else existing.trust
        wanted = request.provider if request.provider != "auto" else self._settings.sandbox.provider
        provider = choose(self._providers, wanted, trust)
        if provider.unsafe and not self._settings.sandbox.allow_process:
            raise InvalidRequest(
                f"provider '{provider.name}' does not isolate and is switched off on this server",
                field="provider",
                hint="choose another provider, or let the operator set CARREL_SANDBOX_ALLOW_PROCESS=true",
            )
        explicit = {} if existing is None else existing.limits.model_dump(exclude_none=True)
        explicit |= request.limits.model_dump(exclude_none=True)
        provider.require(*(LIMIT_CAPABILITY[name] for name in explicit if name in LIMIT_CAPABILITY))
        limits = self._defaults(provider) | explicit
        network = request.network or (None if existing is None else existing.network)
        if network is None:
            network = Network.HOST if provider.unsafe else self._settings.sandbox.network
        provider.require(NETWORK_CAPABILITY[network])
        now = time.time()
        ephemeral = request.context_id is None
        state = State.CREATING if existing is None else next_state(existing.state, Event.START)
        record = SessionRecord(
            id=existing.id if existing else f"{'eph' if ephemeral else 'sbx'}-{secrets.token_hex(8)}",
            context_id=request.context_id,
            ephemeral=ephemeral,
            state=state,
            provider=provider.name,
            isolation_level=provider.isolation_level,
            unsafe=provider.unsafe,
            trust=trust,
            network=network,
            limits=Limits.model_validate(limits),
            env=request.env if existing is None or "env" in given else existing.env,
            labels=request.labels if existing is None or request.labels else existing.labels,
            idempotency_key=key or (existing.idempotency_key if existing else None),
            created_at=existing.created_at if existing else now,
            last_activity_at=now,
        )
        return record, provider

    def _defaults(self, provider: Provider) -> dict[str, float]:
        defaults = self._settings.sandbox
        has = provider.capabilities()
        wanted = {
            "cpus": defaults.cpu_limit,
            "memory_mb": defaults.memory_mb,
            "processes": defaults.processes,
        }
        enforced = {name: value for name, value in wanted.items() if LIMIT_CAPABILITY[name] in has}
        return {"timeout_s": defaults.timeout, "disk_mb": defaults.disk_mb, **enforced}

    async def _start(self, record: SessionRecord, provider: Provider, *, fresh: bool) -> SandboxInfo:
        if len(self._live) + self._starting >= self._settings.max_sandboxes:
            raise LimitExceeded(
                f"{self._settings.max_sandboxes} sandboxes run already",
                hint="terminate some, or raise CARREL_MAX_SANDBOXES",
            )
        self._starting += 1
        name = record.context_id or record.id
        new = False
        handle: Handle | None = None
        # The record is written while the sandbox starts: both take milliseconds, and both are waited for.
        writing = asyncio.ensure_future(self._write_start(record, fresh))
        try:
            workspace, new = await asyncio.to_thread(self._layout.make, name, ephemeral=record.ephemeral)
            handle = await provider.start(launch(record, provider, workspace))
            await writing
            if self._closing:
                raise PlatformError("the server is shutting down", hint="ask again when it is back")
            record = replace(record, state=next_state(record.state, Event.STARTED), handle=handle)
            await self._store.update(record.id, state=record.state, handle=handle)
            self._adopt(LiveSandbox(record, provider, handle, workspace))
            return self._info(record)
        except BaseException as error:
            await asyncio.gather(writing, return_exceptions=True)
            await self._undo(record, provider, handle, new=new, error=error)
            if isinstance(error, CarrelError) or not isinstance(error, Exception):
                raise
            log.exception("a sandbox could not be started")
            raise PlatformError(f"the sandbox could not be started: {type(error).__name__}") from None
        finally:
            self._starting -= 1

    async def _write_start(self, record: SessionRecord, fresh: bool) -> None:
        if fresh:
            await self._store.insert(record)
        else:
            await self._store.update(record.id, **changes(record), handle=None, error=None)

    async def _undo(
        self,
        record: SessionRecord,
        provider: Provider,
        handle: Handle | None,
        *,
        new: bool,
        error: BaseException,
    ) -> None:
        """Leave nothing of a start that failed. Each step is tried whatever becomes of the one before."""
        try:
            if handle is not None:
                await provider.remove(handle)
        except Exception:
            log.exception("sandbox %s could not be removed after a failed start", record.id)
        try:
            if new or record.ephemeral:
                name = record.context_id or record.id
                await asyncio.to_thread(self._layout.remove, name, ephemeral=record.ephemeral)
        except (CarrelError, OSError):
            log.exception("the workspace of %s could not be removed after a failed start", record.id)
        event = Event.TERMINATE if record.ephemeral else Event.FAIL
        text = error.detail if isinstance(error, CarrelError) else "the start was broken off"
        await self._store.update(
            record.id,
            state=next_state(record.state, event),
            handle=None,
            error=text[:2000],
            idempotency_key=None,
        )

    def _adopt(self, box: LiveSandbox) -> None:
        self._live[box.record.id] = box
        if box.record.context_id is not None:
            self._by_context[box.record.context_id] = box.record.id

    async def adopt(self, record: SessionRecord) -> bool:
        """Take over a sandbox that a server before this one started; False when it does not run any more."""
        provider = self._providers.get(record.provider)
        if provider is None or record.handle is None or not await provider.alive(record.handle):
            return False
        if record.state is State.CREATING:
            return False  # its supervisor was never seen ready
        path = self._layout.path(record.context_id or record.id, ephemeral=record.ephemeral)
        box = LiveSandbox(replace(record, state=State.RUNNING), provider, record.handle, path)
        box.used = True
        self._adopt(box)
        return True

    # ending

    async def stop_idle(self, box: LiveSandbox, unused_since: float) -> bool:
        """Stop a sandbox unless it was used meanwhile; says whether it was stopped."""
        record = box.record
        async with self._lock(f"context {record.context_id}" if record.context_id else f"id {record.id}"):
            if self._live.get(record.id) is not box or box.in_flight or box.last_activity > unused_since:
                return False
            if not record.ephemeral:
                box.record = record = replace(record, state=next_state(record.state, Event.IDLE))
                await self._store.update(record.id, state=record.state)
            await self._end(record, Event.TERMINATE if record.ephemeral else Event.STOP, "idle")
            return True

    async def record(self, name: str) -> SessionRecord:
        """What is recorded of a session, by its id or its context; `NotFound`."""
        return await self._record(name)

    @asynccontextmanager
    async def stopped(self, record: SessionRecord) -> AsyncIterator[bool]:
        """Hold a session stopped, so that its workspace can be replaced; says whether it was running."""
        async with self._lock(f"context {record.context_id}" if record.context_id else f"id {record.id}"):
            record = await self._record(record.id)
            ran = record.state in LIVE
            if ran:
                await self._end(record, Event.STOP, "its files are replaced")
            yield ran

    async def terminate(
        self, name: str, reason: str = "", *, delete_workspace: bool = False, unused_since: float | None = None
    ) -> SandboxInfo:
        """End a session for good. An ephemeral workspace goes with it, a durable one when asked to. May be
        repeated.
        """
        record = await self._record(name)
        key = f"context {record.context_id}" if record.context_id else f"id {record.id}"
        async with self._lock(key):
            record = await self._record(record.id)
            if unused_since is not None and (record.state in LIVE or record.last_activity_at > unused_since):
                return record.info()
            if record.state is not State.TERMINATED:
                record = await self._end(record, Event.TERMINATE, reason)
            elif record.context_id and await self._store.of_context(record.context_id):
                return record.info()  # the workspace belongs to a newer session of the same context
            if delete_workspace and record.context_id is not None:
                await asyncio.to_thread(self._layout.remove, record.context_id, ephemeral=False)
                await self.on_deleted(record.context_id)
        return record.info()

    async def stop(self, name: str, reason: str = "", *, error: str | None = None) -> SandboxInfo:
        """End the sandbox and keep the workspace, as stopped or with an error. An ephemeral one is
        terminated.
        """
        record = await self._record(name)
        key = f"context {record.context_id}" if record.context_id else f"id {record.id}"
        async with self._lock(key):
            record = await self._record(record.id)
            if record.state in LIVE:
                event = Event.STOP if error is None else Event.FAIL
                record = await self._end(record, Event.TERMINATE if record.ephemeral else event, reason, error)
        return record.info()

    async def _end(self, record: SessionRecord, event: Event, reason: str, error: str | None = None) -> SessionRecord:
        state = next_state(record.state, event)
        box = self._live.get(record.id)
        if box is not None:
            await self._drop(box)
            record = replace(record, last_activity_at=max(box.last_activity, record.last_activity_at))
        elif record.handle is not None and (provider := self._providers.get(record.provider)) is not None:
            await provider.remove(record.handle)
        if record.ephemeral:
            await asyncio.to_thread(self._layout.remove, record.id, ephemeral=True)
        record = replace(record, state=state, handle=None, end_reason=reason or None, error=error)
        await self._store.update(
            record.id,
            state=state,
            handle=None,
            end_reason=record.end_reason,
            error=error,
            last_activity_at=record.last_activity_at,
        )
        return record

    async def end_recorded(self, record: SessionRecord, reason: str) -> None:
        """End what a server before this one left: ephemeral sessions are terminated, durable ones stopped."""
        await self._end(record, Event.TERMINATE if record.ephemeral else Event.STOP, reason)

    async def _drop(self, box: LiveSandbox) -> None:
        box.connection.close()
        await box.provider.remove(box.handle)
        if self._live.get(box.record.id) is box:
            del self._live[box.record.id]
            if box.record.context_id is not None:
                self._by_context.pop(box.record.context_id, None)

    async def lost(self, box: LiveSandbox) -> None:
        """Somebody could not reach the supervisor: find out whether the sandbox is dead, and record that."""
        if self._live.get(box.record.id) is not box or self._closing:
            return
        if not await box.provider.alive(box.handle):
            await self.stop(box.record.id, "lost", error="the sandbox died")

    async def shutdown(self) -> None:
        """End every sandbox; durable workspaces stay and their sessions become stopped."""
        self._closing = True
        gate = asyncio.Semaphore(_PARALLEL_ENDS)

        async def end(box: LiveSandbox) -> None:
            async with gate:
                try:
                    await self.stop(box.record.id, "shutdown")
                except Exception:
                    log.exception("sandbox %s could not be ended cleanly", box.record.id)

        async with asyncio.TaskGroup() as group:
            for box in self.live():
                group.create_task(end(box))

    # inner

    def _info(self, record: SessionRecord) -> SandboxInfo:
        box = self._live.get(record.id)
        return record.info(box.last_activity if box else None)

    def _running(self, name: str) -> LiveSandbox | None:
        return self._live.get(name) or self._live.get(self._by_context.get(name, ""))

    async def _record(self, name: str) -> SessionRecord:
        box = self._running(name)
        record = box.record if box else None
        if record is None and 0 < len(name) <= 128:
            record = await self._store.get(name) or await self._store.of_context(name)
        if record is None:
            raise NotFound(
                f"there is no sandbox '{name[:128]}'",
                field="id",
                hint="list them with GET /v1/sandboxes or `carrel ls`",
            )
        return record

    @asynccontextmanager
    async def _lock(self, key: str) -> AsyncIterator[None]:
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        async with lock:
            yield


async def _nothing(_context: str) -> None:
    return
