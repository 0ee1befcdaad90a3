from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.support.calls import call, caller_named
from tests.support.sandboxes import until

from carrel.control.governance.approvals import Approvals, Redact, digest, summary
from carrel.control.governance.decisions import ApprovalDecisions
from carrel.control.operations.admission import Admission
from carrel.control.operations.call import Call, Traffic
from carrel.control.operations.caller import Caller, OwnWork
from carrel.errors import ApprovalNeeded, Conflict, Denied, InvalidRequest, NotFound, PlatformError
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import ApprovalBatch, ApprovalDecision, ApprovalInfo, ApprovalScope, ApprovalState, EditRequest
from carrel.models.operations import EDIT_FILE
from carrel.policy.verdict import Verdict
from carrel.store import Database
from carrel.store.approvals import ApprovalRecord, ApprovalStore

ASK = Verdict("ask", reason="no rule covers 'git push'")
PUSH = call("shell", "run_command", {"command": "git  push\norigin"}, "agent:coder", "sbx-1", "c")
PERSON = Identity("person:ann", OwnerKind.PERSON, frozenset({Scope.APPROVE}))
AGENT = Identity("agent:coder", OwnerKind.AGENT, frozenset({Scope.OPERATE}))
CODER = Caller(AGENT)
BY_RULE = ApprovalDecision(approve=True, scope=ApprovalScope.RULE, rule="shell(git push:*)")
YES, NO = ApprovalDecision(approve=True), ApprovalDecision(approve=False, message="use a branch")


def those_who_wait(approvals: Inbox) -> list[str]:
    """Grows with each who has come to wait: a person who decides sooner decides for the others alone."""
    there: list[str] = []
    wait = approvals._wait

    async def counted(record: ApprovalRecord, who: Caller, until: float) -> ApprovalRecord:
        there.append(record.id)
        return await wait(record, who, until)

    approvals._wait = counted  # type: ignore[method-assign]
    return there


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Kept:
    """Rules, as a server keeps them."""

    def __init__(self, verdict: Literal["allow", "deny", "ask"] = "ask") -> None:
        self.added: list[tuple[str, str, str]] = []
        self.verdict = verdict

    async def decide(self, operation: Call) -> Verdict:
        return Verdict(self.verdict)

    async def check_rule(self, context_id: str, rule: str) -> None:
        if not rule.startswith("shell("):
            raise InvalidRequest("no rule", field="rule")

    async def add_rule(self, context_id: str, rule: str, by: str) -> None:
        self.added.append((context_id, rule, by))


class Open(Admission):
    """Admission that lets everything in."""

    def __init__(self) -> None:
        pass

    @asynccontextmanager
    async def admit(self, call: Call) -> AsyncIterator[Traffic]:
        yield Traffic()


async def plain(_context: str | None, arguments: Mapping[str, object]) -> dict[str, object]:
    return dict(arguments)


class Inbox(Approvals):
    """Approvals and the decisions on them, as a server has both."""

    def __init__(
        self,
        store: ApprovalStore,
        clock: Clock,
        rules: Kept | None = None,
        redact: Redact = plain,
        on_created: Callable[[ApprovalInfo], None] | None = None,
        **named: Any,
    ):
        self.kept = rules or Kept()
        super().__init__(store, self.kept, redact, on_created=on_created, ttl_s=60, clock=clock, **named)
        decisions = ApprovalDecisions(self, Open(), self.kept, redact)
        self.decisions = decisions

    async def decide(self, approval_id: str, decision: ApprovalDecision, by: Identity) -> ApprovalInfo:
        return await self.decisions.decide(Caller(by), approval_id, decision)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ApprovalStore]:
    database = await Database.open(str(tmp_path / "db"))
    yield ApprovalStore(database)
    await database.close()


@pytest.fixture
def approvals(store: ApprovalStore, clock: Clock) -> Inbox:
    return Inbox(store, clock)


async def _use_now(approvals: Inbox, operation: Call, verdict: Verdict, caller: Caller = CODER) -> str:
    """Run an operation that takes no time; the approval that it ran under. It is asked for by whoever the call is by,
    else by the caller, who also says how long to wait.
    """
    who = caller
    if not isinstance(operation.caller, OwnWork):
        who = replace(caller, identity=operation.caller.identity)
    leave = await approvals.permit(replace(operation, caller=who), verdict)
    await approvals.ended(leave, used=True)
    return leave.approval


async def _ask(approvals: Inbox, operation: Call = PUSH, caller: Caller = CODER) -> str:
    with pytest.raises(ApprovalNeeded) as caught:
        await _use_now(approvals, operation, ASK, caller)
    assert caught.value.approval is not None
    return caught.value.approval


