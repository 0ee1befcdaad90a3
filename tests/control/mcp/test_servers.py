"""MCP servers of a context through the one door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.support.calls import ADMIN
from tests.support.mcp_ground import WAITING
from tests.support.mcp_hosted import GOOD, HOSTILE
from tests.support.sandboxes import until

from carrel.audit.records import chain_of
from carrel.audit.search import Filter
from carrel.config import Settings, load
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.errors import (
    ApprovalNeeded,
    Conflict,
    Denied,
    InvalidRequest,
    LimitExceeded,
    McpServerFailed,
    NotFound,
    NotRunning,
)
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import (
    MOST_MCP_SERVERS,
    ApprovalDecision,
    AuditRecord,
    CommandRequest,
    McpRequest,
    McpResult,
    McpServerRequest,
    PolicyDocuments,
    SandboxRequest,
    State,
    TerminateRequest,
)

SERVER = McpServerRequest(command=["python3", "good.py"], variables={"CONTEXT": "c"})
PERSON = Identity("person:ann", OwnerKind.PERSON, frozenset({Scope.APPROVE}))


@pytest.fixture
def settings(data_dir: str) -> Settings:
    return load({"data_dir": data_dir, "volumes": "directory", "max_sandboxes": 6}, environ={})


@pytest.fixture
async def box(plane: ControlPlane) -> AsyncIterator[str]:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.operations.write_file(ADMIN, "c", "good.py", GOOD.encode())
    yield "c"


async def call(
    plane: ControlPlane, tool: str, at: str = "c", caller: Caller = ADMIN, /, **arguments: object
) -> McpResult:
    return await plane.mcp.request(caller, at, "good", McpRequest(tool=tool, arguments=arguments))


async def records(plane: ControlPlane, context: str = "c", **wanted: str) -> list[AuditRecord]:
    await plane.audit.flush()
    page = await plane.audit.search(Filter(chain=chain_of(context), **wanted), limit=1000)
    return list(reversed(page.items))


async def test_what_a_server_elsewhere_was_told_to_stop_is_refused(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    assert (await call(plane, "count")).text == "1"
    await plane.mcp._store.enable("c", "good", enabled=False)  # as a server without the sandbox does
    plane.mcp._declarations._seen.clear()
    with pytest.raises(Conflict, match="stopped"):
        await call(plane, "count")
    await plane.mcp.start(ADMIN, box, "good")
    assert not (await call(plane, "count")).is_error


async def test_a_server_from_beginning_to_end(plane: ControlPlane, box: str) -> None:
    info = await plane.mcp.add(ADMIN, box, "good", SERVER)
    assert (info.state, info.tools, info.variables) == ("stopped", 9, ["CONTEXT"]), "asked in a sandbox of its own"
    first = await call(plane, "whoami")
    assert first.text.startswith("good c ") and not first.is_error
    assert (await call(plane, "whoami")).text == first.text, "one process"
    assert (await call(plane, "echo", text="hi")).structured_content == {"text": "hi"}
    failed = await call(plane, "fail")
    assert (failed.is_error, failed.text, failed.error) == (True, "it went wrong", None)
    unknown = await call(plane, "nothing")
    assert unknown.is_error and unknown.error is not None and unknown.error.code == -32602
    slow = await plane.mcp.request(ADMIN, box, "good", McpRequest(tool="hang", timeout=0.2))
    assert slow.timed_out and slow.is_error
    assert "listening" in (await plane.mcp.log(ADMIN, box, "good")).text
    assert [each.state for each in (await plane.mcp.list(ADMIN, box)).items] == ["running"]
    assert (await plane.mcp.stop(ADMIN, box, "good")).state == "stopped"
    with pytest.raises(Conflict):
        await call(plane, "whoami")
    assert (await plane.mcp.start(ADMIN, box, "good")).state == "running"
    assert (await call(plane, "whoami")).text != first.text
    changed = await plane.mcp.add(ADMIN, box, "good", SERVER.model_copy(update={"variables": {"CONTEXT": "d"}}))
    assert changed.generation != info.generation and changed.state == "stopped", "the one before has ended"
    assert (await call(plane, "whoami")).text.startswith("good d ")
    await plane.mcp.remove(ADMIN, box, "good")
    for act in (plane.mcp.get(ADMIN, box, "good"), plane.mcp.remove(ADMIN, box, "good"), call(plane, "whoami")):
        with pytest.raises(NotFound):
            await act
    assert (await plane.mcp.list(ADMIN, box)).items == []


async def test_what_dies_is_started_again_after_a_while(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    deaths = 0
    while True:  # each wait is twice as long: one is longer than the time until we ask again
        with pytest.raises(McpServerFailed, match=r"exit code 3|may start again") as failed:
            await call(plane, "die")
        if "may start again" in str(failed.value):
            break
        deaths += 1
    assert deaths >= 1
    info = await plane.mcp.get(ADMIN, box, "good")
    assert info.state in WAITING and info.reason is not None and info.starts == deaths
    assert "dying now" in (await plane.mcp.log(ADMIN, box, "good")).text
    while (await plane.mcp.get(ADMIN, box, "good")).state == "backing_off":
        await asyncio.sleep(0.05)
    assert (await call(plane, "count")).text == "1"


async def test_others_in_flight_when_it_dies_are_told(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    pid = (await call(plane, "whoami")).text.split()[-1]
    many = [asyncio.ensure_future(call(plane, "hang")) for _ in range(6)]
    [kept] = plane._mcp_links._kept.values()
    await until(lambda: kept.conversation._waiting == len(many))
    await plane.operations.run_command(ADMIN, box, CommandRequest(command=f"kill -9 {pid}"))
    found = await asyncio.gather(*many, return_exceptions=True)
    assert all(isinstance(each, McpServerFailed) for each in found), found


async def test_every_call_is_audited_once_without_secrets(plane: ControlPlane, box: str) -> None:
    await plane.secrets.put("c", "KEY", b"very-secret-value")
    declaration = SERVER.model_copy(update={"secret_variables": {"API_KEY": "KEY"}})
    await plane.mcp.add(ADMIN, box, "good", declaration)
    assert (await call(plane, "variable", name="API_KEY")).text == "[secret:KEY]"
    assert (await call(plane, "echo", text="very-secret-value")).text == "[secret:KEY]"
    await call(plane, "fail")
    found = await records(plane, kind="mcp")
    assert [each.name for each in found] == ["mcp_request"] * 3
    assert [(each.arguments or {})["tool"] for each in found] == ["variable", "echo", "fail"]
    assert {each.result for each in found} == {"ok"} and all(each.bytes_out for each in found)
    everything = "".join(each.model_dump_json() for each in await records(plane))
    assert "very-secret" not in everything and "[secret:KEY]" in everything
    starts = [each for each in await records(plane) if each.name == "start_mcp_server"]
    assert len(starts) == 1
    ran = await plane.operations.run_command(ADMIN, box, CommandRequest(command="cat /proc/*/cmdline | tr '\\0' ' '"))
    assert "very-secret" not in ran.stdout and "[secret" not in ran.stdout, "no argument has it"


async def test_a_secret_that_is_not_there_is_told(plane: ControlPlane, box: str) -> None:
    declaration = SERVER.model_copy(update={"secret_variables": {"API_KEY": "NOT_THERE"}})
    info = await plane.mcp.add(ADMIN, box, "good", declaration)
    assert info.discovery_error is not None
    with pytest.raises(McpServerFailed):
        await call(plane, "whoami")
    assert "the secret NOT_THERE cannot be used" in (await plane.mcp.log(ADMIN, box, "good")).text


async def test_rules_name_server_and_tool(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    rules = {"permissions": {"allow": ["mcp(good:echo)", "shell(python3:*)"], "deny": ["mcp(good:fail)"]}}
    await plane.policy_changes.put("c", PolicyDocuments(settings=rules, restart=True), "ann")
    assert (await call(plane, "echo", text="hi")).text == "hi"
    with pytest.raises(Denied) as denied:
        await call(plane, "fail")
    assert denied.value.rule == "mcp(good:fail)"
    caller = Caller(Identity("agent:a", OwnerKind.AGENT, frozenset({Scope.OPERATE})))
    with pytest.raises(ApprovalNeeded) as asked:
        await call(plane, "count", "c", caller)
    assert asked.value.approval is not None
    [waits] = [each for each in (await plane.approvals.page()).items if each.id == asked.value.approval]
    assert waits.kind == "mcp" and waits.summary == 'good:count {"arguments": {}}'
    await plane.decisions.decide(Caller(PERSON), asked.value.approval, ApprovalDecision(approve=True))
    assert (await call(plane, "count", "c", caller)).text == "2", (
        "who asks the same again needs no handle, and runs it once"
    )
    with pytest.raises(ApprovalNeeded):
        await call(plane, "count", "c", caller)
    with pytest.raises(ApprovalNeeded):
        await plane.mcp.read_resource(caller, "c", "good", "memo://one")
    expected = ["ok", "denied_by_policy", "approval_needed", "ok", "approval_needed", "approval_needed"]
    assert [each.result for each in await records(plane, kind="mcp")] == expected


async def test_a_command_that_policy_denies_is_neither_added_nor_started(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    rules = {"permissions": {"allow": ["mcp(good:*)"], "deny": ["shell(python3:*)"]}}
    await plane.policy_changes.put("c", PolicyDocuments(settings=rules), "ann")
    await plane.mcp.stop(ADMIN, box, "good")
    for act in (plane.mcp.add(ADMIN, box, "more", SERVER), plane.mcp.start(ADMIN, box, "good")):
        with pytest.raises(Denied):
            await act
    assert not (await plane.mcp.get(ADMIN, box, "good")).enabled
    install = {"permissions": {"allow": ["shell(python3:*)"], "deny": ["shell(pip:*)", "shell(npm:*)"]}}
    await plane.policy_changes.put("c", PolicyDocuments(settings=install), "ann")
    for needs in ({"requirements": ["nothing"]}, {"npm": ["nothing"]}):
        with pytest.raises(Denied):
            await plane.mcp.add(ADMIN, box, "more", SERVER.model_copy(update=needs))


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("huge", "longer than 16 MB|of more than 4 MB"),
        ("garbage", "no MCP message"),
        ("floods", "more than it was asked for"),
        ("exits", "exit code 5"),
        ("forks", "exit code 6"),
    ],
)
async def test_what_one_does_wrong_is_told_and_others_go_on(plane: ControlPlane, box: str, do: str, said: str) -> None:
    await plane.operations.write_file(ADMIN, "c", "hostile.py", HOSTILE.encode())
    await plane.mcp.add(ADMIN, box, "bad", McpServerRequest(command=["python3", "hostile.py", "-"]))
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    await call(plane, "count")
    wrong = asyncio.ensure_future(plane.mcp.request(ADMIN, box, "bad", McpRequest(tool="x", arguments={"do": do})))
    while not wrong.done():
        assert (await call(plane, "echo", text=do)).text == do
    with pytest.raises(McpServerFailed, match=said):
        await wrong
    info = await plane.mcp.get(ADMIN, box, "bad")
    assert info.state != "running"
    ran = await plane.operations.run_command(
        ADMIN, box, CommandRequest(command="ps ax | grep -c '[h]ostile.py' || true")
    )
    assert ran.stdout.strip() == "0", "nothing of it is left"
    assert (await call(plane, "echo", text="still")).text == "still"


async def test_what_a_person_let_in_is_started_without_asking(plane: ControlPlane, box: str) -> None:
    rules = {"permissions": {"allow": ["mcp(good:*)"]}}
    await plane.policy_changes.put("c", PolicyDocuments(settings=rules), "ann")
    caller = Caller(Identity("agent:a", OwnerKind.AGENT, frozenset({Scope.OPERATE})))
    with pytest.raises(ApprovalNeeded) as asked:
        await plane.mcp.add(caller, box, "good", SERVER)
    assert asked.value.approval is not None
    await plane.decisions.decide(Caller(PERSON), asked.value.approval, ApprovalDecision(approve=True))
    caller = Caller(caller.identity, approval=asked.value.approval)
    await plane.mcp.add(caller, box, "good", SERVER)
    caller = Caller(caller.identity)
    assert (await call(plane, "count", "c", caller)).text == "1"
    await plane.mcp.stop(caller, box, "good")
    await plane.mcp.start(caller, box, "good")
    assert (await call(plane, "count", "c", caller)).text == "1"


async def test_it_survives_stop_resume_and_fork(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    before = (await call(plane, "whoami")).text
    await plane.operations.stop(ADMIN, "c")
    again = await call(plane, "count")
    assert again.text == "1" and (await plane.sessions.get("c")).state is State.RUNNING, "resumed by the call"
    await plane.snapshots.fork(ADMIN, "c", "twin")
    assert len((await plane.mcp.catalogue(ADMIN, "twin", "good")).tools) == 9
    both = await asyncio.gather(call(plane, "whoami"), call(plane, "whoami", "twin"))
    assert before and len({each.text for each in both}) <= 2
    assert (await call(plane, "count", "twin")).text == "2" and (await call(plane, "count")).text == "3"
    await plane.mcp.remove(ADMIN, "twin", "good")
    assert (await call(plane, "count")).text == "4", "its own servers"


async def test_it_survives_the_server(settings: Settings) -> None:
    plane = await ControlPlane.open(settings)
    try:
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
        await plane.operations.write_file(ADMIN, "c", "good.py", GOOD.encode())
        await plane.mcp.add(ADMIN, "c", "good", SERVER)
        await call(plane, "count")
    finally:
        await plane.close()
    plane = await ControlPlane.open(settings)
    try:
        assert len((await plane.mcp.catalogue(ADMIN, "c", "good")).tools) == 9
        assert (await call(plane, "count")).text == "1"
    finally:
        await plane.close()


async def test_prompts_and_resources(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    found = await plane.mcp.catalogue(ADMIN, box, "good")
    assert [each["name"] for each in found.prompts] == ["greet"] and found.instructions == "be kind"
    prompt = await plane.mcp.get_prompt(ADMIN, box, "good", "greet", {"who": "ann"})
    assert prompt["messages"][0]["content"]["text"] == "greet ann"
    read = await plane.mcp.read_resource(ADMIN, box, "good", "memo://one")
    assert read["contents"][0]["text"] == "what it holds"
    tools = [(each.arguments or {})["tool"] for each in await records(plane, kind="mcp")]
    assert tools == ["prompts/get", "resources/read"]


async def test_progress(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    seen: list[tuple[float, float | None, str | None]] = []

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, total, message))

    told = await plane.mcp.request(ADMIN, box, "good", McpRequest(tool="step"), progress=progress)
    assert told.text == "three steps" and min(seen) == (1.0, 3.0, "step 0") and len(seen) == 3


async def test_what_is_refused(plane: ControlPlane, box: str) -> None:
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest())
    with pytest.raises(Conflict):
        await plane.mcp.add(ADMIN, info.id, "good", SERVER)
    await plane.operations.terminate(ADMIN, info.id, TerminateRequest())
    with pytest.raises(InvalidRequest):
        await plane.mcp.request(ADMIN, box, "good", McpRequest(tool="prompts/get"))
    with pytest.raises(NotFound):
        await plane.mcp.catalogue(ADMIN, box, "absent")
    off = SERVER.model_copy(update={"enabled": False})
    for number in range(MOST_MCP_SERVERS):
        await plane.mcp.add(ADMIN, box, f"s{number}", off)
    with pytest.raises(LimitExceeded):
        await plane.mcp.add(ADMIN, box, "more", off)
    await plane.mcp.add(ADMIN, box, "s0", off)
    await plane.operations.stop(ADMIN, "c")
    with pytest.raises(NotRunning):
        await plane.mcp.log(ADMIN, box, "s0")


async def test_what_cannot_be_given_breaks_nobody_elses_call_off(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    before = (await call(plane, "whoami")).text
    deep: object = "x"
    for _ in range(300):
        deep = [deep]
    for wrong in ("x" * (16 * 1024 * 1024), deep, "\ud800"):
        with pytest.raises(InvalidRequest) as caught:
            await call(plane, "echo", text=wrong)
        assert caught.value.field == "arguments"
    assert (await call(plane, "whoami")).text == before, "the same process"


@pytest.mark.parametrize("change", ["stop", "remove", "add"])
async def test_what_was_ended_meanwhile_is_not_started_after_all(plane: ControlPlane, box: str, change: str) -> None:
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    near, go_on = asyncio.Event(), asyncio.Event()
    before = plane.mcp._links.open

    async def slow(*given: object) -> object:
        near.set()
        await go_on.wait()
        return await before(*given)  # type: ignore[arg-type]

    plane.mcp._links.open = slow  # type: ignore[assignment,method-assign]
    late = asyncio.ensure_future(call(plane, "count"))
    await near.wait()
    if change == "stop":
        await plane.mcp.stop(ADMIN, box, "good")
    elif change == "remove":
        await plane.mcp.remove(ADMIN, box, "good")
    else:
        await plane.mcp.add(ADMIN, box, "good", SERVER.model_copy(update={"variables": {"CONTEXT": "d"}}))
    go_on.set()
    with pytest.raises(NotFound if change == "remove" else Conflict):
        await late
    assert await plane.mcp._processes(await plane.sessions.record(box)) == {} or change == "stop"
    if change == "stop":
        assert (await plane.mcp.get(ADMIN, box, "good")).state == "stopped"
        with pytest.raises(Conflict, match="is stopped"):
            await call(plane, "count")
    elif change == "add":
        assert (await call(plane, "whoami")).text.startswith("good d ")


async def test_a_terminated_context_is_not_made_anew(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    record = await plane.sessions.record(box)
    await plane.operations.terminate(ADMIN, box, TerminateRequest())
    with pytest.raises(NotRunning):
        await plane.mcp.request(ADMIN, record.id, "good", McpRequest(tool="count"))


async def test_a_deleted_context_takes_its_servers_with_it(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    await plane.operations.terminate(ADMIN, box, TerminateRequest())
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id=box))
    assert [each.name for each in (await plane.mcp.list(ADMIN, box)).items] == ["good"]
    await plane.operations.terminate(ADMIN, box, TerminateRequest(delete_files=True))
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id=box))
    assert (await plane.mcp.list(ADMIN, box)).items == []


async def test_a_call_that_is_broken_off_leaves_the_server_of_use(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    await call(plane, "count")
    task = asyncio.ensure_future(call(plane, "echo", text="x"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert int((await call(plane, "count")).text) >= 2


async def test_metrics(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, box, "good", SERVER)
    await call(plane, "echo")
    await call(plane, "fail")
    text = plane.metrics.render()[0].decode()
    assert 'carrel_mcp_call_seconds_count{origin="context",outcome="ok"} 1.0' in text
    assert 'carrel_mcp_call_seconds_count{origin="context",outcome="tool_error"} 1.0' in text
    assert 'carrel_mcp_discovery_seconds_count{outcome="ok"} 1.0' in text
