from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator

import pytest
from tests.support.calls import ADMIN
from tests.support.killed import killed
from tests.support.outside import Origin, serving
from tests.support.sandboxes import until

from carrel.audit import Filter, chain_of
from carrel.config import Settings
from carrel.control.egress.service import MOST_HOSTS
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import (
    ApprovalDecision,
    ApprovalScope,
    AuditRecord,
    CommandRequest,
    CommandResult,
    Network,
    PolicyDocuments,
    SandboxRequest,
    TerminateRequest,
)

PERSON = Identity("person:ann", OwnerKind.PERSON, frozenset({Scope.APPROVE}))


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    async with serving() as origin:
        yield origin


@pytest.fixture
async def away(settings: Settings) -> AsyncIterator[ControlPlane]:
    """A server whose sandboxes wait for a person only shortly."""
    quick = settings.egress.model_copy(update={"ask_wait_s": 0.0})
    plane = await ControlPlane.open(settings.model_copy(update={"egress": quick}))
    yield plane
    await plane.close()


def allow(*rules: str, deny: tuple[str, ...] = ()) -> PolicyDocuments:
    commands = [f"shell({name}:*)" for name in ("curl", "python3", "sh", "cat", "env", "sleep", "echo", "seq")]
    return PolicyDocuments(settings={"permissions": {"allow": [*commands, *rules], "deny": list(deny)}})


async def start(plane: ControlPlane, context: str, given: PolicyDocuments | None = None) -> str:
    if given is not None:
        await plane.policy_changes.put(context, given, "person:ann")
    network = None if given is not None else Network.ALLOWLIST
    info, _ = await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id=context, network=network))
    assert info.network is Network.ALLOWLIST
    return info.id


async def fetch(plane: ControlPlane, context: str, url: str, *more: str) -> CommandResult:
    command = ["curl", "-sS", "-m", "20", *more, url]
    return await plane.operations.run_command(ADMIN, context, CommandRequest(command=command, timeout=60))


async def records(plane: ControlPlane, context: str, count: int) -> list[AuditRecord]:
    async def found() -> list[AuditRecord] | None:
        await plane.audit.flush()
        page = await plane.audit.search(Filter(chain=chain_of(context), kind="network"), limit=100)
        return page.items[::-1] if len(page.items) >= count and page.items[0].result else None

    return await until(found, what=f"{count} records of {context}")  # type: ignore[no-any-return]


async def test_an_allowed_host_is_reached_and_written_down(plane: ControlPlane, origin: Origin) -> None:
    sandbox = await start(plane, "c", allow(f"network(outbound:127.0.0.2:{origin.port})"))
    assert (await fetch(plane, "c", f"{origin.url}/x?token=1")).stdout == "hello\n"
    [record] = await records(plane, "c", 1)
    assert (record.actor, record.name, record.decision, record.result) == (
        f"sandbox:{sandbox}",
        "request",
        "allow",
        "ok",
    )
    assert record.rule == f"network(outbound:127.0.0.2:{origin.port})"
    assert record.arguments["host"] == "127.0.0.2" and record.arguments["path"] == "/x"
    assert record.arguments["address"] == "127.0.0.2"
    assert record.bytes_in and record.bytes_out and record.duration_ms
    assert "token" not in json.dumps(record.arguments)
    text = plane.metrics.render()[0].decode()
    assert 'carrel_egress_seconds_count{outcome="ok",protocol="http"} 1.0' in text


async def test_the_proxy_starts_with_the_first_connection(plane: ControlPlane, origin: Origin) -> None:
    await start(plane, "c", allow(f"network(outbound:127.0.0.2:{origin.port})"))
    assert plane.egress.pid == 0 and plane.egress._starting_soon is not None
    plane.egress._starting_soon.cancel()  # so that only a connection starts it
    assert (await fetch(plane, "c", f"{origin.url}/")).stdout == "hello\n"
    assert plane.egress.pid != 0


