"""Jobs as callers see them: submit, show, wait, cancel, retry, read the output. One class; `JobRunner` runs them.

A job is a record in the database, so any server of several answers about any job.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from carrel.config import JobSettings
from carrel.control.governance.open_requests import OpenRequests
from carrel.control.jobs import lifecycle
from carrel.control.jobs.executor import JobExecutor, checked_files
from carrel.control.jobs.runner import JobRunner
from carrel.control.jobs.watch import JobWatch
from carrel.control.jobs.webhooks import JobWebhooks
from carrel.control.nodes.workers import Worker
from carrel.control.operations.caller import Caller
from carrel.control.operations.operations import Operations
from carrel.control.secrets.values import SecretValues
from carrel.control.supervisor.frames import StreamChunk
from carrel.errors import CarrelError, Conflict, InvalidRequest, LimitExceeded, NotFound
from carrel.identity import Identity, Tokens
from carrel.metrics import Metrics
from carrel.models import CommandInfo, FileInfo, JobArtifacts, JobInfo, JobPage, JobRequest, JobState
from carrel.models import operations as op
from carrel.models.base import DEFAULT_NAMESPACE, namespace_of
from carrel.models.operations import Operation
from carrel.store.jobs import JobRecord, JobStore

SHARED_WAIT_S = 0.3
"""How often a caller that waits looks for a job that may run on another server."""
ALONE_WAIT_S = 5.0
_COUNTED_S = 1.0
_ENDING_S = 15.0
_ID = re.compile(r"job-[0-9a-f]{20}")


class Jobs:
    """The jobs of a server, or of all servers on its database."""

    def __init__(
        self,
        settings: JobSettings,
        store: JobStore,
        executor: JobExecutor,
        operations: Operations,
        secret_values: SecretValues,
        tokens: Tokens,
        requests: OpenRequests,
        metrics: Metrics,
        worker: Worker,
        lease_s: float,
    ):
        self._settings = settings
        self._store = store
        self._executor = executor
        self._operations = operations
        self._secrets = secret_values
        self._metrics = metrics
        self._watch = JobWatch()
        self._runner = JobRunner(settings, store, executor, tokens, requests, metrics, self._watch, worker, lease_s)
        secret = settings.webhook_secret
        self._webhooks = JobWebhooks(store, b"" if secret is None else secret.get_secret_value().encode())
        self._queued: dict[str, tuple[int, float]] = {}
        self._closing = asyncio.Event()

    async def open(self) -> None:
        """Go on with the jobs of the process before, and run others."""
        await self._runner.open()
        self._webhooks.start()

    async def close(self) -> list[str]:
        """Stop to run jobs. Returns the sessions in whose sandboxes jobs go on: they must not end."""
        self._closing.set()
        await self._webhooks.close()
        return await self._runner.close()

    async def submit(self, caller: Caller, request: JobRequest, key: str | None = None) -> JobInfo:
        """Accept a job: when this returns, it is stored, and will reach an end that can be seen."""
        job_id = f"job-{secrets.token_hex(10)}"
        return await self._submit(caller, job_id, request, self._context(caller, request, job_id), key)

    async def retry(self, caller: Caller, job_id: str) -> JobInfo:
        """Submit a job again that has ended, as a new one: the old one stays as it ended."""
        old = await self._reachable(caller, op.RETRY_JOB, job_id)
        if not old.state.terminal:
            raise Conflict(f"job '{job_id}' is {old.state}", field="id", hint="cancel it first, or wait for its end")
        request = JobRequest.model_validate(dict(old.request))
        new_id = f"job-{secrets.token_hex(10)}"
        context = self._context(caller, request, new_id)
        return await self._submit(caller, new_id, request, context, None, retry_of=old.id)

    async def _submit(
        self,
        caller: Caller,
        job_id: str,
        request: JobRequest,
        context: str,
        key: str | None,
        retry_of: str | None = None,
    ) -> JobInfo:
        checked_files(request)
        self._check_webhook(request)
        namespace = namespace_of(context)
        await self._check_room(namespace)
        document = request.model_dump(mode="json", exclude_unset=True)
        record = JobRecord(
            id=job_id,
            namespace=namespace,
            context_id=context,
            own_workspace=request.context_id is None,
            state=JobState.QUEUED,
            priority=request.priority,
            attempt=0,
            fence=0,
            created_at=0.0,
            queued_at=0.0,
            not_before=0.0,
            request=document,
            subject=caller.identity.subject,
            token_id=caller.identity.token_id,
            idempotency_key=caller.own(key),
        )
        record = replace(record, facts=replace(record.facts, retry_of=retry_of))
        summary = lifecycle.summary_of(document)
        shown = await self._secrets.clean(context, {"summary": summary, "by": record.subject, "retry_of": retry_of})
        with self._runner.starting(record, request) as start:
            stored, new = await self._store.insert(partial(lifecycle.submitted, shown=shown), record, start)
            if started := new and stored.state is JobState.RUNNING:
                self._runner.started(stored, request)
        if not new and (stored.request != document or stored.own_workspace != record.own_workspace):
            raise Conflict(
                "this idempotency key was used for another job",
                field="Idempotency-Key",
                hint="take a new key for a new job",
            )
        if not new:
            return await self._info(stored)
        if not started:
            self._runner.wake()
        return lifecycle.info_of(stored).model_copy(update={"summary": shown["summary"]})

    @staticmethod
    def _context(caller: Caller, request: JobRequest, job_id: str) -> str:
        """Return the context of a job: the one that it names, or a new one in the namespace of the caller."""
        if request.context_id is not None:
            return request.context_id
        identity = caller.identity
        if identity.contexts is not None:
            raise InvalidRequest(
                "your token is for some contexts only, so a job needs one of them",
                field="context_id",
                hint="name the context in which it runs",
            )
        return job_id if identity.namespace in {None, DEFAULT_NAMESPACE} else f"{identity.namespace}:{job_id}"

    def _check_webhook(self, request: JobRequest) -> None:
        if request.webhook is None:
            return
        try:
            parts = urlsplit(request.webhook)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port, parts = None, None, urlsplit("")
        if parts.scheme not in {"http", "https"} or not host or parts.username is not None:
            raise InvalidRequest("the webhook is not an http or https URL", field="webhook")
        allowed = self._settings.webhook_host_names
        if host not in allowed and f"{host}:{port}" not in allowed:
            raise InvalidRequest(
                f"the operator does not allow webhooks to '{host[:253]}'",
                field="webhook",
                hint="ask the operator to add the host to CARREL_JOBS_WEBHOOK_HOSTS",
            )
        if not self._webhooks.signs:
            raise InvalidRequest(
                "this server has no key to sign webhooks with",
                field="webhook",
                hint="ask the operator to set CARREL_JOBS_WEBHOOK_SECRET",
            )

    async def _check_room(self, namespace: str) -> None:
        """Refuse a job if very many of its namespace wait already. The number may be a second old."""
        count, at = self._queued.get(namespace, (0, -_COUNTED_S))
        if (now := time.monotonic()) - at >= _COUNTED_S:
            self._queued[namespace] = (count, now)  # those that come meanwhile need not count too
            count, at = await self._store.queued(namespace), now
        if count >= self._settings.most_queued:
            raise LimitExceeded(
                f"{count} jobs of the namespace '{namespace}' wait already", hint="submit again when some have started"
            )
        if len(self._queued) > 1000:
            self._queued.clear()
        self._queued[namespace] = (count + 1, at)

    # showing

    async def get(self, caller: Caller, job_id: str, row: Operation = op.GET_JOB) -> JobInfo:
        """Return a job."""
        return await self._info(await self._reachable(caller, row, job_id))

    async def context_of(self, name: str) -> str | None:
        """Return the context of the job with this id; None if there is none."""
        if not _ID.fullmatch(name):
            return None
        record = await self._store.get(name)
        return None if record is None else record.context_id

    async def page(
        self,
        caller: Caller,
        *,
        limit: int,
        cursor: str | None = None,
        states: Iterable[JobState] | None = None,
        context_id: str | None = None,
    ) -> JobPage:
        """Return the jobs within the reach of the caller, newest first."""
        identity = caller.identity
        records, following = await self._store.page(
            limit=limit,
            cursor=cursor,
            states=states,
            context_id=context_id,
            namespace=identity.namespace,
            contexts=identity.contexts,
        )
        return JobPage(items=[await self._info(record) for record in records], next=following)

    async def wait(self, caller: Caller, job_id: str, seconds: float) -> JobInfo:
        """Return a job when it has ended; as it is when the time is over."""
        record = await self._reachable(caller, op.WAIT_JOB, job_id)
        until = time.monotonic() + seconds
        with self._watch.watching(job_id) as changed:
            record = await self._known(job_id)
            while not record.state.terminal and (left := until - time.monotonic()) > 0 and not caller.gone():
                await self._changed(changed, min(left, 1.0))
                if self._closing.is_set():
                    break
                record = await self._known(job_id)
        return await self._info(record)

    async def artifacts(self, caller: Caller, job_id: str) -> JobArtifacts:
        """Return the files that a job produced."""
        record = await self._reachable(caller, op.LIST_JOB_ARTIFACTS, job_id)
        files, more = await self._store.artifacts(job_id)
        items = [FileInfo.model_validate(file) for file in files]
        return JobArtifacts(context_id=record.context_id, items=items, truncated=more)

    async def logs(
        self, caller: Caller, job_id: str, *, offset: int = 0, attempt: int | None = None, follow: bool = False
    ) -> AsyncGenerator[StreamChunk, None]:
        """Yield an empty `open`, the output of an attempt (the newest by default) from an offset on, and an `end`."""
        record = await self._reachable(caller, op.GET_JOB_LOGS, job_id)
        number = attempt or max(1, record.attempt)
        yield StreamChunk("open", b"")
        with self._watch.watching(job_id) as changed:
            while True:
                record = await self._known(job_id)  # before its output: what has ended gets no more
                while pieces := await self._store.output(job_id, number, offset):
                    for piece in pieces:
                        data = piece.data[max(0, offset - piece.start) :]
                        offset = piece.start + len(piece.data)
                        yield StreamChunk(piece.stream, data)
                over = record.state.terminal or record.attempt > number
                if over or not follow or self._closing.is_set():
                    break
                await self._changed(changed, SHARED_WAIT_S if self._store.shared else ALONE_WAIT_S)
        yield StreamChunk("end", _last(await self._info(record)).model_dump_json().encode())

    async def _changed(self, changed: asyncio.Event, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, SHARED_WAIT_S) if self._store.shared else seconds):
                await changed.wait()
        changed.clear()

    async def _info(self, record: JobRecord) -> JobInfo:
        """Return a job as it is shown: without the secrets of its context."""
        info = lifecycle.info_of(record)
        texts = {name: value for name in ("summary", "reason", "progress") if (value := getattr(info, name))}
        return info.model_copy(update=await self._secrets.clean(record.context_id, texts))

    async def _known(self, job_id: str) -> JobRecord:
        record = await self._store.get(job_id) if 0 < len(job_id) <= 32 else None
        if record is None:
            raise NotFound(
                f"there is no job '{job_id[:64]}'",
                field="id",
                hint="list them; ended jobs are removed after their ttl_s",
            )
        return record

    async def _reachable(self, caller: Caller, row: Operation, job_id: str) -> JobRecord:
        """Return a job within the caller's reach. The answer is the same whether it exists or not."""
        identity: Identity = caller.identity
        if (refused := identity.lacks(row.id)) is not None:
            raise refused
        try:
            record = await self._known(job_id)
        except NotFound:
            if identity.namespace is None and identity.contexts is None:
                raise
            record = None
        if record is None or not identity.reaches(record.context_id):
            raise identity.refusal(row.id, "reach", f"'{job_id[:64]}' is out of the token's reach")
        return record

    # changing

    async def cancel(self, caller: Caller, job_id: str) -> JobInfo:
        """End a job: at once if it waits, else with its processes, which `job.ended` confirms. May be repeated."""
        record = await self._reachable(caller, op.CANCEL_JOB, job_id)
        async with self._operations.admit(caller, op.CANCEL_JOB, {"job": job_id}, context_id=record.context_id):
            decide = partial(lifecycle.cancelled, by=caller.identity.subject, ttl_s=self._settings.ttl_s)
            changed = await self._store.change(job_id, decide)
            if changed is not None:
                self._watch.changed(changed)
            self._runner.cancel(job_id)
        return await self._info(await self._known(job_id))

    async def cancel_all(self, caller: Caller, context_id: str) -> bool:
        """Cancel the jobs of a context that have not ended; return whether it has any jobs."""
        decide = partial(lifecycle.cancelled, by=caller.identity.subject, ttl_s=self._settings.ttl_s)
        found = await self._store.of_context(context_id)
        for record in found:
            if (changed := await self._store.change(record.id, decide)) is not None:
                self._watch.changed(changed)
                self._runner.cancel(record.id)
        return bool(found)

    async def remove_all(self, context_id: str) -> None:
        """Remove the jobs of a context with their output. Those that run are waited for, but not for long: they were
        cancelled, and their sandbox has ended.
        """
        ends = time.monotonic() + _ENDING_S
        for record in await self._store.of_context(context_id):
            with self._watch.watching(record.id) as changed:
                now: JobRecord | None = record
                while now is not None and not now.state.terminal and time.monotonic() < ends:
                    await self._changed(changed, SHARED_WAIT_S)
                    now = await self._store.get(record.id)
        await self._store.forget(context_id)

    # upkeep

    async def sweep(self) -> None:
        """Remove the jobs whose time to live is over, with the workspaces that were made for them."""
        for record in await self._store.expired():
            if record.own_workspace:
                try:
                    await self._executor.forget(record.context_id)
                except CarrelError:  # another server has it, or it cannot be removed now: the next sweep tries again
                    continue
            await self._store.remove(record.id, [lifecycle.removed(record, time.time())])

    async def count(self) -> None:
        """Set the metrics."""
        self._metrics.jobs(await self._store.counts())


def _last(info: JobInfo) -> CommandInfo:
    """Return a job as the last line of its output."""
    began = info.started_at or info.created_at
    until = info.ended_at or datetime.now(UTC)
    values: dict[str, Any] = {
        "id": info.id,
        "command": info.summary,
        "running": not info.state.terminal,
        "pid": None,
        "terminal": False,
        "started_at": began,
        "duration_ms": max(0.0, (until - began).total_seconds() * 1000),
        "exit_code": info.exit_code,
        "signal": info.signal,
        "timed_out": info.state is JobState.TIMED_OUT,
        "oom_killed": info.oom_killed,
        "output_bytes": info.output_bytes,
        "dropped_bytes": info.dropped_bytes,
    }
    return CommandInfo.model_validate(values)
