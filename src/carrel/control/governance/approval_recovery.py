"""Recovery of approvals after a restart: the previous process used them for an operation whose end nobody saw.

The sandbox outlives the server and remembers which runs began in it. If a run surely did not begin, it never will, and
its approval can be used again; every other approval stays used. The audit log records each finding.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from carrel.audit import AuditEntry, AuditLog, Ending, chain_of
from carrel.control.sessions.live import LiveSandbox
from carrel.errors import CarrelError
from carrel.store.approvals import ApprovalRecord, ApprovalStore

log = logging.getLogger("carrel.recovery")

NAME = "recover_approval"
_WORDS = {
    True: "the operation had begun when the server ended",
    False: "the server ended before the operation began; the approval can be used again",
    None: "the server ended, and it is unknown whether the operation had begun",
}
_ANSWERS = {True: "yes", False: "no", None: "unknown"}


async def recover_approvals(
    store: ApprovalStore, boxes: Iterable[LiveSandbox], audit: AuditLog, node: str, former: Sequence[str] = ()
) -> int:
    """Recover the approvals of this server; return how many can be used again. Runs once, before it takes requests.
    `former` are more names of processes of it that are dead.
    """
    running = {box.instance: box for box in boxes}
    left, given_back = await store.runs(node, *former), 0
    answers = await asyncio.gather(*(_begun(running.get(each.run_in or ""), each.run or "") for each in left))
    for record, begun in zip(left, answers, strict=True):
        # Recorded before the change: a server that is killed in between finds it again.
        ticket = await audit.begin(_entry(record, begun, node))
        await store.ended(record.id, record.run or "", used=begun is not False)
        ticket.end(Ending(reason=_WORDS[begun]))
        log.warning("approval %s, for %s: %s", record.id, record.operation, _WORDS[begun])
        given_back += begun is False
    return given_back


def _entry(record: ApprovalRecord, begun: bool | None, node: str) -> AuditEntry:
    return AuditEntry(
        chain_of(record.context_id, record.sandbox_id),
        node,
        "session",
        NAME,
        arguments={"approval": record.id, "begun": _ANSWERS[begun], "given_back": begun is False},
        approval=record.id,
    )


async def _begun(box: LiveSandbox | None, run: str) -> bool | None:
    """Whether a run began in a sandbox; a sandbox that says no refuses the run from now on."""
    if box is None:
        return None
    try:
        return await box.connection.void_run(run)
    except CarrelError:  # it does not answer, or does not know the route
        return None