async def test_a_denied_host_is_refused_with_the_rule(plane: ControlPlane, origin: Origin) -> None:
    await start(plane, "c", allow("network(outbound:192.0.2.1)", deny=("network(outbound:127.0.0.0/8)",)))
    told = await fetch(plane, "c", f"{origin.url}/", "-w", "%{http_code}")
    assert told.stdout.endswith("403")
    refusal = json.loads(told.stdout[:-3])
    assert refusal["code"] == "denied_by_policy" and refusal["operation"] == "network"
    assert refusal["rule"] == "network(outbound:127.0.0.0/8)" and refusal["source"] == "settings.json"
    assert origin.requests == []
    [record] = await records(plane, "c", 1)
    assert (record.decision, record.result) == ("deny", "denied_by_policy")


async def test_without_the_network_no_proxy_is_started(plane: ControlPlane) -> None:
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    result = await fetch(plane, "c", "http://docs.example.org/")
    assert "this sandbox has no network" in result.stdout
    assert plane.egress.pid == 0


async def test_an_unknown_host_waits_for_a_person(plane: ControlPlane, origin: Origin) -> None:
    await start(plane, "c", allow(f"network(outbound:127.0.0.2:{origin.port})", "network(outbound:192.0.2.1)"))
    # A name nobody speaks of: whoever allows it must still find that it has no address here.
    asked = asyncio.create_task(fetch(plane, "c", "http://nobody.example/", "-w", "%{http_code}"))
    [waiting] = await until(_pending(plane), what="an approval")
    assert (waiting.kind, waiting.summary) == ("network", "connect nobody.example 80")
    assert waiting.requested_by.startswith("sandbox:")
    await plane.decisions.decide(Caller(PERSON), waiting.id, ApprovalDecision(approve=False, message="not that one"))
    refusal = json.loads((await asked).stdout[:-3])
    assert refusal["reason"] == "not that one" and refusal["approval"] == waiting.id


async def test_what_is_approved_later_holds_for_the_next_try(away: ControlPlane, origin: Origin) -> None:
    await start(away, "c")
    told = await fetch(away, "c", f"http://a.example:{origin.port}/")
    assert "denied_by_policy" in told.stdout  # the port is nobody's; nobody is asked for that
    told = await fetch(away, "c", "http://a.example/")
    refusal = json.loads(told.stdout)
    assert refusal["approval"] and refusal["approval"] in refusal["hint"]
    again = json.loads((await fetch(away, "c", "http://a.example/")).stdout)
    assert again["approval"] == refusal["approval"]  # it is one question, however often it is asked
    decision = ApprovalDecision(approve=True, scope=ApprovalScope.CONTEXT)
    await away.decisions.decide(Caller(PERSON), refusal["approval"], decision)
    for _ in range(2):
        answer = json.loads((await fetch(away, "c", "http://a.example/")).stdout)
        assert answer["code"] == "unreachable"  # it was let out, and has no address


async def test_a_sandbox_cannot_fill_the_inbox(away: ControlPlane) -> None:
    quick = away.egress
    quick._ask_wait_s = 60
    await start(away, "c")
    script = "for n in $(seq 40); do curl -s -m 60 http://h$n.example/ & done; wait"
    running = asyncio.create_task(away.operations.run_command(ADMIN, "c", CommandRequest(command=script, timeout=90)))
    try:
        await until(lambda: quick._boxes and next(iter(quick._boxes.values())).asking == 20, what="twenty questions")
        await records(away, "c", 20)  # the other twenty were told no
        page = await until(_pending(away, 20), what="twenty approvals")
        assert len(page) == 20
        for each in page:
            await away.decisions.decide(Caller(PERSON), each.id, ApprovalDecision(approve=False))
        result = await running
        assert result.stdout.count('"reason": "this sandbox has asked a person about too many hosts') == 20
    finally:
        running.cancel()


async def test_who_names_ever_more_hosts_is_not_asked_for_any_more(away: ControlPlane) -> None:
    await start(away, "c")
    script = f"for n in $(seq {MOST_HOSTS + 5}); do curl -s http://h$n.example/; done"
    result = await away.operations.run_command(ADMIN, "c", CommandRequest(command=script, timeout=90))
    assert result.stdout.count('"reason": "this sandbox has asked a person about too many hosts') == 5


def _pending(plane: ControlPlane, count: int = 1):  # type: ignore[no-untyped-def]
    async def found() -> object:
        items = (await plane.approvals.page()).items
        return items if len(items) >= count else None

    return found


