"""The server is killed at each point on the way of an operation that a person approved: it never runs twice, and what
surely did not begin runs with the same approval.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator

import pytest
from tests.support.fork_server import Forked
from tests.support.governed import POLICY
from tests.support.kill_server import Server

from carrel.client import AsyncClient
from carrel.errors import ApprovalNeeded, Conflict, PlatformError
from carrel.isolation import probe

SERVE = """
import os, signal, sys
from carrel.audit import AuditLog
from carrel.control.supervisor import connection
from carrel.store.approvals import ApprovalStore

def dies(owner, name, *, after=True, when=lambda arguments: True):
    real = getattr(owner, name)
    async def patched(*arguments, **more):
        fatal = when(arguments)
        found = await real(*arguments, **more) if after or not fatal else None
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return found
    setattr(owner, name, patched)

point = sys.argv.pop(1)
running = lambda _: connection.run.get() is not None
if point == "used":
    dies(ApprovalStore, "use")
elif point == "recorded":
    dies(AuditLog, "begin", when=lambda given: given[1].approval is not None and given[1].name == "run_command")
elif point == "sent":
    dies(connection.HttpWire, "finish", after=False, when=running)
elif point == "answered":
    dies(connection.HttpWire, "finish", when=running)
elif point == "recovering":
    dies(ApprovalStore, "ended", after=False)
elif point == "recovered":
    dies(ApprovalStore, "ended")
from carrel.cli import main
main(sys.argv[1:])
"""


class Dying(Server):
    """A server that dies at a point on the way of an approved operation, and two who use it."""

    point = "never"
    agent = person = ""

    def _spawn(self) -> Forked | subprocess.Popen[bytes]:
        return self._start(["-c", SERVE, self.point, "serve", "--port", "0", "--data-dir", str(self.data)])

    async def again(self, point: str) -> None:
        """Once it is dead, start it to die at that point."""
        await self.killed()
        self.point = point
        await self.start()

    async def die_starting(self, point: str) -> None:
        """Once it is dead, start it to die at that point before it takes requests."""
        await self.killed()
        self.point = point
        self._process = self._spawn()
        await self.killed()

    async def meet(self) -> None:
        """Make tokens, and a policy that asks."""
        async with self.client() as admin:
            await admin.policy("c").put(settings=POLICY)
            self.agent = (await admin.tokens.create("coder", kind="agent", scopes=["operate"])).token
            self.person = (await admin.tokens.create("ann", kind="person", scopes=["approve"])).token

    def known(self, token: str) -> AsyncClient:
        """A client of somebody."""
        return AsyncClient(self.client().url, token)

    async def approved(self, command: str) -> str:
        """The handle of a command that was asked for and approved."""
        async with self.known(self.agent) as agent, self.known(self.person) as person:
            with pytest.raises(ApprovalNeeded) as caught:
                await (await agent.sandbox("c")).commands.run(command)
            handle = caught.value.approval or ""
            await person.approvals.approve(handle)
            return handle

    async def use(self, handle: str, command: str) -> None:
        """Run it."""
        async with self.known(self.agent) as agent:
            await (await agent.sandbox("c")).with_approval(handle).commands.run(command)

    async def used(self, handle: str) -> bool:
        """Whether an approval is used up."""
        async with self.known(self.person) as person:
            return (await person.approvals.get(handle)).used_at is not None

    async def ran(self, path: str) -> int:
        """How often a command ran that adds a line to a file."""
        async with self.known(self.agent) as agent:
            box = await agent.sandbox("c")
            names = [info.path for info in await box.files.list(".")]
            return (await box.files.read(path)).count(b"\n") if path in names else 0

    async def recovered(self) -> list[tuple[object, object]]:
        """What was found out after kills: which approval, and whether its operation was begun; oldest first."""
        async with self.client() as admin:
            records = [record async for record in admin.audit.search(name="recover_approval", context_id="c")]
        return [(record.arguments["approval"], record.arguments["begun"]) for record in reversed(records)]


@pytest.fixture
async def server() -> AsyncIterator[Dying]:
    server = Dying(volumes="directory")
    try:
        yield server
    finally:
        server.close()


@pytest.mark.skipif(
    os.geteuid() != 0 or probe.host().missing is not None, reason="needs root and the namespace provider"
)
@pytest.mark.timeout(240)
async def test_killed_at_each_point(server: Dying) -> None:
    server.point = "used"
    await server.start()
    await server.meet()
    command = "uname >> made"
    handle = await server.approved(command)
    for point in ("used", "recorded", "sent"):
        assert (server.point, await server.used(handle), await server.ran("made")) == (point, False, 0)
        with pytest.raises(PlatformError):
            await server.use(handle, command)
        if point == "used":
            await server.again("recorded")
        elif point == "recorded":
            await server.die_starting("recovering")
            await server.again("sent")
    await server.die_starting("recovered")
    await server.again("answered")
    once = await server.ran("made")
    assert await server.used(handle) is bool(once), "used up if it ran, and to be used if it did not"
    if once:
        with pytest.raises(Conflict, match="used already"):
            await server.use(handle, command)
    else:
        with pytest.raises(PlatformError):
            await server.use(handle, command)
        await server.again("answered")
    assert await server.ran("made") == 1
    found = await server.recovered()
    assert found[:3] == [(handle, "no")] * 3 and found[3:4] == [(handle, "yes" if once else "no")], found

    other = "uname >> more"
    second = await server.approved(other)
    with pytest.raises(PlatformError):
        await server.use(second, other)
    await server.again("never")
    assert await server.used(second) and await server.ran("more") == 1
    assert (await server.recovered())[-1] == (second, "yes")
    with pytest.raises(Conflict, match="used already"):
        await server.use(second, other)
    await server.stop()
