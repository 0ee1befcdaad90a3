"""After a restart: approvals that the server before took to run an operation, and whose end nobody saw.

The sandbox outlives the server and remembers what was begun in it. What surely was not begun there never will be, and
its approval can be used again; everything else stays used. Whatever is found out is in the audit log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from carrel.audit import AuditLog, Ending, Entry, chain_of
from carrel.control.sessions.live import LiveSandbox
from carrel.errors import CarrelError
from carrel.store.approvals import ApprovalRecord, ApprovalStore

log = logging.getLogger("carrel.recovery")

NAME = "recover_approval"
_WORDS = {
    True: "it was begun when the server ended",
    False: "the server ended before it was begun; the approval can be used again",
    None: "the server ended, and nobody can tell whether it was begun",
}
_ANSWERS = {True: "yes", False: "no", None: "unknown"}


async def settle_runs(store: ApprovalStore, boxes: Iterable[LiveSandbox], audit: AuditLog, node: str) -> int:
    """Settle what this server left; says how many approvals can be used again. Runs once, before it takes requests."""
    running = {box.instance: box for box in boxes}
    left, given_back = await store.runs(node), 0
    answers = await asyncio.gather(*(_begun(running.get(each.run_in or ""), each.run or "") for each in left))
    for record, begun in zip(left, answers, strict=True):
        # Written before it is done: killed in between, it is found and asked for again.
        ticket = await audit.begin(_entry(record, begun, node))
        await store.ended(record.id, record.run or "", used=begun is not False)
        ticket.end(Ending(reason=_WORDS[begun]))
        log.warning("approval %s, for %s: %s", record.id, record.operation, _WORDS[begun])
        given_back += begun is False
    return given_back


def _entry(record: ApprovalRecord, begun: bool | None, node: str) -> Entry:
    return Entry(
        chain_of(record.context_id, record.sandbox_id),
        node,
        "session",
        NAME,
        arguments={"approval": record.id, "begun": _ANSWERS[begun], "given_back": begun is False},
        approval=record.id,
    )


async def _begun(box: LiveSandbox | None, run: str) -> bool | None:
    """Whether a run was begun in a sandbox; if it says no, it will refuse it from now on."""
    if box is None:
        return None
    try:
        return await box.connection.void_run(run)
    except CarrelError:  # it does not answer, or is older than the question
        return None
