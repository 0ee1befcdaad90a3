from __future__ import annotations

import asyncio

from carrel.control.operations.caller import Caller, caller
from carrel.identity import ROOT, Identity, OwnerKind, Scope


async def test_it_follows_a_request_into_the_tasks_it_starts_and_no_other() -> None:
    agent = Identity("agent:a", OwnerKind.AGENT, frozenset({Scope.OPERATE}))

    async def request() -> Caller:
        caller.set(Caller(agent, approval="apr-1"))
        return await asyncio.create_task(_seen())

    async def _seen() -> Caller:
        return caller.get()

    seen = await asyncio.create_task(request())
    assert (seen.identity, seen.approval, seen.wait_s) == (agent, "apr-1", 0.0)
    assert caller.get().identity is ROOT
