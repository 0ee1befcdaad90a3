"""What waits for a person, put to the person in front of the client where the client can ask (elicitation).

The token of the agent never decides. So the person is told what is asked for, and chooses to wait for the decision or
not to; only where the server was given the token of an approver, for a client that the same user started, is their
answer the decision.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from mcp import types

from carrel.client import AsyncClient
from carrel.errors import ApprovalNeeded, CarrelError, InvalidRequest, from_problem
from carrel.integrations.mcp.calls import ToolCall
from carrel.models import ApprovalInfo, ApprovalScope, ApprovalState

KEY = "approval"
LOOK_EVERY_S = 0.5
WAIT, LEAVE = "wait", "do not wait"
ONCE, ALWAYS, DENY = "approve once", "approve always in this context", "deny"
LONGEST_SHOWN = 4000


@dataclass(frozen=True)
class Question:
    """An operation that waits, and whether the person's answer decides it."""

    needed: ApprovalNeeded
    decides: bool

    def kept(self) -> str:
        """What is remembered of it until the person has answered."""
        return json.dumps({"needed": self.needed.problem(), "decides": self.decides}, default=str)

    @classmethod
    def recalled(cls, state: str) -> Question:
        """What was remembered. Raises `InvalidRequest`."""
        try:
            kept = json.loads(state)
            error, decides = from_problem(kept["needed"]), kept["decides"]
        except (ValueError, TypeError, LookupError, AttributeError):
            error, decides = None, False
        if not isinstance(error, ApprovalNeeded) or not isinstance(decides, bool):
            raise InvalidRequest("this is not the state of a call that waits", field="requestState", hint="call anew")
        return cls(error, decides)


@dataclass(frozen=True)
class Asking:
    """How long somebody who chose to wait waits, and who decides."""

    wait_s: float = 300.0
    approver: Callable[[], AsyncClient] | None = None
    """Makes a client with the token of an approver."""

    async def question(
        self, needed: ApprovalNeeded, client: AsyncClient
    ) -> tuple[Question, types.ElicitRequestFormParams]:
        """What the person is asked, and the form they are shown."""
        try:
            asked = _asked(await client.approvals.get(needed.approval or ""))
        except CarrelError:
            asked = None
        # Nobody decides on what they were not shown.
        decides = self.approver is not None and asked is not None and len(asked) <= LONGEST_SHOWN
        if not decides:
            choice = {"type": "string", "title": "What now?", "enum": [WAIT, LEAVE], "default": WAIT}
            properties: dict[str, object] = {"choice": choice}
            required = ["choice"]
            end = (
                f"It is decided elsewhere, by whoever may: `carrel approve {needed.approval}` or "
                f"`carrel deny {needed.approval}`. Wait for that?"
            )
        else:
            choice = {"type": "string", "title": "Decision", "enum": [ONCE, ALWAYS, DENY]}
            words = {"type": "string", "title": "Words for the agent", "maxLength": 2000}
            properties = {"decision": choice, "message": words}
            required = ["decision"]
            end = "Let it?"
        lines = [
            "An operation could not be shown here." if asked is None else _cut(asked),
            f"Why a person has to decide: {_plain(needed.reason)}",
            f"Approval: {needed.approval}",
            end,
        ]
        message = "\n".join(lines)
        schema = {"type": "object", "properties": properties, "required": required}
        return Question(needed, decides), types.ElicitRequestFormParams(message=message, requested_schema=schema)

    async def answered(self, question: Question, answer: types.ElicitResult | None, call: ToolCall) -> None:
        """Do what the person said. Returns when the operation may be tried with the approval; else raises what it was
        refused with.
        """
        needed = question.needed
        content = (answer.content or {}) if answer is not None and answer.action == "accept" else {}
        if question.decides and self.approver is not None:
            declined = answer is not None and answer.action == "decline"
            decision = DENY if declined else content.get("decision")
            await self._decide(self.approver, needed, decision, content.get("message"))
        elif content.get("choice") == WAIT:
            await self._wait(needed.approval or "", call)
        else:
            raise _because(needed, "the person in front of the client did not want to wait")

    @staticmethod
    async def _decide(
        approver: Callable[[], AsyncClient], needed: ApprovalNeeded, decision: object, message: object
    ) -> None:
        approval = needed.approval or ""
        words = message if isinstance(message, str) and message else None
        if decision not in {ONCE, ALWAYS, DENY}:
            raise _because(needed, "the person in front of the client has not decided")
        try:
            async with approver() as client:
                if decision == DENY:
                    await client.approvals.deny(approval, message=words)
                else:
                    scope = ApprovalScope.ONCE if decision == ONCE else ApprovalScope.CONTEXT
                    await client.approvals.approve(approval, scope=scope, message=words)
        except CarrelError as error:
            raise _because(needed, f"the approver's token could not decide it: {error.detail}") from None

    async def _wait(self, approval: str, call: ToolCall) -> None:
        until = time.monotonic() + self.wait_s
        async with call.telling(lambda: f"{call.elapsed:.0f} s: waiting for approval {approval}"):
            while (await call.place.client.approvals.get(approval)).state is ApprovalState.PENDING:
                if time.monotonic() >= until:
                    return
                await asyncio.sleep(LOOK_EVERY_S)


def _because(needed: ApprovalNeeded, why: str) -> ApprovalNeeded:
    needed.hint = why
    return needed


def _asked(info: ApprovalInfo) -> str:
    """What is asked for: all of it, and not only its beginning."""
    lines = [f"An agent ({_plain(info.requested_by)}) asks in context {info.context_id}: {info.kind} {info.operation}"]
    lines += [f"  {_plain(name)}: {_plain(_text(value))}" for name, value in sorted(info.arguments.items())]
    return "\n".join(lines)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _cut(text: str) -> str:
    if len(text) <= LONGEST_SHOWN:
        return text
    return f"{text[:LONGEST_SHOWN]} […] and {len(text) - LONGEST_SHOWN} characters more, which are not shown"


def _plain(text: str) -> str:
    """An agent's words in one line, without what a terminal or a page would obey or what hides the rest."""
    line = "".join(c if c.isprintable() else "⏎" if c == "\n" else "�" for c in text)
    return re.sub(r"\s{4,}", lambda found: f" [{len(found[0])} spaces] ", line)
