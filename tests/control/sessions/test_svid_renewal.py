"""Sandboxes on another machine in a control plane: each start has an identity of its own, which is renewed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.calls import ADMIN
from tests.support.remote_provider import RemoteProvider
from tests.support.servers import ROOT as AS_ROOT

from carrel.config import Settings, SpiffeSettings
from carrel.control.plane import ControlPlane
from carrel.models import CommandRequest, SandboxRequest
from carrel.providers.links import RemoteAddress, RemoteLink
from carrel.secrets import Vault
from carrel.spiffe.identities import Identities

pytestmark = pytest.mark.skipif(not AS_ROOT, reason="the provider of this test needs root")

TRUST_DOMAIN, LIFETIME_S = "renewal.test", 3.0


@pytest.fixture
async def plane(settings: Settings, bundles: Path, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    settings = settings.model_copy(
        update={
            "node": "one",
            "sandbox": settings.sandbox.model_copy(update={"third_party": "remote"}),
            "egress": settings.egress.model_copy(update={"allow_host": True}),
            "spiffe": SpiffeSettings(source="carrel", trust_domain=TRUST_DOMAIN, lifetime_s=LIFETIME_S),
        }
    )
    Path(settings.data_dir).mkdir(parents=True, exist_ok=True)
    identities = await Identities.open(
        "carrel",
        seed=Vault.open(settings.data_dir).derived("certificate authority"),
        node="one",
        trust_domain=TRUST_DOMAIN,
        lifetime_s=LIFETIME_S,
        agent_socket="",
    )
    (tmp_path / "remote").mkdir()
    provider = RemoteProvider(str(tmp_path / "remote"), str(bundles), identities.sandboxes)
    if (missing := provider.missing()) is not None:
        pytest.skip(missing)
    plane = await ControlPlane.open(settings, providers={"remote": provider})
    yield plane
    await plane.close()
    await identities.close()
    assert not list((tmp_path / "remote").iterdir())


def address(plane: ControlPlane, context: str) -> RemoteAddress:
    box = plane.live.find(context)
    assert box is not None and isinstance(box.link, RemoteLink)
    return box.link.address


async def start(plane: ControlPlane, context: str) -> None:
    request = SandboxRequest.model_validate(
        {"context_id": context, "provider": "remote", "network": "host", "trust": "high"}
    )
    await plane.operations.deploy_or_resume(ADMIN, request)


async def said(plane: ControlPlane, context: str, command: str) -> str:
    return (await plane.operations.run_command(ADMIN, context, CommandRequest(command=command))).stdout


async def serial(plane: ControlPlane, context: str) -> str:
    box, at = plane.live.find(context), address(plane, context)
    assert box is not None and isinstance(box.link, RemoteLink)
    _, writer = await asyncio.open_connection(at.host, at.port, ssl=box.link.context(), server_hostname="carrel")
    certificate = writer.get_extra_info("ssl_object").getpeercert()
    writer.transport.abort()
    return str(certificate["serialNumber"])


async def test_each_start_and_each_fork_has_an_identity_of_its_own(plane: ControlPlane) -> None:
    await start(plane, "a")
    first, certificate = address(plane, "a").id, await serial(plane, "a")
    assert str(first).startswith(f"spiffe://{TRUST_DOMAIN}/carrel/sandbox/")
    assert await said(plane, "a", "echo kept > file; id -u") == "1000\n"
    await plane.sessions.stop("a")
    await start(plane, "a")
    assert await said(plane, "a", "cat file") == "kept\n"
    assert await serial(plane, "a") != certificate
    await start(plane, "b")
    assert len({first, address(plane, "b").id}) == 2


async def test_svids_are_renewed_under_load(plane: ControlPlane) -> None:
    await start(plane, "a")
    seen = set()
    long = asyncio.ensure_future(said(plane, "a", f"sleep {2 * LIFETIME_S}; echo slept"))
    async with asyncio.timeout(60):
        while len(seen) < 4:
            seen.add(await serial(plane, "a"))
            assert await said(plane, "a", "echo fine") == "fine\n"
    assert await long == "slept\n"


async def test_a_fork_and_a_restored_sandbox_get_identities_of_their_own(plane: ControlPlane) -> None:
    await start(plane, "a")
    assert await said(plane, "a", "echo one > file") == ""
    origin, certificate = address(plane, "a").id, await serial(plane, "a")
    snapshot = await plane.snapshots.take(ADMIN, "a")
    await plane.snapshots.fork(ADMIN, "a", "fork")
    assert await said(plane, "fork", "cat file") == "one\n"
    assert address(plane, "fork").id != origin and await serial(plane, "fork") != certificate
    await said(plane, "a", "echo two > file")
    await plane.snapshots.restore(ADMIN, "a", snapshot.id)
    assert await said(plane, "a", "cat file") == "one\n"
    assert await serial(plane, "a") != certificate
