"""One tool call: tried, put before a person if need be, and done once.

LangGraph runs a node from its start again whenever it is resumed. So the first try is a task of its own, whose outcome
is in the checkpoint; what comes after the interrupt carries the approval, which carrel lets be used once; and a command
runs under an id that is the same on every try, so that a second try finds the first one's command.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from langchain_core.messages import ToolMessage
from langgraph.func import task
from langgraph.prebuilt import ToolRuntime
from langgraph.runtime import get_runtime
from langgraph.types import interrupt

from carrel.client import AsyncSandbox
from carrel.errors import (
    ApprovalNeeded,
    CarrelError,
    Conflict,
    Denied,
    InvalidRequest,
    PlatformError,
    RunsElsewhere,
    SandboxLost,
    Unauthorized,
)
from carrel.integrations.langgraph.approvals import InterruptAnswer, PendingApproval, one_line
from carrel.integrations.langgraph.workspace import Workspace, own_id

Runtime = ToolRuntime[Any, Any]


class ToolReply(TypedDict):
    """What a tool tells the model, and beside it what a program may want to know."""

    text: str
    artifact: dict[str, object]
    error: bool


class FirstTry(TypedDict):
    """What became of the first try: a result, or an approval that is needed first."""

    id: str
    said: ToolReply | None
    waits: dict[str, object] | None


@dataclass(frozen=True)
class Attempt:
    """One try of a call. `id` is the same on every try."""

    id: str
    workspace: Workspace


Act = Callable[[Attempt, AsyncSandbox], Awaitable[ToolReply]]
"""Does a thing in a sandbox. It may be called again with the same id, and then must not do it again."""


@dataclass(frozen=True)
class GraphCall:
    """One thing to be done for a run."""

    workspace: Workspace
    thread_id: str | None
    name: str
    arguments: Mapping[str, object]
    summary: str
    act: Act = field(repr=False)

    @property
    def context_id(self) -> str:
        """The context it is done in."""
        return self.workspace.context(self.thread_id)

    async def run(self, id: str, approval: str | None = None) -> ToolReply:
        """Do it, under an approval if there is one. What the model can act on is said; other failures are raised."""
        box = await self.workspace.sandbox(self.context_id)
        try:
            return await self.act(Attempt(id, self.workspace), box if approval is None else box.with_approval(approval))
        except (ApprovalNeeded, Unauthorized, RunsElsewhere):
            raise
        except SandboxLost as error:
            return refused(error)
        except PlatformError:
            raise
        except CarrelError as error:
            return refused(error)


def refused(error: CarrelError) -> ToolReply:
    """A refusal or a failure in words for the model, and as the problem object every protocol shows."""
    problem = error.problem()
    lines = [f"{problem['title']}: {error.detail}"]
    if isinstance(error, Denied):
        if error.rule:
            lines.append(f"rule: {error.rule}")
        lines.append("try again later" if error.extra.get("retry") else "do not try the same again")
    if error.hint:
        lines.append(f"hint: {error.hint}")
    return ToolReply(text="\n".join(lines), artifact=dict(problem), error=True)


async def perform(
    runtime: Runtime,
    fixed: Workspace | None,
    tool: str,
    arguments: Mapping[str, object],
    summary: str,
    act: Act,
) -> ToolMessage:
    """Do what a tool is for, and wait for a person where that is needed."""
    thread_id = (runtime.config.get("configurable") or {}).get("thread_id")
    call = asked(runtime.context, fixed, thread_id, tool, arguments, summary, act)
    said = await settle(call)
    return ToolMessage(
        content=said["text"],
        artifact=said["artifact"],
        name=tool,
        tool_call_id=runtime.tool_call_id or "",
        status="error" if said["error"] else "success",
    )


def asked(
    context: object,
    fixed: Workspace | None,
    thread_id: object,
    name: str,
    arguments: Mapping[str, object],
    summary: str,
    act: Act,
) -> GraphCall:
    """A call in the workspace that the run names, or else in a fixed one."""
    workspace = context if isinstance(context, Workspace) else fixed
    if workspace is None:
        raise InvalidRequest(
            "the run has no workspace", field="context", hint="pass context=Workspace(client) when the graph is run"
        )
    return GraphCall(
        workspace=workspace,
        thread_id=None if thread_id is None else str(thread_id),
        name=name,
        arguments={name: value for name, value in arguments.items() if value is not None},
        summary=one_line(summary),
        act=act,
    )


async def settle(call: GraphCall) -> ToolReply:
    """Do a call of a graph that runs: once, however often its node is run, and after a person's word if need be."""
    outcome = await operation(call)
    if outcome["said"] is not None:
        return outcome["said"]
    return await _decided(call, outcome["id"], PendingApproval.model_validate(outcome["waits"]))


@task
async def operation(call: GraphCall) -> FirstTry:
    """The first try. Its outcome is kept, so that a node that is run again does not try again."""
    here = get_runtime().execution_info
    # LangGraph gives a task the same id on every try, and each task of a node its own.
    id = own_id(call.thread_id, here.task_id if here is not None else uuid.uuid4().hex)
    try:
        return FirstTry(id=id, said=await call.run(id), waits=None)
    except ApprovalNeeded as needed:
        waits = PendingApproval.of(
            needed, tool=call.name, summary=call.summary, arguments=call.arguments, context_id=call.context_id
        )
        return FirstTry(id=id, said=None, waits=waits.model_dump())


async def _decided(call: GraphCall, id: str, waits: PendingApproval) -> ToolReply:
    """Interrupt until it is decided; then do it, or say why not."""
    while True:
        given = InterruptAnswer.read(interrupt(waits.model_dump()))
        told, problem = await _tell(call.workspace, waits, given)
        if given.decision == "deny" and not told:
            return _declined(waits, given)
        try:
            return await call.run(id, waits.approval)
        except ApprovalNeeded:
            waits = waits.model_copy(update={"problem": problem})


async def _tell(workspace: Workspace, waits: PendingApproval, given: InterruptAnswer) -> tuple[bool, str | None]:
    """Give a decision to the inbox, if this process may: whether it has one now, and else why not."""
    if not given.take() or workspace.approver is None or given.decision == "look":
        return False, None
    inbox = workspace.approver.approvals
    try:
        if given.decision == "approve":
            await inbox.approve(waits.approval, message=given.message)
        else:
            await inbox.deny(waits.approval, message=given.message)
    except Conflict:  # decided meanwhile: what the inbox says counts
        return given.decision == "approve", None
    except CarrelError as error:
        return False, str(error)
    return True, None


def _declined(waits: PendingApproval, given: InterruptAnswer) -> ToolReply:
    words = given.message or "whoever was asked said no"
    return refused(
        Denied(
            words,
            hint="choose another way",
            operation=waits.operation,
            rule=waits.rule,
            source="answer to the interrupt",
            reason=words,
            retry=False,
            approval=waits.approval,
        )
    )
