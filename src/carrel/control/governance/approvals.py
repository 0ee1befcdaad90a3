"""Approvals: an operation that policy leaves to a person waits, is shown, is decided, and then runs once.

One inbox for every kind of operation. An approval is for exactly the operation that was asked for: it has the digest of
the operation, and the first run uses it up. The approval records its run, so that a server that takes over can find out
whether it began.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from blake3 import blake3

from carrel.control.operations.call import Call
from carrel.control.operations.caller import Caller, OwnWork
from carrel.control.sessions.attachments import Attachment
from carrel.errors import ApprovalNeeded, CarrelError, Conflict, Denied, NotFound
from carrel.models import ApprovalDecision, ApprovalInfo, ApprovalPage, ApprovalScope, ApprovalState
from carrel.models.operations import DELETE_MANY_FILES
from carrel.policy.verdict import Verdict
from carrel.store.approvals import ApprovalRecord, ApprovalStore

log = logging.getLogger("carrel.approvals")

LONGEST_SUMMARY = 500
_READ = 32 * LONGEST_SUMMARY
"""Characters of a line that a summary reads: the event loop is busy while they are checked one by one."""
_ENDS = re.compile(r"(?<!\s)\s*\n\s*")  # matches once for a run of blanks, not at each of them
_BLANKS = re.compile(r"[ \t]+")
_SAYS_NOTHING = frozenset({"command", "digest", "interactive", "timeout"})
MOST_WAITING = 100
"""How many requests of one context may wait at once: nobody reads more, and other contexts must stay visible."""
_WITHOUT_ID = frozenset({"network", "mcp"})
"""Kinds of operations whose caller, a program, cannot send the id of an approval that was given meanwhile."""
DAY_S = 86_400.0
LOOK_EVERY_S = 1.0
"""How often a waiting request reads the database: the decision may be made on another server."""


class ApprovalRules(Protocol):
    """The part of the policies that approvals need."""

    async def decide(self, call: Call) -> Verdict:
        """Return the verdict on an operation by the current rules."""


Redact = Callable[[str | None, Mapping[str, object]], Awaitable[dict[str, object]]]
"""Removes the secrets of a context, or of an ephemeral sandbox, from arguments."""


@dataclass(frozen=True, slots=True)
class Permit:
    """Permission to run an operation now, under an approval. With a `run`, the run uses it up."""

    approval: str
    run: str | None = None


def digest(call: Call) -> str:
    """Return a digest of the operation exactly as it was asked for, in its context."""
    asker = call.context_id or call.asks_as or call.sandbox_id
    value = [call.kind, call.name, asker, call.arguments]
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=True)
    return str(blake3(text.encode()).hexdigest())


def _asker(call: Call) -> str | None:
    """Return the only subject that may use an approval of an operation, or wait for it. None for outbound connections:
    they come from the sandbox of the context, which has another id after each start.
    """
    return None if call.kind == "network" else call.subject


def _path_first(key: str) -> tuple[bool, str]:
    return key != "path", key


def visible(text: str) -> str:
    """Return a text of an agent in one line in which nothing can hide: line ends are marked, and control or invisible
    characters are written as escapes.
    """
    return _written_out(_one_line(text))


def _one_line(text: str) -> str:
    return _ENDS.sub(" ⏎ ", _BLANKS.sub(" ", text.strip()))


def _written_out(line: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def summary(call: Call, approval_id: str = "") -> str:
    """Return the operation in one line. It names what it leaves out, and where to see it."""
    arguments, beside = call.arguments, []
    if call.kind == "mcp":
        given = {key: value for key, value in arguments.items() if key not in {"server", "tool"}}
        text = f"{arguments.get('server')}:{arguments.get('tool')} {json.dumps(given, default=str)}"
    elif "command" in arguments:
        command = arguments["command"]
        text = command if isinstance(command, str) else shlex.join(str(part) for part in command)  # type: ignore[attr-defined]
        beside = [key for key in sorted(arguments) if key not in _SAYS_NOTHING]
    else:
        shown = [str(arguments[key]) for key in sorted(arguments, key=_path_first) if key != "digest"]
        text = " ".join([call.name, *shown])
    all_of_it = _one_line(text)
    line = _written_out(all_of_it[:_READ])
    left = max(0, len(line) - LONGEST_SUMMARY) + max(0, len(all_of_it) - _READ)
    more = [f"[…] and {left} characters more"] if left > 0 else []
    more += [f"(with {', '.join(map(visible, beside))})"] if beside else []
    whole = f"; see `carrel approvals show {approval_id}`" if more and approval_id else ""
    return " ".join([line[:LONGEST_SUMMARY], *more]) + whole


class Approvals(Attachment):
    """The approvals of one server; servers on one database share them."""

    def __init__(
        self,
        store: ApprovalStore,
        rules: ApprovalRules,
        redact: Redact,
        *,
        on_created: Callable[[ApprovalInfo], None] | None,
        ttl_s: float = 3600.0,
        keep_days: float = 30.0,
        node: str = "",
        clock: Callable[[], float] = time.time,
    ):
        self._store = store
        self._rules = rules
        self._redact = redact
        self._on_created = on_created
        self._ttl_s = ttl_s
        self._keep_s = max(keep_days * DAY_S, ttl_s)
        self._node = node
        self._clock = clock
        self._changed = asyncio.Event()
        self._asking = asyncio.Lock()
        self._closed = False

    # for agents

    async def permit(self, call: Call, decision: Verdict) -> Permit:
        """Return the permission to run the operation now, or raise `ApprovalNeeded` or `Denied`. Call `ended` when it
        is over.

        Of several callers that wait for the same operation, the first uses an approval that is for one run. The others
        ask again, unless the decision added a rule that covers the operation.
        """
        who, name = call.caller, digest(call)
        assert isinstance(who, Caller), "carrel's own work asks nobody"
        if who.approval is not None:
            record = await self.known(who.approval)
            asker = _asker(call)
            if asker is not None and record.requested_by != asker:
                raise Conflict(
                    f"approval '{record.id}' was asked for by another caller",
                    field="approval",
                    hint="ask without the approval: it is only for the caller who asked first",
                )
            permit = await self._use(record, name, call)
            if permit is None:
                raise Conflict(
                    f"approval '{record.id}' was used already: it runs its operation once",
                    field="approval",
                    hint="ask again without the approval: every equal request needs an approval of its own",
                )
            return permit
        until = time.monotonic() + who.wait_s
        while True:
            record = await self._found(call, decision, name)
            if record.state is ApprovalState.PENDING and who.wait_s > 0:
                record = await self._wait(record, who, until)
            if record.state is ApprovalState.PENDING or who.gone():
                raise self._needed(record, call)
            permit = await self._use(record, name, call)
            if permit is not None:
                return permit
            if record.scope is ApprovalScope.RULE and await self._covered(call):
                return Permit(record.id)

    async def _covered(self, call: Call) -> bool:
        """Whether the rules, with the one just added, allow an operation now."""
        return (await self._rules.decide(call)).allows

    async def _found(self, call: Call, decision: Verdict, name: str) -> ApprovalRecord:
        """Return an approval of the same operation that was given or waits; else ask a person."""
        now, asker = self._clock(), _asker(call)
        if call.context_id is not None:
            granted = await self._store.granted(call.context_id, name)
            if granted is not None:
                return granted
        if call.kind in _WITHOUT_ID or call.name == DELETE_MANY_FILES.name:
            ready = await self._store.ready(call.context_id, name, now - self._ttl_s, asker)
            if ready is not None:
                return ready
        if (waiting := await self._store.pending(call.context_id, name, now, asker)) is not None:
            return waiting
        record = await self._draft(call, decision, name)  # may take long, so it is made outside the lock
        async with self._asking:  # two equal requests at once wait for the same decision
            waiting = await self._store.pending(call.context_id, name, record.created_at, asker)
            return waiting or await self._ask(call, record)

    async def ended(self, permit: Permit, *, used: bool) -> None:
        """Record that the operation is over; or that it did not begin, so that the approval can be used again."""
        if permit.run is None:
            return
        try:
            await self._store.ended(permit.approval, permit.run, used=used)
        except CarrelError as error:  # the recovery after the next start asks the sandbox
            log.warning("the use of approval %s could not be recorded: %s", permit.approval, error)

    async def _draft(self, call: Call, decision: Verdict, name: str) -> ApprovalRecord:
        """Return the question to a person."""
        arguments = await self._redact(call.owner, call.arguments)
        why = await self._redact(call.owner, {"reason": decision.reason or "no rule covers it"})
        approval_id, now = f"apr-{secrets.token_hex(8)}", self._clock()
        return ApprovalRecord(
            id=approval_id,
            context_id=call.context_id,
            sandbox_id=call.sandbox_id,
            kind=call.kind,
            operation=call.name,
            summary=summary(replace(call, arguments=arguments), approval_id),
            arguments=arguments,
            digest=name,
            reason=visible(str(why["reason"])),
            requested_by=call.subject,
            created_at=now,
            expires_at=now + self._ttl_s,
        )

    async def _ask(self, call: Call, record: ApprovalRecord) -> ApprovalRecord:
        if await self._store.waiting(record.context_id, record.requested_by, record.created_at) >= MOST_WAITING:
            raise self._too_many(call)
        await self._store.insert(record)
        self.wake()
        if self._on_created is not None:
            self._on_created(record.info())
        return record

    async def _use(self, record: ApprovalRecord, name: str, call: Call) -> Permit | None:
        """Return the permission of an approval that was given; None when it is used up."""
        if record.digest != name:
            raise Conflict(
                f"approval '{record.id}' is for another operation",
                field="approval",
                hint="repeat exactly what was approved, or ask again without the approval",
            )
        record = self._aged(record)
        if record.state is ApprovalState.PENDING:
            raise self._needed(record, call)
        if record.state is not ApprovalState.APPROVED:
            raise self._refused(record, call)
        if record.scope is ApprovalScope.CONTEXT:
            return Permit(record.id)
        if record.decided_at is not None and record.decided_at + self._ttl_s < self._clock():
            raise self._refused(replace(record, state=ApprovalState.EXPIRED), call)
        permit = Permit(record.id, run := secrets.token_hex(16))
        try:
            taken = await self._store.use(record.id, self._clock(), run=run, node=self._node, place=call.runs_in)
        except BaseException:  # the caller went away or the database failed: the use may be recorded all the same
            await self.ended(permit, used=False)
            raise
        return permit if taken else None

    async def _wait(self, record: ApprovalRecord, who: Caller, until: float) -> ApprovalRecord:
        while record.state is ApprovalState.PENDING and (left := until - time.monotonic()) > 0:
            changed = self._changed
            if self._closed or who.gone():
                break
            try:
                async with asyncio.timeout(min(left, LOOK_EVERY_S)):
                    await changed.wait()
            except TimeoutError:
                pass
            record = self._aged(await self.known(record.id))
        return record

    def _aged(self, record: ApprovalRecord) -> ApprovalRecord:
        if record.state is ApprovalState.PENDING and record.expires_at <= self._clock():
            return replace(record, state=ApprovalState.EXPIRED)
        return record

    @staticmethod
    def _needed(record: ApprovalRecord, call: Call) -> ApprovalNeeded:
        return ApprovalNeeded(
            f"a person has to decide: {record.reason}",
            hint=f"wait for approval '{record.id}', then ask again with it; meanwhile do something else",
            operation=call.kind,
            rule=None,
            source=None,
            reason=record.reason,
            retry=True,
            approval=record.id,
            expires_at=record.info().expires_at.isoformat(),
        )

    @staticmethod
    def _too_many(call: Call) -> Denied:
        words = f"{MOST_WAITING} requests wait for a person already"
        return Denied(
            words,
            hint="ask again when some of them are decided",
            operation=call.kind,
            rule=None,
            source="approvals",
            reason=words,
            retry=True,
            approval=None,
        )

    @staticmethod
    def _refused(record: ApprovalRecord, call: Call) -> Denied:
        if record.state is ApprovalState.EXPIRED:
            words, hint = (
                "it was not decided, or not used, in time",
                "ask again without the approval if it is still needed",
            )
        else:
            words, hint = record.message or "a person denied it", "choose another way"
        return Denied(
            words,
            hint=hint,
            operation=call.kind,
            rule=None,
            source=f"decided by {record.decided_by}" if record.decided_by else "approvals",
            reason=words,
            retry=record.state is ApprovalState.EXPIRED,
            approval=record.id,
        )

    # for people

    async def get(self, approval_id: str) -> ApprovalInfo:
        return self._aged(await self.known(approval_id)).info()

    async def page(
        self,
        *,
        limit: int = 100,
        cursor: str | None = None,
        states: Iterable[ApprovalState] | None = None,
        context_id: str | None = None,
    ) -> ApprovalPage:
        """Return approvals, newest first."""
        await self.expire()
        records, following = await self._store.page(limit=limit, cursor=cursor, states=states, context_id=context_id)
        return ApprovalPage(items=[record.info() for record in records], next=following)

    async def settle_decision(
        self, approval_id: str, decision: ApprovalDecision, by: str, rule: str | None, message: str | None
    ) -> ApprovalRecord:
        """Store a decision; `Conflict` when there is one already. Call `wake` when it is carried out."""
        done = await self._store.decide(
            approval_id,
            ApprovalState.APPROVED if decision.approve else ApprovalState.DENIED,
            by=by,
            at=self._clock(),
            scope=decision.scope if decision.approve else None,
            rule=rule,
            message=message,
        )
        found = self._aged(await self.known(approval_id))
        if not done:
            raise Conflict(
                f"approval '{approval_id}' is {found.state} already", field="id", hint="list those that are pending"
            )
        return found

    async def watch(self) -> AsyncIterator[ApprovalInfo]:
        """Yield the pending approvals, then every approval that is created or changes."""
        known: dict[str, ApprovalState] = {}
        while not self._closed:
            changed = self._changed
            await self.expire()
            waiting, _ = await self._store.page(limit=1000, states=[ApprovalState.PENDING])
            for record in reversed(waiting):
                if record.id not in known:
                    known[record.id] = record.state
                    yield record.info()
            for approval_id in [key for key in known if key not in {record.id for record in waiting}]:
                del known[approval_id]
                yield (await self.known(approval_id)).info()
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await changed.wait()
            except TimeoutError:
                continue

    async def expire(self) -> None:
        """Mark the approvals that waited too long as expired."""
        if await self._store.expire(self._clock()):
            self.wake()

    async def prune(self) -> None:
        """Remove approvals that were decided long ago; the audit log keeps who asked and who decided."""
        await self.expire()
        removed = await self._store.prune(self._clock() - self._keep_s)
        if removed:
            log.info("%d old approvals were removed", removed)

    async def forget(self, caller: Caller | OwnWork, context_id: str) -> None:
        """Delete the approvals of a deleted context, pending ones too."""
        if await self._store.forget(context_id):
            self.wake()

    def close(self) -> None:
        """End all waiting and watching: the server ends."""
        self._closed = True
        self.wake()

    def wake(self) -> None:
        """Wake everybody who waits or watches: something changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def known(self, approval_id: str) -> ApprovalRecord:
        """Return the record of an approval; `NotFound`."""
        record = await self._store.get(approval_id) if 0 < len(approval_id) <= 64 else None
        if record is None:
            raise NotFound(
                f"there is no approval '{approval_id[:64]}'", field="approval", hint="list them with `carrel approvals`"
            )
        return record
