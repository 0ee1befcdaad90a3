"""Who holds which environment, while others list, let go and remove: nobody loses what they have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from tests.support.calls import ADMIN

from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.control.python.environments import Environments
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import SandboxRequest, TerminateRequest
from carrel.store.environments import EnvironmentRecord

TENANT = Identity("someone", OwnerKind.PERSON, frozenset({Scope.OPERATE}), namespace="team")
HOLDER = "team:one"


@pytest.fixture
async def kept(plane: ControlPlane) -> AsyncIterator[Environments]:
    """Two environments that somebody else built, one with a label, and a context of a tenant that may have them."""
    for name, labels in (("env-a", ["tools"]), ("env-b", [])):
        now = time.time()
        record = EnvironmentRecord(name, "h", "3.11", "p", [], [], [], 1, now, now, "other:context", labels)
        await plane.environments._store.put(record)
        plane.environments._known[name] = record
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id=HOLDER))
    yield plane.environments


async def hold(environments: Environments, name: str) -> EnvironmentRecord:
    async def find() -> EnvironmentRecord:
        return environments._known[name]

    return await environments.hold(find, HOLDER)


async def test_one_that_is_attached_while_somebody_lists_them_is_known_by_its_name(kept: Environments) -> None:
    _, held = await asyncio.gather(kept.list(ADMIN), hold(kept, "env-a"))
    caller = Caller(TENANT)
    assert kept.info(caller, held).name == "env-a", "its sandbox knows it by no other"
    assert kept.find(caller, "env-a", HOLDER) == held


async def test_one_that_is_had_again_is_held_again(plane: ControlPlane, kept: Environments) -> None:
    await hold(kept, "env-a")
    await plane.operations.terminate(ADMIN, HOLDER, TerminateRequest())
    await kept.remove(ADMIN, "env-b")  # finds that nobody has the other any more
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id=HOLDER))
    await hold(kept, "env-a")
    assert (await kept._store.held()) == {"env-a": {HOLDER}}


async def test_one_that_is_let_go_while_somebody_lists_them_can_be_held_again(kept: Environments) -> None:
    for turn in range(2):
        await hold(kept, "env-a")
        both = [kept.list(ADMIN), kept.release(ADMIN, "env-a", HOLDER)]
        await asyncio.gather(*(both if turn else reversed(both)))
        await hold(kept, "env-a")
        assert (await kept._store.held()) == {"env-a": {HOLDER}}


async def test_a_fork_holds_what_its_origin_does_whoever_lists_them_meanwhile(
    plane: ControlPlane, kept: Environments
) -> None:
    await hold(kept, "env-a")
    making = asyncio.ensure_future(plane.snapshots.fork(ADMIN, HOLDER, "team:two"))
    while not making.done():
        await kept.list(ADMIN)
    await making
    assert (await kept._store.held()) == {"env-a": {HOLDER, "team:two"}}
    await plane.operations.terminate(ADMIN, "team:two", TerminateRequest())
    await kept.list(ADMIN)
    assert kept._holds.holders == {"env-a": {HOLDER}}, "as any other that has ended"