async def _with(approvals: Inbox, handle: str, operation: Call = PUSH) -> str:
    return await _use_now(approvals, operation, ASK, Caller(AGENT, approval=handle))


async def test_the_same_request_waits_once_and_runs_once(store: ApprovalStore, clock: Clock) -> None:
    created: list[ApprovalInfo] = []
    approvals = Inbox(store, clock, on_created=created.append)
    handle = await _ask(approvals)
    assert await _ask(approvals) == handle
    [info] = created
    assert (info.summary, info.requested_by, info.reason) == ("git push ⏎ origin", "agent:coder", ASK.reason)
    with pytest.raises(ApprovalNeeded):
        await _with(approvals, handle)
    decided = await approvals.decide(handle, YES, PERSON)
    assert (decided.state, decided.decided_by, decided.scope) == ("approved", "person:ann", "once")
    results = await asyncio.gather(*(_with(approvals, handle) for _ in range(10)), return_exceptions=True)
    assert [result for result in results if isinstance(result, str)] == [handle]
    assert all(isinstance(result, Conflict | str) for result in results)
    assert await _ask(approvals) != handle, "the next time a person is asked again"


async def test_a_handle_is_for_exactly_what_was_asked(approvals: Inbox) -> None:
    handle = await _ask(approvals)
    await approvals.decide(handle, YES, PERSON)
    for other in (
        call("shell", "run_command", {"command": "git push --force"}, "agent:coder", "sbx-1", "c"),
        call("shell", "run_command", PUSH.arguments, "agent:coder", "sbx-1", "d"),
        call("file", "run_command", PUSH.arguments, "agent:coder", "sbx-1", "c"),
    ):
        with pytest.raises(Conflict, match="another operation"):
            await _with(approvals, handle, other)
    assert await _with(approvals, handle) == handle
    with pytest.raises(NotFound):
        await _with(approvals, "apr-none")


@pytest.mark.parametrize("kind", ["shell", "mcp"])
async def test_approval_belongs_to_the_one_who_asked(approvals: Inbox, kind: Literal["shell", "mcp"]) -> None:
    operation = call(kind, "run_command", PUSH.arguments, "", "sbx-1", "c")
    handle = await _ask(approvals, operation)
    other = Identity("agent:other", OwnerKind.AGENT, frozenset({Scope.OPERATE}))
    own = await _ask(approvals, operation, Caller(other))
    assert own != handle, "each of them has to be asked for"
    await approvals.decide(handle, YES, PERSON)
    assert await _ask(approvals, operation, Caller(other)) == own
    with pytest.raises(Conflict, match="another caller"):
        await _use_now(approvals, operation, ASK, Caller(other, approval=handle))
    assert await _with(approvals, handle, operation) == handle, "it was not used up"


async def test_approval_for_a_context_is_for_everybody_there(approvals: Inbox) -> None:
    operation = call("shell", "run_command", PUSH.arguments, "", "sbx-1", "c")
    handle = await _ask(approvals, operation)
    await approvals.decide(handle, ApprovalDecision(approve=True, scope=ApprovalScope.CONTEXT), PERSON)
    caller = Caller(Identity("agent:other", OwnerKind.AGENT, frozenset({Scope.OPERATE})))
    assert await _use_now(approvals, operation, ASK, caller) == handle


async def test_a_denial_reaches_the_agent_with_the_persons_words(approvals: Inbox) -> None:
    handle = await _ask(approvals)
    await approvals.decide(handle, NO, PERSON)
    with pytest.raises(Denied, match="use a branch") as caught:
        await _with(approvals, handle)
    assert caught.value.extra["retry"] is False
    assert caught.value.extra["source"] == "decided by person:ann"
    with pytest.raises(Conflict, match="denied already"):
        await approvals.decide(handle, YES, PERSON)


async def test_what_nobody_decides_expires(approvals: Inbox, clock: Clock) -> None:
    handle = await _ask(approvals)
    clock.now += 61
    assert (await approvals.get(handle)).state is ApprovalState.EXPIRED
    with pytest.raises(Denied, match="not decided"):
        await _with(approvals, handle)
    with pytest.raises(Conflict, match="expired already"):
        await approvals.decide(handle, YES, PERSON)
    assert await _ask(approvals) != handle


async def test_for_the_context_it_need_not_be_asked_again(approvals: Inbox) -> None:
    handle = await _ask(approvals)
    await approvals.decide(handle, ApprovalDecision(approve=True, scope=ApprovalScope.CONTEXT), PERSON)
    for _ in range(3):
        assert await _use_now(approvals, PUSH, ASK) == handle
    await _ask(approvals, call("shell", "run_command", PUSH.arguments, "agent:coder", "sbx-2", "other"))


