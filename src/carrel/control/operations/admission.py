"""The door with a policy: an operation is decided, waits for a person where it must, and is written to the audit log
before it is dispatched and when it has ended.

There is no operation without its record: what cannot be written is not dispatched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import cast

from carrel.audit import AuditLog
from carrel.audit.records import Ending, Entry, chain_of
from carrel.control.governance.approvals import Approvals, Leave
from carrel.control.governance.policies import Policies
from carrel.control.operations.caller import caller
from carrel.control.operations.door import SELF, Operation, Traffic, refusal
from carrel.control.sessions.live import LiveSandboxes
from carrel.control.supervisor.connection import run
from carrel.errors import Denied
from carrel.metrics import OK, outcome_of
from carrel.policy.verdict import Verdict, strictest

log = logging.getLogger("carrel.governor")

Redact = Callable[[str | None, Mapping[str, object]], Awaitable[dict[str, object]]]
"""What may be shown of the arguments of an operation in a context, or in an ephemeral sandbox."""


class Governor:
    """Decides, asks, records."""

    def __init__(
        self, policies: Policies, approvals: Approvals, audit: AuditLog, *, redact: Redact, live: LiveSandboxes
    ):
        self._policies = policies
        self._approvals = approvals
        self._audit = audit
        self._redact = redact
        self._live = live

    @asynccontextmanager
    async def admit(self, operation: Operation) -> AsyncIterator[Traffic]:
        """See `Door`."""
        traffic = Traffic()
        if operation.actor == SELF:
            yield traffic
            return
        began = time.monotonic()
        verdict = await self._decide(operation)
        leave: Leave | None = None
        if verdict.asks:
            try:
                leave = await self._approvals.leave(operation, verdict)
            except Denied as error:
                await self._refused(operation, verdict, error, began)
                raise
        dispatched = False
        try:
            if leave is not None:
                traffic.approval = leave.approval
                now = await self._decide(operation)
                if now.denies:  # since it was asked for: no approval is worth more than a rule
                    verdict = now
            if verdict.denies:
                refused = refusal(operation, verdict)
                await self._refused(operation, verdict, refused, began)
                raise refused
            ticket = None
            if operation.proxy_verdict is None:
                ticket = await self._audit.begin(await self._entry(operation, verdict, traffic.approval))
            dispatched, outcome, outer = True, OK, run.get()
            if leave is not None and leave.run is not None:
                run.set(leave.run)  # whatever is asked of a sandbox from now on is part of it
            try:
                yield traffic
            except BaseException as error:
                outcome = outcome_of(error)
                if isinstance(error, asyncio.CancelledError):
                    log.debug("%s was broken off by its caller", operation.name)
                raise
            finally:
                run.set(outer)
                took_ms = (time.monotonic() - began) * 1000
                if ticket is not None:
                    ticket.end(Ending(outcome, took_ms, traffic.bytes_in, traffic.bytes_out))
        finally:
            if leave is not None:
                await self._approvals.ended(leave, used=dispatched)

    async def _decide(self, operation: Operation) -> Verdict:
        verdict = await self._policies.decide(operation, self._place(operation.sandbox_id))
        if operation.proxy_verdict is None:
            return verdict
        return strictest((operation.proxy_verdict, verdict)) or verdict

    def _place(self, sandbox_id: str) -> str | None:
        """Where the workspace of a sandbox lies on this server."""
        box = self._live.get(sandbox_id)
        return None if box is None else box.workspace

    async def _refused(self, operation: Operation, verdict: Verdict, error: Denied, began: float) -> None:
        if operation.proxy_verdict is not None:
            return
        shown = await self._redact(operation.context_id or operation.sandbox_id or None, {"reason": error.detail})
        ending = Ending(error.code, (time.monotonic() - began) * 1000, reason=str(shown["reason"])[:500])
        approval = error.extra.get("approval")
        named = approval if isinstance(approval, str) else None
        self._audit.record(await self._entry(operation, verdict, named), ending)

    async def _entry(self, operation: Operation, verdict: Verdict, approval: str | None) -> Entry:
        who = caller.get()
        # A rule may quote what it is about, and a caller may name its request as it likes.
        said = {"arguments": operation.arguments, "rule": verdict.rule, "request": who.request_id}
        shown = await self._redact(operation.context_id or operation.sandbox_id or None, said)
        return Entry(
            chain=chain_of(operation.context_id, operation.sandbox_id),
            actor=who.identity.subject,
            kind=operation.kind,
            name=operation.name,
            decision=verdict.verdict,
            rule=cast("str | None", shown["rule"]),
            source=verdict.source,
            arguments=cast(Mapping[str, object], shown["arguments"]),
            arguments_hash=self._audit.hash_arguments(operation.arguments),
            approval=approval,
            request=cast("str | None", shown["request"]),
        )
