"""Sandboxes for code that is believed to be hostile, on a whole control plane: who gets one, and that it is never replaced
by something weaker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.calls import ADMIN
from tests.support.gvisor import find_runsc
from tests.support.killed import killed
from tests.support.sandboxes import until

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.errors import CarrelError, ProviderUnavailable, SandboxLost
from carrel.models import CommandRequest, Network, SandboxRequest, State, Trust


@pytest.fixture
def hostile(settings: Settings, bundles: Path) -> Settings:
    """Settings of a server with gVisor. The bundle is that of the whole run."""
    runsc = find_runsc()
    if runsc is None:
        pytest.skip("runsc is not there: scripts/build-runsc builds it, which needs Go")
    os.makedirs(settings.data_dir, exist_ok=True)
    os.symlink(bundles, os.path.join(settings.data_dir, "bundles"))
    return settings.model_copy(update={"gvisor": settings.gvisor.model_copy(update={"runsc": runsc})})


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[ControlPlane]:
    plane = await ControlPlane.open(settings)
    try:
        if (missing := plane.providers["gvisor"].missing()) is not None and settings.gvisor.runsc:
            pytest.skip(missing)
        yield plane
    finally:
        await plane.close()


async def said(plane: ControlPlane, name: str, command: str) -> str:
    return (await plane.operations.run_command(ADMIN, name, CommandRequest(command=command))).stdout


async def test_low_trust_gets_gvisor_and_keeps_it(settings: Settings, hostile: Settings) -> None:
    low = SandboxRequest(context_id="c", trust=Trust.LOW, network=Network.ALLOWLIST)
    async with serving(hostile) as plane:
        info, _ = await plane.operations.deploy_or_resume(ADMIN, low)
        assert (info.provider, info.isolation_level, info.trust) == ("gvisor", 2, Trust.LOW)
        assert await said(plane, "c", "echo kept > file; dmesg | grep -ci gvisor") != "0\n"
        slow = CommandRequest(command="until test -e go; do sleep 0.05; done; echo went")
        running = await plane.operations.start_command(ADMIN, "c", slow)
        # The server is killed: the sandbox and its command run on, and the next server has both.
        box = await plane.sessions.find("c")
        await killed(plane)
        async with serving(hostile) as other:
            assert other.recovered.adopted == 1
            assert await said(other, "c", "touch go; cat file") == "kept\n"
            assert (await other.operations.command_result(ADMIN, "c", running.id)).stdout == "went\n"
            way = await box.provider.way_out(box.handle)
            assert way is not None
            with socket.socket(fileno=way) as listener:
                listener.setblocking(False)
                knock = "exec 3<>/dev/tcp/127.0.0.1/3128; cat <&3"
                knocking = asyncio.create_task(said(other, "c", f"bash -c '{knock}'"))
                async with asyncio.timeout(20):
                    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                connection.sendall(b"reached\n")
                connection.close()
                assert await knocking == "reached\n"
            os.kill(int(box.handle["pid"] or 0), signal.SIGKILL)
            with pytest.raises(SandboxLost):
                await said(other, "c", "true")
            await until(lambda: _is_stopped(other), what="the end of the session")
    # On a server without gVisor the session, its fork and its snapshot start nowhere: nothing weaker is taken instead.
    async with serving(settings) as plane:
        snapshot = await plane.snapshots.take(ADMIN, "c")
        await plane.snapshots.restore(ADMIN, "c", snapshot.id)
        for attempt in (
            plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c")),
            plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", provider="namespace")),
            plane.snapshots.fork(ADMIN, "c", "d"),
        ):
            with pytest.raises(CarrelError) as caught:
                await attempt
            assert caught.value.code in {"provider_unavailable", "unsupported"}, caught.value


async def _is_stopped(plane: ControlPlane) -> bool:
    return (await plane.sessions.get("c")).state is not State.RUNNING


async def test_without_gvisor_low_trust_is_refused_with_the_way_to_get_it(settings: Settings) -> None:
    async with serving(settings) as plane:
        with pytest.raises(ProviderUnavailable, match="scripts/build-runsc") as caught:
            await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(trust=Trust.LOW))
        assert caught.value.status == 503
