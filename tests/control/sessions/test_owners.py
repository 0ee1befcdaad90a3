from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.calls import ADMIN, caller_named
from tests.support.records import SESSION, Promising

from carrel.control.operations.caller import OWN_WORK, Caller, OwnWork
from carrel.control.sessions.attachments import LaunchPlan
from carrel.control.sessions.owners import WorkspaceOwner
from carrel.models import SandboxRequest
from carrel.store import SessionRecord

NEW = replace(SESSION, template="research", agent=None)
OF_CODER = replace(SESSION, agent="coder")
AGENT = caller_named("agent:other")


@pytest.mark.parametrize(
    ("caller", "previous", "owner"),
    [
        (AGENT, None, "other"),
        (AGENT, OF_CODER, "coder"),
        (ADMIN, OF_CODER, "coder"),
        (OWN_WORK, OF_CODER, "coder"),
        (AGENT, replace(OF_CODER, forgotten=True), "other"),
        (AGENT, replace(OF_CODER, agent=None), "other"),
        (ADMIN, None, "research"),
        (caller_named("person:ann"), None, "research"),
        (OWN_WORK, None, "research"),
    ],
)
async def test_a_workspace_belongs_to_the_agent_that_made_it(
    caller: Caller | OwnWork, previous: SessionRecord | None, owner: str
) -> None:
    plan = LaunchPlan(caller, SandboxRequest(), NEW, previous, Promising())
    planned = await WorkspaceOwner().plan(plan)
    assert planned == replace(plan, record=replace(NEW, agent=owner))
