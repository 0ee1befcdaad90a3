"""Admission: the one function that every operation passes, whichever protocol it came by.

Policy decides, a person approves where policy says so, and the audit log gets a record before the operation is
dispatched and when it has ended. An operation that cannot be recorded is not dispatched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import cast

from carrel.audit import AuditLog
from carrel.audit.log import Ticket
from carrel.audit.records import AuditEntry, Ending, chain_of, server_chain
from carrel.control.governance.approvals import Approvals, Permit
from carrel.control.governance.policies import Policies
from carrel.control.operations.call import Call, Traffic, refusal
from carrel.control.operations.caller import OwnWork
from carrel.control.operations.happened import exit_of
from carrel.control.secrets.values import SecretValues
from carrel.control.sessions.live import LiveSandboxes
from carrel.control.supervisor.connection import run
from carrel.errors import CarrelError, Denied
from carrel.metrics import OK, Metrics, outcome_of
from carrel.policy.verdict import Verdict, strictest
from carrel.tracing import span

log = logging.getLogger("carrel.admission")

Redact = Callable[[str | None, Mapping[str, object]], Awaitable[dict[str, object]]]
"""Removes the secrets of a context, or of an ephemeral sandbox, from the arguments of an operation."""


class Admission:
    """Decides on operations, asks for approvals, records and counts."""

    def __init__(
        self,
        policies: Policies,
        approvals: Approvals,
        audit: AuditLog,
        metrics: Metrics,
        secrets: SecretValues,
        live: LiveSandboxes,
    ):
        self._policies = policies
        self._approvals = approvals
        self._audit = audit
        self._metrics = metrics
        self._secrets = secrets
        self._live = live

    @asynccontextmanager
    async def admit(self, call: Call) -> AsyncIterator[Traffic]:
        """Admit a call for the length of the block, or raise `Denied`. The audit record gets the error and the bytes of
        the block; secrets of the call's owner are removed from the error.
        """
        facts = {"kind": call.kind, "sandbox": call.sandbox_id or None, "context": call.context_id}
        with span(call.name, **facts) as traced:
            traffic, began, outcome, outer_run = Traffic(), time.monotonic(), OK, run.get()
            verdict: Verdict | None = None
            permit: Permit | None = None
            ticket: Ticket | None = None
            admitted = False
            running = began
            try:
                if not isinstance(call.caller, OwnWork):
                    with span("policy"):
                        verdict = await self._decide(call)
                    if verdict.asks:
                        with span("approval"):
                            permit = await self._approvals.permit(call, verdict)
                        traffic.approval = permit.approval
                        now = await self._decide(call)
                        if now.denies:  # a rule that changed while a person was asked overrides the approval
                            verdict = now
                    if verdict.denies:
                        raise refusal(call.kind, verdict)
                    if call.proxy_verdict is None:
                        entry = await self._entry(call, verdict, traffic.approval)
                        with span("audit"):
                            ticket = await self._audit.begin(entry)
                        traffic.record = ticket.seq or None
                        if traced is not None:
                            command = entry.arguments.get("command")
                            traced.set(
                                record=traffic.record,
                                approval=traffic.approval,
                                command=None if command is None else str(command),
                            )
                    admitted, running = True, time.monotonic()
                    if permit is not None and permit.run is not None:
                        run.set(permit.run)  # marks every request to a supervisor from now on
                yield traffic
            except BaseException as error:
                outcome = outcome_of(error)
                if verdict is not None and not admitted and isinstance(error, Denied):
                    await self._record_refusal(call, verdict, error, began)
                if isinstance(error, CarrelError):
                    await self._secrets.clean_error(call.owner, error)
                elif isinstance(error, asyncio.CancelledError):
                    log.debug("the caller of %s went away", call.name)
                raise
            finally:
                seconds = time.monotonic() - began
                if traced is not None:
                    traced.set(outcome=outcome, decision=None if verdict is None else verdict.verdict)
                if ticket is not None:
                    ending = Ending(outcome, seconds * 1000, traffic.bytes_in, traffic.bytes_out, told=traffic.told)
                    ticket.end(ending)
                    if (exit := exit_of(call.operation, ending)) is not None:
                        box = self._live.get(call.sandbox_id)
                        template = None if box is None else box.record.template
                        self._metrics.command_ended(template, exit, time.monotonic() - running)
                if not isinstance(call.caller, OwnWork) and call.proxy_verdict is None:
                    self._metrics.operated(call.kind, call.name, outcome, seconds)
                if permit is not None:
                    run.set(outer_run)
                    await self._approvals.ended(permit, used=admitted)

    async def _decide(self, call: Call) -> Verdict:
        box = self._live.get(call.sandbox_id)
        places = (None, None) if box is None else (box.workspace, box.record.workspace_path)
        verdict = await self._policies.decide(call, *places)
        if call.proxy_verdict is None:
            return verdict
        return strictest((call.proxy_verdict, verdict)) or verdict

    async def _record_refusal(self, call: Call, verdict: Verdict, error: Denied, began: float) -> None:
        if call.proxy_verdict is not None:
            return
        shown = await self._secrets.clean(call.owner, {"reason": error.detail})
        ending = Ending(error.code, (time.monotonic() - began) * 1000, reason=str(shown["reason"])[:500])
        approval = error.extra.get("approval")
        self._audit.record(await self._entry(call, verdict, approval if isinstance(approval, str) else None), ending)

    async def _entry(self, call: Call, verdict: Verdict, approval: str | None) -> AuditEntry:
        # A rule may quote a secret, and a caller chooses the id of its request.
        request_id = None if isinstance(call.caller, OwnWork) else call.caller.request_id
        shown = await self._secrets.clean(
            call.owner, {"arguments": call.arguments, "rule": verdict.rule, "request": request_id}
        )
        of_server, box = call.operation.of_server, self._live.get(call.sandbox_id)
        return AuditEntry(
            chain=server_chain(self._audit.node) if of_server else chain_of(call.context_id, call.sandbox_id),
            actor=call.subject,
            kind=call.kind,
            name=call.name,
            decision=verdict.verdict,
            rule=cast("str | None", shown["rule"]),
            source=verdict.source,
            arguments=cast(Mapping[str, object], shown["arguments"]),
            arguments_hash=self._audit.hash_arguments(call.arguments),
            approval=approval,
            request=cast("str | None", shown["request"]),
            agent=None if box is None else box.record.agent,
            sandbox=call.sandbox_id or None,
        )
