"""Waiting for the inbox: told once somebody has decided, however the server comes and goes."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.a2a_ground import Ground

from carrel.client import AsyncClient
from carrel.errors import ApprovalNeeded
from carrel.integrations.a2a.background import Background
from carrel.integrations.a2a.callers import A2aCaller, Callers
from carrel.integrations.a2a.inbox import Inbox


async def ask(ground: Ground, command: str) -> str:
    async with AsyncClient(ground.url, ground.token) as agent:
        box = await agent.sandbox(ground.context)
        with pytest.raises(ApprovalNeeded) as caught:
            await box.commands.run(command)
        return str(caught.value.approval)


async def test_each_who_waits_is_told_of_what_they_wait_for(ground: Ground) -> None:
    first, second = await ask(ground, "uname -s"), await ask(ground, "uname -r")
    callers, caller = Callers(ground.url), A2aCaller(ground.token, "me")
    async with Background() as background, asyncio.TaskGroup() as group:
        inbox = Inbox(callers, background)
        one = group.create_task(inbox.decided(caller, [first]))
        both = group.create_task(inbox.decided(caller, [first, second]))
        other = group.create_task(inbox.decided(caller, [second]))
        await asyncio.sleep(0)
        await ground.person.approvals.approve(first)
        await asyncio.wait_for(asyncio.gather(one, both), 20)
        assert not other.done()
        await ground.person.approvals.deny(second)
        await asyncio.wait_for(other, 20)
        assert not inbox._watches
    await callers.close()


async def test_what_was_decided_before_is_told_at_once(ground: Ground) -> None:
    approval = await ask(ground, "uname -s")
    await ground.person.approvals.deny(approval)
    callers = Callers(ground.url)
    async with Background() as background:
        await asyncio.wait_for(Inbox(callers, background).decided(A2aCaller(ground.token, "me"), [approval]), 20)
        await asyncio.wait_for(Inbox(callers, background).decided(A2aCaller(ground.token, "me"), ["apr-unknown"]), 20)
    await callers.close()


async def test_a_caller_who_may_no_longer_look_is_told_too(ground: Ground) -> None:
    approval = await ask(ground, "uname -s")
    callers = Callers(ground.url)
    async with Background() as background:
        await asyncio.wait_for(Inbox(callers, background).decided(A2aCaller("carrel_nobody", "nobody"), [approval]), 20)
    await callers.close()


async def test_who_stops_waiting_leaves_nothing(ground: Ground) -> None:
    approval = await ask(ground, "uname -s")
    callers = Callers(ground.url)
    async with Background() as background:
        inbox = Inbox(callers, background, pause_s=0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inbox.decided(A2aCaller(ground.token, "me"), [approval]), 0.3)
        assert not inbox._watches
    await callers.close()


async def test_a_server_that_is_away_is_waited_for() -> None:
    callers = Callers("http://127.0.0.1:9")
    async with Background() as background:
        inbox = Inbox(callers, background, pause_s=0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inbox.decided(A2aCaller("carrel_x", "x"), ["apr-1"]), 0.3)
    await callers.close()
