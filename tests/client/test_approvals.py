from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator

import pytest
from tests.support.governed import POLICY

from carrel import AsyncClient, Client, Sandbox
from carrel.errors import ApprovalNeeded, Conflict, Denied, InvalidRequest, NotFound
from carrel.models import ApprovalInfo

As = Callable[..., Client]


@pytest.fixture
def known(client: Client) -> Iterator[As]:
    """Makes a token and gives a client that shows it."""
    made: list[Client] = []

    def make(name: str, kind: str, *scopes: str) -> Client:
        made.append(Client(token=client.tokens.create(name, kind=kind, scopes=scopes).token))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def context(client: Client) -> Iterator[str]:
    name = f"governed-{uuid.uuid4().hex[:12]}"
    client.policy(name).put(settings=POLICY)
    yield name
    client.attach(client.find(name)).terminate(delete_files=True)


def asked(box: Sandbox, command: str) -> str:
    with pytest.raises(ApprovalNeeded) as caught:
        box.commands.run(command)
    assert caught.value.approval is not None and caught.value.status == 403
    return caught.value.approval


def test_asked_approved_and_run_once(known: As, context: str) -> None:
    agent, ann = known("coder", "agent", "operate"), known("ann", "person", "approve")
    box = agent.sandbox(context, trust="high")
    handle = asked(box, "id")
    [waiting] = ann.approvals.list(state="pending", context_id=context)
    assert (waiting.id, waiting.requested_by) == (handle, "agent:coder")
    with pytest.raises(Denied):
        agent.approvals.approve(handle)
    with pytest.raises(ApprovalNeeded):
        box.with_approval(handle).commands.run("id")
    assert ann.approvals.approve(handle, message="fine").state == "approved"
    decided = agent.approvals.get(handle)
    assert (decided.message, decided.decided_by) == ("fine", "person:ann")
    view = box.with_approval(decided)
    assert view.commands.run("id").ok and (view.id, view.context_id) == (box.id, box.context_id)
    with pytest.raises(Conflict, match="used already"):
        view.commands.run("id")
    with pytest.raises(NotFound):
        box.with_approval("apr-0").commands.run("uname")
    asked(box, "id")
    refused = asked(box, "uname")
    ann.approvals.deny(refused, message="why?")
    with pytest.raises(Denied, match="why"):
        box.with_approval(refused).commands.run("uname")


def test_waiting_and_deciding_as_it_comes(known: As, context: str) -> None:
    agent, ann = known("coder", "agent", "operate"), known("ann", "person", "approve")
    box = agent.sandbox(context, trust="high")
    seen: list[ApprovalInfo] = []

    def decide() -> None:
        for info in ann.approvals.watch():
            if info.context_id == context:
                seen.append(info)
                if info.state == "pending":
                    ann.approvals.approve(info.id, rule="shell(touch:*)" if info.operation == "run_command" else None)
                if len(seen) == 4:
                    return

    deciding = threading.Thread(target=decide)
    deciding.start()
    try:
        assert box.waiting(60).commands.run("touch a").ok
        assert box.commands.run("touch b").ok, "the rule holds from now on"
        assert box.waiting(60).commands.start("cat a").wait().ok
    finally:
        deciding.join(60)
    assert [info.state for info in seen] == ["pending", "approved"] * 2
    with pytest.raises(ApprovalNeeded):
        box.waiting(0.05).commands.run("id")
    with pytest.raises(InvalidRequest):
        box.waiting(601)
    with pytest.raises(InvalidRequest):
        box.with_approval("a\nb")


def test_files_terminals_and_filespaces_ask_too(client: Client, known: As, context: str) -> None:
    agent, ann = known("coder", "agent", "operate"), known("ann", "person", "approve")
    client.policy(context).put(settings={"permissions": {"allow": ["shell(echo:*)"]}})
    box, filespace = agent.sandbox(context, trust="high"), agent.filespace(context)
    for work in (
        lambda box, _: box.files.write("a", b"x"),
        lambda box, _: box.files.read("a"),
        lambda _, filespace: filespace.write("f", b"x"),
        lambda _, filespace: filespace.read("f"),
        lambda box, _: box.terminal(command="cat a").close(),
    ):
        with pytest.raises(ApprovalNeeded) as caught:
            work(box, filespace)
        handle = caught.value.approval or ""
        ann.approvals.approve(handle)
        work(box.with_approval(handle), filespace.with_approval(handle))
    with pytest.raises(ApprovalNeeded):
        filespace.waiting(0.05).read("g")
    with pytest.raises(ApprovalNeeded):
        box.waiting(0.05).terminal(command="cat b")


async def test_several_at_once_asynchronously(async_client: AsyncClient, known: As, context: str) -> None:
    token = (await async_client.tokens.create("coder", kind="agent", scopes=["operate"])).token
    async with AsyncClient(token=token) as agent:
        box = await agent.sandbox(context, trust="high")
        handles = []
        for command in ("id", "uname"):
            with pytest.raises(ApprovalNeeded) as caught:
                await box.commands.run(command)
            handles.append(caught.value.approval or "")
        result = await async_client.approvals.decide_many([*handles, "apr-0"], approve=True, scope="context")
        assert {info.id for info in result.decided} == set(handles) and list(result.refused) == ["apr-0"]
        assert (await box.commands.run("id")).ok
        listed = [info async for info in async_client.approvals.list(context_id=context)]
        assert [info.scope for info in listed] == ["context", "context"]
        with pytest.raises(ApprovalNeeded):
            await box.commands.run("hostname")
        async for info in async_client.approvals.watch():
            assert info.state == "pending"
            break
