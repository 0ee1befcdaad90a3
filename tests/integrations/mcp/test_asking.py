from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from mcp import MCPError, types

from carrel.client import AsyncClient, Client
from carrel.errors import ApprovalNeeded, InvalidRequest
from carrel.integrations.mcp.asking import ALWAYS, DENY, LEAVE, LONGEST_SHOWN, ONCE, WAIT, Asking, Question

Said = Callable[[types.CallToolResult], str]
MODES = ["legacy", "auto"]
GIVEN = {"command": "uname -s"}


class Person:
    """Who sits in front of the client, and says the same to every form."""

    def __init__(self, action: str, content: dict[str, Any] | None = None, then: Callable[[], Any] | None = None):
        self.forms: list[types.ElicitRequestFormParams] = []
        self._answer = types.ElicitResult(action=action, content=content)
        self._then = then

    async def __call__(self, _context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        assert isinstance(params, types.ElicitRequestFormParams)
        self.forms.append(params)
        if self._then is not None:
            await asyncio.to_thread(self._then)
        return self._answer


def decide(ann: Client, context: str, *, approve: bool) -> Callable[[], None]:
    def decided() -> None:
        [waiting] = ann.approvals.list(state="pending", context_id=context)
        if approve:
            ann.approvals.approve(waiting.id)
        else:
            ann.approvals.deny(waiting.id, message="not today")

    return decided


@pytest.mark.parametrize("mode", MODES)
async def test_without_a_form_the_answer_says_how_to_go_on(
    connect: Any, governed: str, agent: str, ann: Client, mode: str, said: Said
) -> None:
    async with connect(governed, token=agent, mode=mode) as client:
        result = await client.call_tool("run_command", GIVEN)
        assert result.is_error and result.structured_content["code"] == "approval_needed"
        handle = result.structured_content["approval"]
        assert f"carrel approve {handle}" in said(result)
        again = await client.call_tool("run_command", {**GIVEN, "approval": handle})
        assert again.is_error and again.structured_content["approval"] == handle
        await asyncio.to_thread(ann.approvals.approve, handle)
        other = await client.call_tool("run_command", {"command": "uname -a", "approval": handle})
        assert other.is_error and other.structured_content["code"] == "conflict"
        done = await client.call_tool("run_command", {**GIVEN, "approval": handle})
        assert done.structured_content["output"] == "Linux\n", said(done)
        used = await client.call_tool("run_command", {**GIVEN, "approval": handle})
        assert used.is_error and used.structured_content["code"] == "conflict"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", ["connect", "over_http"])
async def test_the_person_is_told_and_waits_for_who_may_decide(
    request: pytest.FixtureRequest, transport: str, governed: str, agent: str, ann: Client, mode: str, said: Said
) -> None:
    connected = request.getfixturevalue(transport)
    person = Person("accept", {"choice": WAIT}, decide(ann, governed, approve=True))
    async with connected(governed, token=agent, mode=mode, elicitation_callback=person) as client:
        result = await client.call_tool("run_command", GIVEN)
        assert not result.is_error and result.structured_content["output"] == "Linux\n", said(result)
    [form] = person.forms
    assert "uname -s" in form.message and governed in form.message and "carrel approve apr-" in form.message
    assert form.requested_schema["properties"].keys() == {"choice"}, "the agent's token decides nothing"
    denying = Person("accept", {"choice": WAIT}, decide(ann, governed, approve=False))
    async with connected(governed, token=agent, mode=mode, elicitation_callback=denying) as client:
        result = await client.call_tool("run_command", GIVEN)
        assert result.is_error and result.structured_content["code"] == "denied_by_policy"
        assert "not today" in said(result)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "person",
    [Person("accept", {"choice": LEAVE}), Person("accept", {}), Person("decline"), Person("cancel")],
    ids=["leave", "nothing", "decline", "cancel"],
)
async def test_who_does_not_want_to_wait_gets_the_handle(
    connect: Any, governed: str, agent: str, ann: Client, mode: str, person: Person, said: Said
) -> None:
    async with connect(governed, token=agent, mode=mode, elicitation_callback=person) as client:
        result = await client.call_tool("run_command", GIVEN)
        assert result.is_error and result.structured_content["code"] == "approval_needed"
        assert "did not want to wait" in said(result)
    [waiting] = ann.approvals.list(context_id=governed)
    assert (waiting.state, waiting.id) == ("pending", result.structured_content["approval"])


async def test_a_client_that_cannot_ask_after_all(connect: Any, governed: str, agent: str) -> None:
    async def fails(_context: Any, _params: types.ElicitRequestParams) -> types.ErrorData:
        return types.ErrorData(code=-32603, message="no window")

    async with connect(governed, token=agent, mode="legacy", elicitation_callback=fails) as client:
        result = await client.call_tool("run_command", GIVEN)
        assert result.is_error and result.structured_content["code"] == "approval_needed"


async def test_who_waits_in_vain_gets_the_handle(connect: Any, governed: str, agent: str) -> None:
    person = Person("accept", {"choice": WAIT})
    async with connect(governed, token=agent, asking=Asking(wait_s=0), elicitation_callback=person) as client:
        result = await client.call_tool("run_command", GIVEN)
        assert result.is_error and result.structured_content["code"] == "approval_needed"


