"""One tool call: tried, approved by a person if needed, and run exactly once.

LangGraph runs a node from its start again whenever it is resumed. So the first try is a task of its own, whose outcome
is in the checkpoint. The try after the interrupt uses the approval, which carrel accepts once. And a command has the
same id on every try, so that a second try finds the command of the first.
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
    SandboxLost,
    Unauthorized,
)
from carrel.integrations.langgraph.approvals import InterruptAnswer, PendingApproval
from carrel.integrations.langgraph.workspace import Workspace, own_id
from carrel.integrations.text import one_line
from carrel.integrations.tool_results import refusal_text

Runtime = ToolRuntime[Any, Any]


class ToolReply(TypedDict):
    """The text of a tool for the model, and its artifact for programs."""

    text: str
    artifact: dict[str, object]
    error: bool


class FirstTry(TypedDict):
    """The outcome of the first try: a result, or the approval that is needed first."""

    id: str
    said: ToolReply | None
    waits: dict[str, object] | None


@dataclass(frozen=True)
class Attempt:
    """One try of a call. `id` is the same on every try."""

    id: str
    workspace: Workspace


Act = Callable[[Attempt, AsyncSandbox], Awaitable[ToolReply]]
"""Does the operation in a sandbox. If it is called again with the same id, it must not repeat the operation."""


@dataclass(frozen=True)
class GraphCall:
    """One operation that a run of a graph asks for."""

    workspace: Workspace
    thread_id: str | None
    name: str
    arguments: Mapping[str, object]
    summary: str
    act: Act = field(repr=False)

    @property
    def context_id(self) -> str:
        """The context it runs in."""
        return self.workspace.context(self.thread_id)

    async def run(self, id: str, approval: str | None = None) -> ToolReply:
        """Run the operation, with an approval if there is one. Errors that the model can act on become its reply."""
        box = await self.workspace.sandbox(self.context_id)
        try:
            return await self.act(Attempt(id, self.workspace), box if approval is None else box.with_approval(approval))
        except (ApprovalNeeded, Unauthorized):
            raise
        except SandboxLost as error:
            return refused(error)
        except PlatformError:
            raise
        except CarrelError as error:
            return refused(error)


def refused(error: CarrelError) -> ToolReply:
    """Describe an error for the model, with the same problem object as in every protocol."""
    return ToolReply(text=refusal_text(error), artifact=dict(error.problem()), error=True)


async def perform(
    runtime: Runtime,
    fixed: Workspace | None,
    tool: str,
    arguments: Mapping[str, object],
    summary: str,
    act: Act,
) -> ToolMessage:
    """Run the operation of a tool, and wait for a person if policy asks for one."""
    thread_id = (runtime.config.get("configurable") or {}).get("thread_id")
    call = graph_call(runtime.context, fixed, thread_id, tool, arguments, summary, act)
    said = await run_once(call)
    return ToolMessage(
        content=said["text"],
        artifact=said["artifact"],
        name=tool,
        tool_call_id=runtime.tool_call_id or "",
        status="error" if said["error"] else "success",
    )


def graph_call(
    context: object,
    fixed: Workspace | None,
    thread_id: object,
    name: str,
    arguments: Mapping[str, object],
    summary: str,
    act: Act,
) -> GraphCall:
    """Make a call in the workspace that the run names, or else in a fixed one."""
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


async def run_once(call: GraphCall) -> ToolReply:
    """Run a call exactly once, however often its node is run, and after a person's approval if it needs one."""
    outcome = await operation(call)
    if outcome["said"] is not None:
        return outcome["said"]
    return await _decided(call, outcome["id"], PendingApproval.model_validate(outcome["waits"]))


@task
async def operation(call: GraphCall) -> FirstTry:
    """Try for the first time. The outcome is in the checkpoint, so a node that is run again does not try again."""
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
    """Interrupt until the approval is decided; then run the operation, or explain why not."""
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
    """Send a decision to carrel if this process may decide. Return whether it is decided now, and else why not."""
    if not given.take() or workspace.approver is None or given.decision == "look":
        return False, None
    inbox = workspace.approver.approvals
    try:
        if given.decision == "approve":
            await inbox.approve(waits.approval, message=given.message)
        else:
            await inbox.deny(waits.approval, message=given.message)
    except Conflict:  # it was decided meanwhile, and that decision counts
        return given.decision == "approve", None
    except CarrelError as error:
        return False, str(error)
    return True, None


def _declined(waits: PendingApproval, given: InterruptAnswer) -> ToolReply:
    words = given.message or "the person who was asked denied it"
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