async def test_as_a_rule(approvals: Inbox) -> None:
    handle = await _ask(approvals)
    wanted = ApprovalDecision(approve=True, scope=ApprovalScope.RULE, rule="shell(git push:*)")
    with pytest.raises(InvalidRequest, match="needs a rule"):
        await approvals.decide(handle, wanted.model_copy(update={"rule": None}), PERSON)
    kept = approvals.kept
    with pytest.raises(InvalidRequest, match="no rule"):
        await approvals.decide(handle, wanted.model_copy(update={"rule": "nonsense"}), PERSON)
    assert (await approvals.get(handle)).state is ApprovalState.PENDING
    assert (await approvals.decide(handle, wanted, PERSON)).rule == "shell(git push:*)"
    assert kept.added == [("c", "shell(git push:*)", "person:ann")]
    fleeting = call("shell", "run_command", PUSH.arguments, "agent:coder", "eph-1", None)
    with pytest.raises(InvalidRequest, match="no context"):
        await approvals.decide(await _ask(approvals, fleeting), wanted, PERSON)


class Broken(Kept):
    """Rules of a server whose database is out of reach."""

    async def add_rule(self, context_id: str, rule: str, by: str) -> None:
        raise PlatformError("the database is out of reach")


async def test_who_gives_a_rule_that_cannot_be_kept_is_told_what_holds(store: ApprovalStore, clock: Clock) -> None:
    approvals = Inbox(store, clock, Broken())
    handle = await _ask(approvals)
    wanted = ApprovalDecision(approve=True, scope=ApprovalScope.RULE, rule="shell(git push:*)")
    with pytest.raises(PlatformError) as caught:
        await approvals.decide(handle, wanted, PERSON)
    assert "approved, once" in (caught.value.hint or "")
    assert await _with(approvals, handle) == handle
    with pytest.raises(Conflict, match="used already"):
        await _with(approvals, handle)


async def test_a_rule_is_not_added_by_who_decides_too_late(approvals: Inbox) -> None:
    kept = approvals.kept
    handle = await _ask(approvals)
    await approvals.decide(handle, NO, PERSON)
    with pytest.raises(Conflict):
        await approvals.decide(
            handle, ApprovalDecision(approve=True, scope=ApprovalScope.RULE, rule="shell(x:*)"), PERSON
        )
    assert kept.added == []


async def test_an_approval_that_nobody_uses_does_not_wait_for_ever(approvals: Inbox, clock: Clock) -> None:
    handle = await _ask(approvals)
    await approvals.decide(handle, YES, PERSON)
    clock.now += 61
    with pytest.raises(Denied, match="not used, in time"):
        await _with(approvals, handle)


async def test_nobody_approves_their_own_request_and_no_agent_approves(approvals: Inbox) -> None:
    handle = await _ask(approvals)
    with pytest.raises(Denied):
        await approvals.decide(handle, YES, AGENT)
    mine = call("shell", "run_command", {"command": "x"}, PERSON.subject, "sbx-1", "c")
    with pytest.raises(Denied, match="own request"):
        await approvals.decide(await _ask(approvals, mine), YES, PERSON)
    assert (await approvals.get(handle)).state is ApprovalState.PENDING


@pytest.mark.parametrize("decision", [YES, NO])
async def test_a_caller_may_wait(approvals: Inbox, decision: ApprovalDecision) -> None:
    caller = Caller(AGENT, wait_s=30)
    there = those_who_wait(approvals)
    waiting = [
        asyncio.ensure_future(_use_now(approvals, PUSH, ASK, caller)) for _ in range(1 if decision.approve else 2)
    ]
    async for info in approvals.watch():
        assert info.state is ApprovalState.PENDING
        await until(lambda: len(there) == len(waiting))
        await approvals.decide(info.id, decision, PERSON)
        break
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, str if decision.approve else Denied) for result in results)


async def test_of_two_who_wait_for_the_same_each_needs_an_approval(approvals: Inbox) -> None:
    """One runs under what was approved once; the other asks again, and goes on waiting."""
    caller = Caller(AGENT, wait_s=30)
    waiting = {asyncio.ensure_future(_use_now(approvals, PUSH, ASK, caller)) for _ in range(2)}
    handles = []
    watch = approvals.watch()
    async for info in watch:
        if info.state is not ApprovalState.PENDING:
            continue
        handles.append(info.id)
        assert len(waiting) == 3 - len(handles), "nobody runs under an approval of another's"
        await approvals.decide(info.id, YES, PERSON)
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [info.id]
        if not waiting:
            break
    await watch.aclose()  # type: ignore[attr-defined]
    assert len(set(handles)) == 2