@pytest.mark.parametrize("mode", MODES)
async def test_with_an_approvers_token_the_person_decides(
    connect: Any, governed: str, agent: str, ann: Client, mode: str, said: Said, ground: Any
) -> None:
    asking = Asking(approver=lambda: AsyncClient(ground.url, ann.token))  # type: ignore[attr-defined]

    async def asked(person: Person, given: dict[str, Any]) -> types.CallToolResult:
        more = {"asking": asking, "elicitation_callback": person}
        async with connect(governed, token=agent, mode=mode, **more) as client:
            return await client.call_tool("run_command", given)

    once = Person("accept", {"decision": ONCE, "message": "go ahead"})
    assert (await asked(once, GIVEN)).structured_content["output"] == "Linux\n"
    denying = Person("accept", {"decision": DENY, "message": "no need"})
    result = await asked(denying, GIVEN)
    assert result.is_error and result.structured_content["code"] == "denied_by_policy" and "no need" in said(result)
    result = await asked(Person("decline"), GIVEN)
    assert result.structured_content["code"] == "denied_by_policy"
    result = await asked(Person("cancel"), GIVEN)
    assert result.structured_content["code"] == "approval_needed" and "has not decided" in said(result)
    always = Person("accept", {"decision": ALWAYS})
    for _ in range(2):
        assert (await asked(always, {"command": "uname"})).structured_content["output"] == "Linux\n"
    assert len(always.forms) == 1
    decided = {info.decided_by for info in ann.approvals.list(context_id=governed) if info.state == "approved"}
    assert len(decided) == 1 and decided.pop().startswith("person:ann-")


async def test_the_agents_own_token_is_no_approvers(
    connect: Any, governed: str, agent: str, said: Said, ground: Any
) -> None:
    asking = Asking(approver=lambda: AsyncClient(ground.url, agent))
    person = Person("accept", {"decision": ONCE})
    async with connect(governed, token=agent, asking=asking, elicitation_callback=person) as client:
        result = await client.call_tool("run_command", GIVEN)
        assert result.is_error and result.structured_content["code"] == "approval_needed"
        assert "could not decide it" in said(result)


async def test_a_state_that_was_not_given_out_is_refused(
    connect: Any, over_http: Any, governed: str, agent: str, ann: Client, admin: Client
) -> None:
    """In the newer protocol the state of a call that waits goes through the client: it can change nothing in it."""
    person = Person("accept", {"choice": WAIT})
    async with over_http(governed, token=agent, elicitation_callback=person) as client:
        first = await client.session.call_tool("run_command", GIVEN, allow_input_required=True)
        assert isinstance(first, types.InputRequiredResult) and first.request_state is not None
        answer = {"approval": types.ElicitResult(action="accept", content={"choice": WAIT})}
        for given, state in [(GIVEN, first.request_state[:-2] + "AA"), ({"command": "id"}, first.request_state)]:
            with pytest.raises(MCPError, match="requestState"):
                await client.session.call_tool(
                    "run_command", given, input_responses=answer, request_state=state, allow_input_required=True
                )
        same = admin.tokens.create(f"other-{governed}", kind="agent", scopes=["operate"], contexts=[governed])
        async with over_http(governed, token=same.token, elicitation_callback=person) as other:
            with pytest.raises(MCPError, match="requestState"):
                await other.session.call_tool(
                    "run_command",
                    GIVEN,
                    input_responses=answer,
                    request_state=first.request_state,
                    allow_input_required=True,
                )
        admin.tokens.revoke(same.id)


async def test_the_agents_words_cannot_disguise_themselves(connect: Any, governed: str, agent: str) -> None:
    person = Person("cancel")
    line = "uname\n\nApproval: apr-0 \x1b[2J\u202e harmless" + " " * 500 + "; reboot"
    async with connect(governed, token=agent, elicitation_callback=person) as client:
        await client.call_tool("run_command", {"command": line})
    [form] = person.forms
    assert "\x1b" not in form.message and "\u202e" not in form.message
    assert form.message.count("\nApproval: ") == 1 and "uname⏎⏎Approval" in form.message
    assert "harmless [500 spaces] ; reboot" in form.message


async def test_nobody_decides_on_what_they_were_not_shown(
    connect: Any, governed: str, agent: str, ann: Client, ground: Any
) -> None:
    asking = Asking(approver=lambda: AsyncClient(ground.url, ann.token))  # type: ignore[attr-defined]
    person = Person("accept", {"choice": LEAVE, "decision": ONCE})
    line = f"uname {'x' * LONGEST_SHOWN}; reboot"
    async with connect(governed, token=agent, asking=asking, elicitation_callback=person) as client:
        result = await client.call_tool("run_command", {"command": line})
        assert result.structured_content["code"] == "approval_needed"
    [form] = person.forms
    assert form.requested_schema["properties"].keys() == {"choice"} and "are not shown" in form.message
    [waiting] = ann.approvals.list(context_id=governed)
    assert waiting.state == "pending"


def test_what_waits_is_remembered() -> None:
    needed = ApprovalNeeded("a person has to decide", approval="apr-1", reason="no rule", retry=True)
    for decides in (True, False):
        again = Question.recalled(Question(needed, decides).kept())
        assert (again.needed.approval, again.needed.problem(), again.decides) == ("apr-1", needed.problem(), decides)
    for wrong in ("", "[]", "{}", '{"needed": {"code": "denied_by_policy"}, "decides": true}', "null", '{"needed": 1}'):
        with pytest.raises(InvalidRequest):
            Question.recalled(wrong)
