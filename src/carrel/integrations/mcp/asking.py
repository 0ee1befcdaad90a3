"""Asks the user of an MCP client about an approval, if the client can show a form (elicitation).

The agent's token never decides. The user sees the operation and chooses whether to wait for the decision. Only if the
server was started with the token of an approver, by the user of the client, is their answer the decision.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from mcp import types

from carrel.client import AsyncClient
from carrel.errors import ApprovalNeeded, CarrelError, InvalidRequest, from_problem
from carrel.integrations.mcp.calls import ToolCall
from carrel.integrations.text import one_line
from carrel.models import ApprovalInfo, ApprovalScope, ApprovalState

KEY = "approval"
LOOK_EVERY_S = 0.5
WAIT, LEAVE = "wait", "do not wait"
ONCE, ALWAYS, DENY = "approve once", "approve always in this context", "deny"
LONGEST_SHOWN = 4000


@dataclass(frozen=True)
class Question:
    """An operation that waits for approval, and whether the user's answer decides it."""

    needed: ApprovalNeeded
    decides: bool

    def kept(self) -> str:
        """Return the state to store until the user has answered."""
        return json.dumps({"needed": self.needed.problem(), "decides": self.decides}, default=str)

    @classmethod
    def recalled(cls, state: str) -> Question:
        """Read the stored state. Raises `InvalidRequest`."""
        try:
            kept = json.loads(state)
            error, decides = from_problem(kept["needed"]), kept["decides"]
        except (ValueError, TypeError, LookupError, AttributeError):
            error, decides = None, False
        if not isinstance(error, ApprovalNeeded) or not isinstance(decides, bool):
            raise InvalidRequest(
                "this is not the state of a call that waits", field="requestState", hint="make a new call"
            )
        return cls(error, decides)


@dataclass(frozen=True)
class Asking:
    """How long a call waits for a decision if the user agrees, and who decides."""

    wait_s: float = 300.0
    approver: Callable[[], AsyncClient] | None = None
    """Makes a client with the token of an approver."""

    async def question(
        self, needed: ApprovalNeeded, client: AsyncClient
    ) -> tuple[Question, types.ElicitRequestFormParams]:
        """Return the question for the user, and the form to show."""
        try:
            asked = _asked(await client.approvals.get(needed.approval or ""))
        except CarrelError:
            asked = None
        # The user must see all of an operation to decide on it.
        decides = self.approver is not None and asked is not None and len(asked) <= LONGEST_SHOWN
        if not decides:
            choice = {"type": "string", "title": "What now?", "enum": [WAIT, LEAVE], "default": WAIT}
            properties: dict[str, object] = {"choice": choice}
            required = ["choice"]
            end = (
                f"An approver decides it with `carrel approve {needed.approval}` or "
                f"`carrel deny {needed.approval}`. Wait for that?"
            )
        else:
            choice = {"type": "string", "title": "Decision", "enum": [ONCE, ALWAYS, DENY]}
            words = {"type": "string", "title": "Message to the agent", "maxLength": 2000}
            properties = {"decision": choice, "message": words}
            required = ["decision"]
            end = "Allow it?"
        lines = [
            "The operation cannot be shown here." if asked is None else _cut(asked),
            f"Reason: {one_line(needed.reason, None)}",
            f"Approval: {needed.approval}",
            end,
        ]
        message = "\n".join(lines)
        schema = {"type": "object", "properties": properties, "required": required}
        return Question(needed, decides), types.ElicitRequestFormParams(message=message, requested_schema=schema)

    async def answered(self, question: Question, answer: types.ElicitResult | None, call: ToolCall) -> None:
        """Act on the user's answer. Returns when the operation may be tried with the approval, else raises."""
        needed = question.needed
        content = (answer.content or {}) if answer is not None and answer.action == "accept" else {}
        if question.decides and self.approver is not None:
            declined = answer is not None and answer.action == "decline"
            decision = DENY if declined else content.get("decision")
            await self._decide(self.approver, needed, decision, content.get("message"))
        elif content.get("choice") == WAIT:
            await self._wait(needed.approval or "", call)
        else:
            raise _because(needed, "the user of the client did not want to wait")

    @staticmethod
    async def _decide(
        approver: Callable[[], AsyncClient], needed: ApprovalNeeded, decision: object, message: object
    ) -> None:
        approval = needed.approval or ""
        words = message if isinstance(message, str) and message else None
        if decision not in {ONCE, ALWAYS, DENY}:
            raise _because(needed, "the user of the client has not decided")
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
        async with call.reporting(lambda: f"{call.elapsed:.0f} s: waiting for approval {approval}"):
            while (await call.access.client.approvals.get(approval)).state is ApprovalState.PENDING:
                if time.monotonic() >= until:
                    return
                await asyncio.sleep(LOOK_EVERY_S)


def _because(needed: ApprovalNeeded, why: str) -> ApprovalNeeded:
    needed.hint = why
    return needed


def _asked(info: ApprovalInfo) -> str:
    """Return all of what an agent asks for."""
    who = one_line(info.requested_by, None)
    lines = [f"An agent ({who}) asks in context {info.context_id}: {info.kind} {info.operation}"]
    for name, value in sorted(info.arguments.items()):
        lines.append(f"  {one_line(name, None)}: {one_line(_text(value), None)}")
    return "\n".join(lines)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _cut(text: str) -> str:
    left = len(text) - LONGEST_SHOWN
    return text if left <= 0 else f"{text[:LONGEST_SHOWN]} […] and {left} characters more, which are not shown"