async def test_a_rule_that_covers_it_is_for_all_who_wait(approvals: Inbox) -> None:
    approvals.kept.verdict = "allow"
    caller = Caller(AGENT, wait_s=30)
    there = those_who_wait(approvals)
    waiting = [asyncio.ensure_future(_use_now(approvals, PUSH, ASK, caller)) for _ in range(3)]
    watch = approvals.watch()
    handle = (await anext(watch)).id
    await until(lambda: len(there) == 3)
    await approvals.decide(handle, BY_RULE, PERSON)
    assert await asyncio.gather(*waiting) == [handle] * 3
    await watch.aclose()  # type: ignore[attr-defined]


async def test_who_waits_in_vain_is_told_of_an_approval_of_its_own(approvals: Inbox) -> None:
    """Another ran under what both waited for, and the rule that was given does not cover it."""
    gone = asyncio.Event()
    caller = Caller(AGENT, wait_s=30, gone=gone.is_set)
    waiting = [asyncio.ensure_future(_use_now(approvals, PUSH, ASK, caller)) for _ in range(2)]
    watch = approvals.watch()
    first = (await anext(watch)).id
    await approvals.decide(first, BY_RULE, PERSON)
    pending = [info.id async for info in _until_second(watch, first)]
    gone.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    [needed] = [result for result in results if isinstance(result, ApprovalNeeded)]
    assert first in results and [needed.approval] == pending


async def _until_second(watch: AsyncIterator[ApprovalInfo], first: str) -> AsyncIterator[ApprovalInfo]:
    """What comes to wait after the first."""
    async for info in watch:
        if info.id != first:
            yield info
            break
    await watch.aclose()  # type: ignore[attr-defined]


async def test_many_who_ask_for_the_same_at_once_wait_for_one_decision(approvals: Inbox) -> None:
    results = await asyncio.gather(*(_use_now(approvals, PUSH, ASK) for _ in range(10)), return_exceptions=True)
    assert len({result.approval for result in results if isinstance(result, ApprovalNeeded)}) == 1
    assert len((await approvals.page()).items) == 1


async def test_waiting_ends(approvals: Inbox) -> None:
    with pytest.raises(ApprovalNeeded):
        await _use_now(approvals, PUSH, ASK, Caller(AGENT, wait_s=0.05))


async def test_another_server_sees_and_decides_what_waits(approvals: Inbox, store: ApprovalStore, clock: Clock) -> None:
    other = Inbox(store, clock)
    handle = await _ask(approvals)
    [listed] = (await other.page(states=[ApprovalState.PENDING])).items
    assert listed.id == handle
    await other.decide(handle, YES, PERSON)
    assert await _with(approvals, handle) == handle


async def test_many_are_decided_at_once(approvals: Inbox) -> None:
    handles = [
        await _ask(approvals, call("shell", "run_command", {"command": str(n)}, "agent:coder", "s", "c"))
        for n in range(5)
    ]
    await approvals.decide(handles[0], NO, PERSON)
    result = await approvals.decisions.decide_all(
        Caller(PERSON), ApprovalBatch(ids=[*handles, handles[1], "absent"], decision=YES)
    )
    assert [info.id for info in result.decided] == handles[1:]
    assert set(result.refused) == {handles[0], "absent"}
    page = await approvals.page(limit=2)
    assert len(page.items) == 2 and page.next is not None
    assert len((await approvals.page(limit=10, cursor=page.next)).items) == 3


async def test_watching_shows_what_comes_and_what_becomes_of_it(approvals: Inbox) -> None:
    watch = approvals.watch()
    coming = asyncio.ensure_future(anext(watch))
    handle = await _ask(approvals)
    assert (await coming).id == handle
    await approvals.decide(handle, NO, PERSON)
    assert (await anext(watch)).state is ApprovalState.DENIED
    await watch.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["shell", "network"])