async def test_a_policy_is_followed_at_once(plane: ControlPlane, origin: Origin) -> None:
    origin.hold = asyncio.Event()
    rule = f"network(outbound:127.0.0.2:{origin.port})"
    await start(plane, "c", allow(rule))
    cut = asyncio.create_task(fetch(plane, "c", f"{origin.url}/slow"))
    await until(lambda: origin.requests, what="the request")
    await plane.policy_changes.put(
        "c", allow("network(outbound:192.0.2.1)", deny=("network(outbound:127.0.0.2)",)), "ann"
    )
    assert (await cut).exit_code != 0
    origin.hold.set()
    assert "is denied" in (await fetch(plane, "c", origin.url)).stdout
    await plane.policy_changes.put("c", allow(rule), "ann")
    assert (await fetch(plane, "c", origin.url)).stdout == "hello\n"


async def test_each_sandbox_has_its_own_rules(plane: ControlPlane, origin: Origin) -> None:
    await start(plane, "a", allow(f"network(outbound:127.0.0.2:{origin.port})"))
    await start(plane, "b", allow("network(outbound:192.0.2.1)", deny=("network(outbound:127.0.0.2)",)))
    assert (await fetch(plane, "a", origin.url)).stdout == "hello\n"
    assert "is denied" in (await fetch(plane, "b", origin.url)).stdout
    # A name in a header or a password is no identity.
    claims = ["-H", "Proxy-Authorization: Basic YTph", "-H", "X-Carrel-Sandbox: a", "--proxy-user", "a:a"]
    assert "is denied" in (await fetch(plane, "b", origin.url, *claims)).stdout
    await plane.operations.terminate(ADMIN, "a", TerminateRequest())
    assert "is denied" in (await fetch(plane, "b", origin.url)).stdout


async def test_a_killed_proxy_is_replaced_and_nobody_goes_around_it(plane: ControlPlane, origin: Origin) -> None:
    for name in ("a", "b"):
        await start(plane, name, allow(f"network(outbound:127.0.0.2:{origin.port})"))
    once = "curl -s -m 20 --retry 5 --retry-all-errors --retry-delay 0"
    load = f'for n in $(seq 30); do {once} "{origin.url}/$n"; done'
    running = [
        asyncio.create_task(plane.operations.run_command(ADMIN, name, CommandRequest(command=load, timeout=90)))
        for name in ("a", "b")
    ]
    await until(lambda: len(origin.requests) > 5, what="load")
    first = plane.egress.pid
    os.kill(first, signal.SIGKILL)
    done = await asyncio.gather(*running)
    assert [result.stdout.count("hello") for result in done] == [30, 30]
    assert plane.egress.pid not in {0, first}
    told = await records(plane, "a", 30)
    assert {record.result for record in told} <= {"ok", "unknown", "broken_off", "cancelled"}


async def test_the_next_server_takes_the_ways_out_over(plane: ControlPlane, origin: Origin) -> None:
    await start(plane, "c", allow(f"network(outbound:127.0.0.2:{origin.port})"))
    await start(plane, "gone", allow(f"network(outbound:127.0.0.2:{origin.port})"))
    pid = await until(lambda: plane.egress.pid, what="the process")
    plane.egress._closing = True  # as if it were killed: it does nothing any more
    await killed(plane)
    other = await ControlPlane.open(plane.settings)
    try:
        assert other.recovered.adopted == 2
        assert other.egress.pid == pid
        assert (await fetch(other, "c", origin.url)).stdout == "hello\n"
        await records(other, "c", 1)
        # One that has died meanwhile is forgotten by the proxy too.
        box = other.sessions.live()[0]
        await other.sessions.stop(box.record.id)
        known = (await other.egress._client.request("describe"))["sandboxes"]
        assert known == [each.record.id for each in other.sessions.live()]
    finally:
        await other.close()
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


async def test_tools_find_the_way_by_themselves(plane: ControlPlane, origin: Origin) -> None:
    await start(plane, "c", allow(f"network(outbound:127.0.0.2:{origin.port})"))
    code = f"import urllib.request as u; print(u.urlopen('{origin.url}/').read())"
    result = await plane.operations.run_command(ADMIN, "c", CommandRequest(command=["python3", "-c", code]))
    assert result.stdout == "b'hello\\n'\n", result.stderr
    socks = await fetch(plane, "c", f"{origin.url}/", "-x", "socks5h://127.0.0.1:3128")
    assert socks.stdout == "hello\n"
