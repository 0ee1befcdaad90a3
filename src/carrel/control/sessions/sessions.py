"""Sessions: get or create, find, end. Binds each context to one sandbox, however many callers ask at once.

Writes records under a lease. `operations` knows what happens inside a sandbox, `workspaces` what happens to its files.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace

from carrel.control.operations.caller import OWN_WORK, Caller, OwnWork
from carrel.control.sessions.attachments import Attachments
from carrel.control.sessions.leases import Leases
from carrel.control.sessions.lifecycle import LIVE, Event, next_state
from carrel.control.sessions.live import LiveSandbox, LiveSandboxes, info_of
from carrel.control.sessions.request_checks import refuse_differences
from carrel.control.sessions.starting import Starting
from carrel.control.workspaces.workspaces import Workspaces
from carrel.errors import AlreadyExists, Conflict, NotFound, NotRunning, RunsElsewhere
from carrel.models import SandboxInfo, SandboxPage, SandboxRequest, State, WorkspaceUsage
from carrel.policy.shell import changes_what_runs
from carrel.primitives.process_locks import LocksOf
from carrel.providers.base import Capability, Provider
from carrel.store import SessionRecord, SessionStore

log = logging.getLogger("carrel.sessions")

LISTED = tuple(state for state in State if state is not State.TERMINATED)
_PARALLEL_ENDS = 32
EXPIRED = (
    "the files were not used for long and are deleted; the next start restores the newest snapshot that was asked for"
)


LIFETIME_OVER = "its lifetime is over"


class Sessions:
    """Every session of this server."""

    def __init__(
        self,
        starting: Starting,
        store: SessionStore,
        workspaces: Workspaces,
        leases: Leases,
        live: LiveSandboxes,
        providers: Mapping[str, Provider],
        attachments: Attachments,
        locks: LocksOf,
    ):
        self._starting = starting
        self._store = store
        self._workspaces = workspaces
        self._leases = leases
        self._providers = dict(providers)
        self._live = live
        self._attachments = attachments
        self._locks = locks

    # finding

    def live(self) -> list[LiveSandbox]:
        return self._live.all()

    def find_live(self, name: str) -> LiveSandbox | None:
        """Return the sandbox with that id or of that context if it runs here."""
        return self._live.find(name)

    async def find(self, name: str) -> LiveSandbox:
        """Return the running sandbox with that id or of that context; `NotFound`, or `NotRunning` if it has ended."""
        box = self._live.find(name)
        if box is not None:
            box.check_lease()
            return box
        record = await self.record(name)
        if record.state in LIVE:  # also while it is being started here
            await self._refuse_elsewhere(record, f"sandbox '{name}'")
        raise _not_running(name, record)

    async def lasting(self, name: str) -> SessionRecord:
        """Return a session that runs or can run again; `NotRunning` if it is terminated."""
        record = await self.record(name)
        if record.state is State.TERMINATED:
            raise _not_running(name, record)
        return record

    async def get(self, name: str) -> SandboxInfo:
        """Return a session by its id or its context."""
        return self._info(await self.record(name))

    async def page(
        self,
        *,
        limit: int = 100,
        cursor: str | None = None,
        states: Iterable[State] | None = None,
        context_id: str | None = None,
    ) -> SandboxPage:
        """Return sessions, newest first; without `states` those that are not terminated."""
        records, following = await self._store.page(
            limit=limit, cursor=cursor, states=LISTED if states is None else states, context_id=context_id
        )
        return SandboxPage(items=[self._info(record) for record in records], next=following)

    async def usage(self, name: str) -> WorkspaceUsage:
        """Return the size of a workspace."""
        record = await self.record(name)
        await self.require_here(record)
        return await self._workspaces.report_usage(record)

    async def require_here(self, record: SessionRecord) -> None:
        """Raise `RunsElsewhere` when another server has the session, `NotRunning` when it no longer answers."""
        await self._refuse_elsewhere(record, f"the workspace of '{record.owner}'")

    async def _refuse_elsewhere(self, record: SessionRecord, what: str) -> None:
        here = record.node in {None, self._leases.server}
        if here and record.state not in LIVE:
            return
        owner = await self._leases.owner(record)
        if owner not in {None, self._leases.node}:
            raise RunsElsewhere(f"{what} is on server '{owner}'", field="id", hint=f"ask server '{owner}'", node=owner)
        if not here:
            raise NotRunning(
                f"{what} was on server '{record.node}', which no longer answers",
                field="id",
                hint="deploy_or_resume starts it on another server, from its newest snapshot",
            )

    async def require_unused(self, context_id: str) -> None:
        """Raise `AlreadyExists` when a context has a session or files, here or elsewhere."""
        previous = await self._store.newest_of_context(context_id)
        ended = previous is None or (previous.state is State.TERMINATED and previous.node == self._leases.server)
        if not ended or await self._workspaces.exists(context_id):
            raise AlreadyExists(
                f"context '{context_id}' has a workspace already", field="context_id", hint="fork to a new context"
            )

    # making

    async def deploy_or_resume(
        self, caller: Caller | OwnWork, request: SandboxRequest, idempotency_key: str | None = None
    ) -> tuple[SandboxInfo, bool]:
        """Return the running sandbox of a context, started if necessary, and whether it was started."""
        if idempotency_key is None:
            return await self._deploy(caller, request, None)
        async with self.lock(f"key {idempotency_key}"):
            made = await self._store.of_key(idempotency_key)
            if made is None:
                return await self._deploy(caller, request, idempotency_key)
            if made.context_id != request.context_id:
                raise Conflict(
                    "this idempotency key was used for another request",
                    field="Idempotency-Key",
                    hint="take a new key for a new request",
                )
            if made.ephemeral or made.state is State.TERMINATED:
                return self._info(made), False
            return await self._deploy(caller, request, None)

    async def new_variables(self, request: SandboxRequest) -> dict[str, str]:
        """Return the requested variables that change which programs run, without those that the session already has."""
        wanted = {name: value for name, value in request.env.items() if changes_what_runs(name)}
        if wanted and request.context_id is not None:
            with suppress(NotFound):
                kept = (await self.record(request.context_id)).env
                wanted = {name: value for name, value in wanted.items() if kept.get(name) != value}
        return wanted

    async def _deploy(
        self, caller: Caller | OwnWork, request: SandboxRequest, key: str | None
    ) -> tuple[SandboxInfo, bool]:
        self._starting.require_open()
        if request.context_id is None:
            return await self._starting.start(caller, request, None, None, key), True
        async with self.lock(f"context {request.context_id}"):
            box = self._live.find(request.context_id)
            if box is not None:
                if await box.provider.alive(box.handle):
                    return await self._reuse(box, request), False
                refuse_differences(box.record, request)
                await self._live.end(box, self._attachments)
            try:
                return await self._start_of_context(caller, request, key), True
            except AlreadyExists:  # another server was quicker: it has the session now
                return await self._start_of_context(caller, request, key), True

    async def _start_of_context(
        self, caller: Caller | OwnWork, request: SandboxRequest, key: str | None
    ) -> SandboxInfo:
        previous = await self._store.newest_of_context(request.context_id or "")
        existing = previous if previous is not None and previous.state is not State.TERMINATED else None
        return await self._starting.start(caller, request, previous, existing, key)

    async def _reuse(self, box: LiveSandbox, request: SandboxRequest) -> SandboxInfo:
        refuse_differences(box.record, request)
        box.last_activity = time.time()
        if request.labels and dict(box.record.labels) != request.labels:
            await self._store.update(box.record.id, fence=box.record.fence, labels=request.labels)
            box.record = replace(box.record, labels=request.labels)
        return self._info(box.record)

    async def start_own(
        self, request: SandboxRequest, acts_for: str, seed: Callable[[SessionRecord], Awaitable[None]] | None = None
    ) -> SandboxInfo:
        """Start an ephemeral sandbox for work of carrel, under the policy of a context; of none when `acts_for` is
        empty. `seed` may fill its workspace before the start.
        """
        self._starting.require_open()
        return await self._starting.start(OWN_WORK, request, None, None, None, acts_for=acts_for, seed=seed)

    async def end_own(self, session_id: str, harvest: Callable[[str], Awaitable[None]] | None = None) -> None:
        """End such a sandbox. `harvest` gets the path of its files when nothing runs in it any more, and must not
        raise.
        """
        record = await self.record(session_id)
        async with self._own_lock(record):
            record = await self.record(record.id)
            if record.state is not State.TERMINATED:
                await self._end(record, Event.TERMINATE, "done", harvest=harvest)

    async def adopt(self, record: SessionRecord) -> bool:
        """Take over a sandbox that the previous process started; False when it does not run any more."""
        provider = self._providers.get(record.provider)
        handle = record.handle
        if provider is None or handle is None or not await provider.alive(handle):
            return False
        if record.state is not State.RUNNING or record.acts_for is not None:
            return False  # it was never ready, or is being stopped, or its user is gone
        began = time.monotonic()
        record = await self._leases.take(record, anew=True, own=True)
        box = LiveSandbox(record, provider, handle, self._workspaces.path(record))
        box.leased_until = self._leases.deadline(began)
        box.used = box.to_push = True
        self._live.add(box)
        return True

    # ending

    async def stop_idle(self, box: LiveSandbox, unused_since: float) -> bool:
        """Stop a sandbox unless it was used meanwhile; return whether it was stopped."""
        record = box.record
        async with self._own_lock(record):
            if not self._live.has(box) or box.in_flight or box.last_activity > unused_since:
                return False
            await self._end(record, Event.TERMINATE if record.ephemeral else Event.STOP, "idle")
            return True

    async def end_of_life(self, box: LiveSandbox) -> bool:
        """End a sandbox whose lifetime is over, whatever runs in it; return whether it still ran."""
        record = box.record
        async with self._own_lock(record):
            if not self._live.has(box):
                return False
            await self._end(record, Event.TERMINATE if record.ephemeral else Event.STOP, LIFETIME_OVER)
            return True

    @asynccontextmanager
    async def stopped(self, record: SessionRecord) -> AsyncIterator[tuple[SessionRecord, bool]]:
        """Keep a session stopped for the block, so that its files can be replaced; also yields whether it was running.

        Afterwards this server owns the session, wherever it was.
        """
        async with self._own_lock(record):
            record = await self.record(record.id)
            ran = record.state in LIVE
            if ran:
                if self._live.get(record.id) is None:
                    record = await self._leases.take(record)
                record = await self._end(record, Event.STOP, "its files are replaced")
            record = await self._leases.take(record)
            try:
                yield record, ran
            except BaseException:
                await self._store.update(record.id, fence=record.fence, release=True)
                raise
            node = self._leases.server
            await self._store.update(record.id, fence=record.fence, release=True, node=node, notice=None)

    async def terminate(
        self,
        caller: Caller | OwnWork,
        name: str,
        reason: str = "",
        *,
        snapshot: bool | None = None,
        delete_workspace: bool = False,
    ) -> SandboxInfo:
        """End a session for good. An ephemeral workspace is deleted, a durable one with `delete_workspace`. May be
        repeated.

        A last snapshot of a durable workspace is taken, unless `snapshot` is False or the workspace is deleted.
        """
        record = await self.record(name)
        async with self._own_lock(record):
            record = await self.record(record.id)
            if record.state is not State.TERMINATED:
                if self._live.get(record.id) is None:
                    record = await self._leases.take(record)
                kept = delete_workspace if snapshot is None else not snapshot
                record = await self._end(record, Event.TERMINATE, reason, kept=kept)
            elif record.context_id and await self._store.of_context(record.context_id):
                return record.info()  # the workspace belongs to a newer session of the same context
            if delete_workspace and record.context_id is not None:
                await self._forget(caller, record.context_id)
        return record.info()

    async def delete(self, caller: Caller, context_id: str, reason: str) -> None:
        """Delete a context: end its session if it has one, then delete everything but its filespace and its policy."""
        async with self.lock(f"context {context_id}"):
            await self._delete(caller, await self._store.of_context(context_id), context_id, reason)

    async def expire(self, record: SessionRecord, unused_since: float) -> bool:
        """Delete the files of a context that was not used since then. Snapshots that a caller took stay, and with them
        the session: the next start restores the newest. Return whether it was done.
        """
        async with self._own_lock(record):
            record = await self.record(record.id)
            context, ended = record.context_id, record.state is State.TERMINATED
            if context is None or record.state in LIVE or record.last_activity_at > unused_since:
                return False
            if ended and await self._store.of_context(context):
                return False  # the workspace belongs to a newer session of the same context
            newest = await self._workspaces.asked_for(context)
            if newest is None:
                await self._delete(OWN_WORK, record, context, "expired")
                return True
            fence = None if ended else (await self._leases.take(record)).fence
            await self._workspaces.expire(context)
            changes = {"snapshot": newest, "notice": EXPIRED, "expires_at": None}
            await self._store.update(record.id, changes, fence=fence, release=not ended)
            return True

    async def _delete(
        self, caller: Caller | OwnWork, record: SessionRecord | None, context_id: str, reason: str
    ) -> None:
        if record is not None and record.state is not State.TERMINATED:
            if self._live.get(record.id) is None:
                record = await self._leases.take(record)
            await self._end(record, Event.TERMINATE, reason, kept=True)
        await self._forget(caller, context_id)

    async def _forget(self, caller: Caller | OwnWork, context_id: str) -> None:
        """Delete everything of an ended context but its filespace and its policy."""
        await self._workspaces.forget(context_id)
        await self._attachments.forget(caller, context_id)

    async def stop(self, name: str, reason: str = "", *, error: str | None = None) -> SandboxInfo:
        """End the sandbox and keep the workspace, in the state stopped or error. An ephemeral session is terminated."""
        record = await self.record(name)
        async with self._own_lock(record):
            record = await self.record(record.id)
            if record.state in LIVE:
                if self._live.get(record.id) is None:
                    record = await self._leases.take(record)
                event = Event.STOP if error is None else Event.FAIL
                record = await self._end(record, Event.TERMINATE if record.ephemeral else event, reason, error)
        return record.info()

    async def _end(
        self,
        record: SessionRecord,
        event: Event,
        reason: str,
        error: str | None = None,
        *,
        kept: bool = False,
        harvest: Callable[[str], Awaitable[None]] | None = None,
    ) -> SessionRecord:
        """End the sandbox, keep its files, then write the record and give the lease back.

        `kept`: there is nothing to keep. A server that is killed in between repeats this when it is back.
        """
        box = self._live.get(record.id)
        here = record.node in {None, self._leases.server}
        started = record.state in {State.RUNNING, State.IDLE_STOPPING}
        if record.state is State.RUNNING and not record.ephemeral:
            record = replace(record, state=next_state(record.state, Event.IDLE))
            await self._store.update(record.id, fence=record.fence, state=record.state)
        if box is not None:
            await self._live.end(box, self._attachments)
            record = replace(record, last_activity_at=max(box.last_activity, record.last_activity_at))
        elif here and record.handle is not None:
            provider = self._providers.get(record.provider)
            if provider is None:
                log.warning(
                    "sandbox %s may still run: its provider '%s' is not on this server any more",
                    record.id,
                    record.provider,
                )
            else:
                await provider.remove(record.handle)
        if record.ephemeral:
            if harvest is not None:
                await harvest(self._workspaces.path(record))
            await self._workspaces.discard(record)
        elif started and here and (not kept or record.workspace_path is not None):
            record, failure = await self._workspaces.keep(record, self._attachments.save)
            if record.workspace_path is not None and (latest := await self._store.get(record.id)) is not None:
                record = replace(record, notice=latest.notice)  # paths that were taken away at the end
            if failure is not None and event is Event.STOP:
                event, error = Event.FAIL, failure
        state = next_state(record.state, event)
        record = replace(record, state=state, handle=None, end_reason=reason or None, error=error)
        await self._store.update(
            record.id,
            fence=record.fence,
            release=True,
            state=state,
            handle=None,
            end_reason=record.end_reason,
            error=error,
            notice=record.notice,
            snapshot=record.snapshot,
            used_bytes=record.used_bytes,
            last_activity_at=record.last_activity_at,
        )
        return record

    async def end_recorded(self, record: SessionRecord, reason: str) -> None:
        """End a session that the previous process left: terminate an ephemeral one, stop a durable one."""
        record = await self._leases.take(record, anew=True, own=True)
        await self._end(record, Event.TERMINATE if record.ephemeral else Event.STOP, reason)

    async def lost(self, box: LiveSandbox) -> None:
        """Check whether a sandbox whose supervisor could not be reached is dead, and record it."""
        if not self._live.has(box) or self._starting.closing:
            return
        if not await box.provider.alive(box.handle):
            await self.stop(box.record.id, "lost", error="the sandbox died")

    async def shutdown(self, leave: Collection[str] = (), *, survive: bool = False) -> None:
        """End every sandbox but those of the sessions to leave, which the next process adopts; with `survive`, of all
        whose provider can. Durable workspaces stay, and the sessions of sandboxes that ended are stopped.
        """
        self._starting.closing = True
        gate = asyncio.Semaphore(_PARALLEL_ENDS)

        async def end(box: LiveSandbox) -> None:
            async with gate:
                try:
                    await self.stop(box.record.id, "shutdown")
                except Exception:
                    log.exception("sandbox %s could not be ended cleanly", box.record.id)

        async with asyncio.TaskGroup() as group:
            for box in self.live():
                if box.record.id in leave or (survive and _survives(box)):
                    box.connection.close()
                else:
                    group.create_task(end(box))

    # inner

    def _info(self, record: SessionRecord) -> SandboxInfo:
        box = self._live.get(record.id)
        return info_of(record, self._live, box.last_activity if box else None)

    async def record(self, name: str) -> SessionRecord:
        """Return the record of a session by its id or its context; `NotFound`."""
        box = self._live.find(name)
        record = box.record if box else None
        if record is None and 0 < len(name) <= 128:
            record = await self._store.get(name) or await self._store.of_context(name)
        if record is None:
            raise NotFound(
                f"there is no sandbox '{name[:128]}'",
                field="id",
                hint="list them with GET /v1/sandboxes or `carrel ps`",
            )
        return record

    def _own_lock(self, record: SessionRecord) -> AbstractAsyncContextManager[object]:
        return self.lock(f"context {record.context_id}" if record.context_id else f"id {record.id}")

    def lock(self, key: str) -> AbstractAsyncContextManager[object]:
        """Return the lock of a key on this server. This class uses the keys `context …`, `id …` and `key …`."""
        return self._locks(key)


def _survives(box: LiveSandbox) -> bool:
    """Whether a sandbox can be left to the next process: one of a durable workspace, whose provider finds it again."""
    return not box.record.ephemeral and Capability.SURVIVES_RESTART in box.provider.capabilities()


def _not_running(name: str, record: SessionRecord) -> NotRunning:
    return NotRunning(
        f"sandbox '{name}' is {record.state}" + (f": {LIFETIME_OVER}" if record.end_reason == LIFETIME_OVER else ""),
        field="id",
        hint="deploy_or_resume starts it again" if record.state is not State.TERMINATED else "make a new one",
    )
