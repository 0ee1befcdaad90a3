"""A way out whose policy cannot be carried out is shut, and one that fails takes no other with it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator

import pytest
from tests.support.calls import ADMIN
from tests.support.outside import Origin, serving
from tests.support.sandboxes import until

from carrel.control.plane import ControlPlane
from carrel.egress.plan import Upstream
from carrel.errors import PlatformError
from carrel.models import CommandRequest, Network, PolicyDocuments, SandboxRequest, TerminateRequest


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    async with serving() as origin:
        yield origin


def given(origin: Origin, **web: object) -> PolicyDocuments:
    allowed = ["shell(curl:*)", f"network(outbound:127.0.0.2:{origin.port})"]
    settings = {"permissions": {"allow": allowed}}
    return PolicyDocuments(settings=settings, sources={"web_access": web} if web else None)


async def start(plane: ControlPlane, context: str, policy: PolicyDocuments) -> str:
    await plane.policy_changes.put(context, policy, "person:ann")
    info, _ = await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id=context))
    plane.egress._start_now()
    await until(lambda: plane.egress.pid and plane.egress._restoring.done(), what="the process")
    return info.id


async def fetch(plane: ControlPlane, context: str, origin: Origin) -> str:
    command = ["curl", "-sS", "-m", "20", f"{origin.url}/"]
    return (await plane.operations.run_command(ADMIN, context, CommandRequest(command=command, timeout=60))).stdout


async def test_a_policy_that_cannot_be_carried_out_shuts_the_way(plane: ControlPlane, origin: Origin) -> None:
    await start(plane, "c", given(origin))
    assert await fetch(plane, "c", origin) == "hello\n"
    await plane.policy_changes.put("c", given(origin, upstreams=["nowhere"]), "person:ann")
    told = await fetch(plane, "c", origin)
    assert "the policy names upstream proxies this server does not have: nowhere" in told
    await plane.policy_changes.put("c", given(origin), "person:ann")
    assert await fetch(plane, "c", origin) == "hello\n"


async def test_a_plan_that_the_process_refuses_shuts_the_way(plane: ControlPlane, origin: Origin) -> None:
    await start(plane, "c", given(origin))
    known = plane.egress._plans._upstreams
    plane.egress._plans._upstreams = (Upstream("odd", "gopher://127.0.0.2:70"),)
    await plane.egress.refresh(plane.sessions.live()[0])
    assert "the egress process refused" in await fetch(plane, "c", origin)
    plane.egress._plans._upstreams = known
    await plane.egress.refresh(plane.sessions.live()[0])
    assert await fetch(plane, "c", origin) == "hello\n"


async def test_a_policy_that_was_read_earlier_does_not_take_the_place_of_a_newer_one(
    plane: ControlPlane, origin: Origin
) -> None:
    await start(plane, "c", given(origin))
    read, going, go = plane.egress._plans._policy_of, asyncio.Event(), asyncio.Event()

    async def slowly(record):  # type: ignore[no-untyped-def]
        found = await read(record)
        if not going.is_set():
            going.set()
            await go.wait()
        return found

    plane.egress._plans._policy_of = slowly
    early = asyncio.create_task(plane.egress.refresh(plane.sessions.live()[0]))
    await going.wait()
    late = asyncio.create_task(plane.policy_changes.put("c", given(origin, enabled=False), "person:ann"))
    [attached] = plane.egress._boxes.values()
    await until(lambda: late.done() or attached.changing._waiters, what="the newer one")
    go.set()
    await asyncio.gather(early, late)
    assert "web access is off" in await fetch(plane, "c", origin)


async def test_one_that_ended_while_the_process_was_started_again_gets_no_way_out(
    plane: ControlPlane, origin: Origin
) -> None:
    """The number of its listener may be that of another by then."""
    first, second = [await start(plane, name, given(origin)) for name in ("a", "b")]
    attach, other = plane.egress._attach, socket.socket()

    async def and_meanwhile(attached) -> None:  # type: ignore[no-untyped-def]
        await attach(attached)
        if attached.box.record.id == first and second in plane.egress._boxes:
            number = plane.egress._boxes[second].listener
            plane.egress.detach(plane.egress._boxes[second].box)
            os.dup2(other.fileno(), number, inheritable=False)

    plane.egress._attach = and_meanwhile  # type: ignore[method-assign]
    other.bind(("127.0.0.2", 0))
    other.listen()
    number = plane.egress._boxes[second].listener
    pid = plane.egress.pid
    os.kill(pid, signal.SIGKILL)
    await until(lambda: plane.egress.pid not in {0, pid} and plane.egress._restoring.done(), what="another process")
    assert (await plane.egress._client.request("describe"))["sandboxes"] == [first]
    assert await fetch(plane, "a", origin) == "hello\n"
    os.close(number)
    other.close()


async def test_one_that_cannot_be_let_out_again_does_not_keep_others_in(plane: ControlPlane, origin: Origin) -> None:
    first, second = [await start(plane, name, given(origin)) for name in ("a", "b")]
    plane.egress._upkeep.cancel()  # which would mend it
    broken = plane.egress._boxes[first]
    broken.plan = broken.plan.__class__(first, "a", upstreams=(Upstream("odd", "gopher://h:1"),))
    pid = plane.egress.pid
    os.kill(pid, signal.SIGKILL)
    await until(lambda: plane.egress.pid not in {0, pid}, what="another process")
    assert await fetch(plane, "b", origin) == "hello\n"
    assert "the egress process refused" in await fetch(plane, "a", origin)
    await plane.egress.refresh(broken.box)
    assert await fetch(plane, "a", origin) == "hello\n"
    assert {first, second} == set((await plane.egress._client.request("describe"))["sandboxes"])


async def test_a_process_that_dies_while_it_is_told_of_a_policy_is_followed_by_one_that_has_it(
    plane: ControlPlane, origin: Origin
) -> None:
    await start(plane, "c", given(origin))
    plane.egress._upkeep.cancel()  # which would mend it
    request, pid = plane.egress._client.request, plane.egress.pid

    async def and_dies(op, *more, **body):  # type: ignore[no-untyped-def]
        if op == "change":
            os.kill(pid, signal.SIGKILL)
        return await request(op, *more, **body)

    plane.egress._client.request = and_dies  # type: ignore[method-assign]
    await plane.policy_changes.put("c", given(origin, max_connections=7), "person:ann")
    await until(lambda: plane.egress.pid not in {0, pid} and plane.egress._restoring.done(), what="another process")
    assert await fetch(plane, "c", origin) == "hello\n"
    [attached] = plane.egress._boxes.values()
    assert next(each.sources.web_access.max_connections for each in attached.plan.layers if each.sources) == 7


async def test_a_process_that_dies_as_soon_as_it_has_the_first_sandbox_is_followed_by_another(
    plane: ControlPlane, origin: Origin
) -> None:
    attach, died = plane.egress._attach, []

    async def and_dies(attached) -> None:  # type: ignore[no-untyped-def]
        await attach(attached)
        if not died:
            died.append(plane.egress.pid)
            os.kill(died[0], signal.SIGKILL)
            await until(lambda: not plane.egress.pid, what="its end")

    plane.egress._attach = and_dies  # type: ignore[method-assign]
    await start(plane, "c", given(origin))
    await until(lambda: plane.egress.pid not in {0, *died}, what="another process")
    assert await fetch(plane, "c", origin) == "hello\n"


async def test_a_process_that_dies_while_it_is_taken_over_keeps_no_server_from_starting(
    plane: ControlPlane, origin: Origin
) -> None:
    for name in ("a", "b"):
        await start(plane, name, given(origin))
    egress, boxes = plane.egress, plane.sessions.live()
    egress._upkeep.cancel()
    for attached in egress._boxes.values():
        os.close(attached.listener)
    egress._boxes.clear()  # as a server that has just been started
    channel = egress._client._channel
    assert channel is not None
    channel.close()
    await egress._log.close()

    async def dies(_attached) -> None:  # type: ignore[no-untyped-def]
        os.kill(egress.pid, signal.SIGKILL)
        await until(lambda: not egress.pid, what="its end")
        raise PlatformError("the egress process is gone")

    egress._attach = dies  # type: ignore[method-assign]
    await egress.open(boxes[:1], warm=False)


async def test_nothing_is_left_of_what_a_sandbox_trusted(plane: ControlPlane, origin: Origin) -> None:
    """Also not of one without a network, which has the certificates all the same."""
    for name, network in (("a", Network.NONE), ("b", Network.ALLOWLIST)):
        await plane.policy_changes.put(name, given(origin, inspected_domains=["api.example"]), "person:ann")
        await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id=name, network=network))
        assert len(_authorities(plane)) == 1
        await plane.operations.terminate(ADMIN, name, TerminateRequest())
        assert _authorities(plane) == []


def _authorities(plane: ControlPlane) -> list[str]:
    return [name for name in os.listdir(plane.egress._plans._run_dir) if name.startswith("ca-")]