async def test_one_who_asks_from_another_sandbox_each_time(approvals: Inbox, kind: str) -> None:
    """Calls without a context: what was approved in one sandbox is used in the next, once, and by nobody else."""
    push = call(kind, "run_command", PUSH.arguments, "agent:coder")
    asked = [replace(push, sandbox_id=f"eph-{number}", asks_as="a") for number in range(3)]
    handle = await _ask(approvals, asked[0])
    assert await _ask(approvals, asked[1]) == handle, "it is the same question"
    assert await _ask(approvals, replace(asked[1], asks_as="b")) != handle
    assert await _ask(approvals, replace(asked[1], asks_as="")) != handle
    await approvals.decide(handle, YES, PERSON)
    if kind == "network":  # a connection shows no handle
        assert await _use_now(approvals, asked[2], ASK) == handle
        assert await _ask(approvals, asked[2]) != handle
        return
    with pytest.raises(Conflict, match="another operation"):
        await _with(approvals, handle, replace(asked[1], asks_as="b"))
    assert await _with(approvals, handle, asked[2]) == handle
    with pytest.raises(Conflict, match="used already"):
        await _with(approvals, handle, asked[1])


def test_names_and_lines() -> None:
    assert digest(PUSH) == digest(PUSH)
    assert summary(call("file", "write", {"path": "/etc/x"}, "", "s", None)) == "write /etc/x"
    changed = EDIT_FILE.arguments(EditRequest(path="a.py", old="one", new="two"))
    assert summary(call("file", "edit", changed, "", "s", None)) == "edit a.py two one"
    assert summary(call("shell", "run_command", {"command": ["a", "b c"]}, "", "s", None)) == "a 'b c'"


async def test_a_context_does_not_fill_the_inbox(approvals: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carrel.control.governance.approvals.MOST_WAITING", 3)
    asked = [replace(PUSH, arguments={"command": f"touch {number}"}) for number in range(4)]
    handles = [await _ask(approvals, each) for each in asked[:3]]
    with pytest.raises(Denied, match="3 requests wait") as caught:
        await _use_now(approvals, asked[3], ASK)
    assert not isinstance(caught.value, ApprovalNeeded)
    assert caught.value.extra["retry"] is True
    assert await _ask(approvals, asked[0]) == handles[0], "what waits already waits on"
    await _ask(approvals, replace(asked[3], context_id="other"))
    await approvals.decide(handles[0], NO, PERSON)
    await _ask(approvals, asked[3])
    for each in asked[:3]:
        await _ask(approvals, replace(each, context_id=None))
    with pytest.raises(Denied, match="3 requests wait"):
        await _use_now(approvals, replace(asked[3], context_id=None), ASK)
    await _ask(approvals, replace(asked[3], context_id=None, caller=caller_named("agent:other")))


async def test_what_was_settled_long_ago_is_removed(store: ApprovalStore, clock: Clock) -> None:
    approvals = Inbox(store, clock, keep_days=1)
    lasting, once, late = [
        await _ask(approvals, replace(PUSH, arguments={"command": f"touch {number}"})) for number in range(3)
    ]
    await approvals.decide(lasting, ApprovalDecision(approve=True, scope=ApprovalScope.CONTEXT), PERSON)
    await approvals.decide(once, YES, PERSON)
    clock.now += 86_400
    waits = await _ask(approvals)
    await approvals.prune()
    assert {info.id for info in (await approvals.page()).items} == {lasting, once, late, waits}
    clock.now += 61
    await approvals.prune()
    assert {info.id: info.state for info in (await approvals.page()).items} == {
        lasting: ApprovalState.APPROVED,
        waits: ApprovalState.EXPIRED,
    }


async def test_who_goes_while_an_approval_is_taken_uses_nothing_up(store: ApprovalStore, clock: Clock) -> None:
    taken = asyncio.Event()

    class Late(ApprovalStore):
        """What it wrote is there before its answer."""

        async def use(self, approval_id: str, at: float, **named: Any) -> bool:
            await super().use(approval_id, at, **named)
            taken.set()
            return await asyncio.get_running_loop().create_future()

    handle = await _ask(Inbox(store, clock))
    approvals = Inbox(Late(store._database), clock, node="n")
    await approvals.decide(handle, YES, PERSON)
    going = asyncio.ensure_future(_with(approvals, handle))
    await taken.wait()
    assert (await approvals.get(handle)).used_at is not None
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going
    assert (await approvals.get(handle)).used_at is None and await store.runs("n") == []


async def test_who_asks_for_very_much_holds_nobody_up(store: ApprovalStore, clock: Clock) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(context: str | None, arguments: Mapping[str, object]) -> dict[str, object]:
        if context == PUSH.context_id:
            begun.set()
            await go_on.wait()
        return dict(arguments)

    approvals = Inbox(store, clock, redact=slow)
    long = [asyncio.ensure_future(_ask(approvals)) for _ in range(2)]
    await begun.wait()
    other = await _ask(approvals, replace(PUSH, context_id="other"))
    assert not any(each.done() for each in long)
    go_on.set()
    first, second = await asyncio.gather(*long)
    assert first == second != other, "those who ask for the same wait for the same"
