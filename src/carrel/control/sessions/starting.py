"""Starting a sandbox: workspace, process and record are made together, or none of them.

Everything that can be refused is refused before anything is made. The caller makes sure that only one start of a
context is under way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from carrel.audit import AuditLog, chain_of
from carrel.config import Settings
from carrel.control.operations.caller import Caller, OwnWork
from carrel.control.sessions.attachments import Attachments, LaunchPlan
from carrel.control.sessions.capacity import Capacity
from carrel.control.sessions.leases import Leases
from carrel.control.sessions.lifecycle import Event, next_state
from carrel.control.sessions.live import LiveSandbox, LiveSandboxes, info_of
from carrel.control.sessions.owners import is_agent
from carrel.control.sessions.request_checks import changes, launch, new_record
from carrel.control.sessions.slots import Slots
from carrel.control.sessions.templates import Templates
from carrel.control.workspaces.workspaces import Provided, Workspaces
from carrel.errors import CarrelError, Conflict, LimitExceeded, NodeUnreachable, PlatformError
from carrel.isolation.cgroups import host_memory_mb
from carrel.models import SandboxInfo, SandboxRequest, State
from carrel.providers.base import Handle, Provider
from carrel.store import SessionRecord, SessionStore
from carrel.tracing import span

log = logging.getLogger("carrel.starting")


def _end_of_life(record: SessionRecord) -> float | None:
    """Return when a sandbox that starts now ends; None for never. A build of carrel has a time limit of its own."""
    lifetime = record.limits.lifetime_s
    return None if lifetime is None or not is_agent(record) else time.time() + lifetime


class Starting:
    """Starts the sandboxes of one server."""

    def __init__(
        self,
        settings: Settings,
        store: SessionStore,
        workspaces: Workspaces,
        leases: Leases,
        live: LiveSandboxes,
        providers: Mapping[str, Provider],
        templates: Templates,
        attachments: Attachments,
        audit: AuditLog,
        capacity: Capacity,
        slots: Slots,
    ):
        self._settings = settings
        self._store = store
        self._workspaces = workspaces
        self._leases = leases
        self._providers = dict(providers)
        self._live = live
        self._templates = templates
        self._attachments = attachments
        self._audit = audit
        self._capacity = capacity
        self._slots = slots
        self._host_memory_mb = host_memory_mb()
        self.closing = False
        """Set when the server ends: a start that is under way is then undone."""

    def require_open(self) -> None:
        """Raise `NodeUnreachable` when the server ends."""
        if self.closing:
            raise NodeUnreachable(
                f"server '{self._leases.node}' is shutting down",
                hint="ask again when it is back, or another server",
                node=self._leases.node,
                retry=True,
                retry_after=1,
            )

    async def start(
        self,
        caller: Caller | OwnWork,
        request: SandboxRequest,
        previous: SessionRecord | None,
        existing: SessionRecord | None,
        key: str | None,
        *,
        acts_for: str | None = None,
        seed: Callable[[SessionRecord], Awaitable[None]] | None = None,
    ) -> SandboxInfo:
        """Start the sandbox of a new or existing session; leave nothing behind on failure. `seed` may fill the
        workspace before.
        """
        began = time.monotonic()
        node = self._leases.server
        request = await self._templates.fill(caller, request, previous)
        record, provider = new_record(
            request,
            existing,
            key,
            self._settings,
            self._providers,
            node,
            host_memory_mb=self._host_memory_mb,
            previous=previous,
        )
        record = replace(record, acts_for=acts_for)
        plan = await self._attachments.plan(LaunchPlan(caller, request, record, previous, provider))
        record = replace(plan.record, ends_at=_end_of_life(plan.record))
        if record.workspace_path is not None:
            await self._refuse_other_files(record, previous)
        self._capacity.check()
        if existing is not None:
            record = replace(record, fence=(await self._leases.take(existing)).fence)
        moved = None
        if previous is not None and previous.node not in {None, node} and record.workspace_path is None:
            moved = await self._move(record, previous, existing)
        try:
            self._capacity.begin()
        except LimitExceeded:
            if existing is not None:
                await self._store.update(record.id, fence=record.fence, release=True)
            raise
        new = moved is not None and moved.new
        handle: Handle | None = None
        box: LiveSandbox | None = None
        # The record is written while the sandbox starts, to save a few milliseconds.
        writing = asyncio.ensure_future(self._write_start(record, fresh=existing is None))
        try:
            if seed is not None:
                await seed(record)
            provided = moved or await self._workspaces.provide(record, previous)
            new = provided.new
            with span("prepare"):
                plan = await self._attachments.prepare(replace(plan, record=record), provided.path)
            handle = await self._slots.start(
                provider,
                launch(
                    record,
                    provider,
                    provided.path,
                    plan.masks,
                    trust=plan.trusts_proxy,
                    folder=plan.folder,
                    image=plan.image,
                ),
                template=record.template,
                image=record.image,
                digest=record.image_digest,
                lasting=is_agent(record),
            )
            await writing
            await self._workspaces.recorded(record)
            box = LiveSandbox(record, provider, handle, provided.path)
            box.leased_until = self._leases.deadline(began)
            box.masks, box.has_secrets, box.trusting = plan.masks, False, plan.trusts_proxy
            with span("attach"):
                await self._attachments.attach(box)
            self.require_open()
            notice = provided.notice or plan.notice or record.notice
            state = next_state(record.state, Event.STARTED)
            record = replace(record, state=state, handle=handle, notice=notice)
            await self._store.update(record.id, fence=record.fence, state=state, handle=handle, notice=notice)
            box.record = record
            self._live.add(box)
        except BaseException as error:
            await asyncio.gather(writing, return_exceptions=True)
            if box is not None:
                box.connection.close()
                self._attachments.detach(box)
            plan.undo.close()
            written = not writing.cancelled() and writing.exception() is None
            await self._undo(record, provider, handle, new=new, written=written, error=error)
            if isinstance(error, CarrelError) or not isinstance(error, Exception):
                raise
            log.exception("a sandbox could not be started")
            raise PlatformError(f"the sandbox could not be started: {type(error).__name__}") from None
        finally:
            self._capacity.end()
        seconds = time.monotonic() - began
        self._workspaces.metrics.started(
            provider.name,
            "fresh" if previous is None or previous.forgotten else "resume",
            seconds,
            template=record.template,
        )
        return info_of(record, self._live)

    async def _refuse_other_files(self, record: SessionRecord, previous: SessionRecord | None) -> None:
        """Refuse a folder for a context that has files which carrel stores, or whose folder is on another server."""
        if await self._workspaces.exists(record.context_id or ""):
            raise Conflict(
                "this context has files that carrel stores",
                field="workspace_path",
                hint="use another context for the folder, or delete the files of this one",
            )
        if previous is not None and previous.state is not State.TERMINATED and previous.node != self._leases.server:
            raise Conflict(
                f"the folder of this context is on server '{previous.node}'", field="context_id", node=previous.node
            )

    async def _move(self, record: SessionRecord, previous: SessionRecord, existing: SessionRecord | None) -> Provided:
        """Bring the workspace from another server before anything is written: until then that server owns it."""
        owner = existing.lease_owner if existing else None
        silent = owner not in {None, self._leases.node}  # the lease was taken from a server that did not renew it
        try:
            moved = await self._workspaces.move(record, previous, silent=silent)
            for left in await self._audit.adopt(chain_of(record.context_id, record.id)):
                log.warning("another server ended before this did: %s", left)
            return moved
        except BaseException:
            if silent and owner is not None:
                await self._leases.hand_back(record, owner)
            elif existing is not None:
                await self._store.update(record.id, fence=record.fence, release=True)
            raise

    async def _write_start(self, record: SessionRecord, *, fresh: bool) -> None:
        if fresh:
            await self._store.insert(record, self._leases.lease)
        else:
            await self._store.update(
                record.id, changes(record), fence=record.fence, handle=None, error=None, expires_at=None
            )

    async def _undo(
        self,
        record: SessionRecord,
        provider: Provider,
        handle: Handle | None,
        *,
        new: bool,
        written: bool,
        error: BaseException,
    ) -> None:
        """Remove everything of a failed start. Each step is tried even if the one before failed."""
        try:
            if handle is not None:
                await provider.remove(handle)
        except Exception:
            log.exception("sandbox %s could not be removed after a failed start", record.id)
        try:
            if new or record.ephemeral:
                await self._workspaces.discard(record)
        except (CarrelError, OSError):
            log.exception("the workspace of %s could not be removed after a failed start", record.id)
        if not written:
            return  # there is no record, or another server owns it by now
        event = Event.TERMINATE if record.ephemeral else Event.FAIL
        text = error.detail if isinstance(error, CarrelError) else "the start was cancelled"
        try:
            await self._store.update(
                record.id,
                fence=record.fence,
                release=True,
                state=next_state(record.state, event),
                handle=None,
                error=text[:2000],
                idempotency_key=None,
            )
        except CarrelError as failure:
            log.warning("the failed start of %s could not be written down: %s", record.id, failure)
