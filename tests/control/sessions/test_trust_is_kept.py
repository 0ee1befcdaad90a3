"""A session never lands on less isolation than it asked for, and its trust chooses its default network: on whole control
planes, with a second real provider that says it is stronger, and that the operator lists.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.calls import ADMIN
from tests.support.killed import killed

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.errors import CarrelError
from carrel.models import CommandRequest, Network, SandboxInfo, SandboxRequest, State, Trust
from carrel.providers import Provider
from carrel.providers.namespace import NamespaceProvider
from carrel.providers.zygotes import ZygoteClient

REFUSED = {"provider_unavailable", "unsupported", "invalid_request"}


class Strong(NamespaceProvider):
    """Sandboxes of the namespace provider, with a level that no server has by itself."""

    name, isolation_level = "strong", 2


class Broken(Strong):
    """The same where something has been uninstalled."""

    def missing(self) -> str | None:
        return "its program was uninstalled"


@contextlib.asynccontextmanager
async def serving(settings: Settings, strong: type[Strong] | None = Strong) -> AsyncIterator[ControlPlane]:
    listed = settings.sandbox.model_copy(update={"third_party": "strong"})
    settings = settings.model_copy(update={"sandbox": listed})
    run, workspaces = (str(Path(settings.data_dir, name)) for name in ("run", "storage/volumes"))
    kinds: list[type[NamespaceProvider]] = [*([strong] if strong else []), NamespaceProvider]
    zygote = ZygoteClient(run, workspaces, plain=False)  # one for both: there is one for each run directory
    providers: dict[str, Provider] = {kind.name: kind(run, workspaces, zygote=zygote) for kind in kinds}
    if (missing := providers["namespace"].missing()) is not None:
        pytest.skip(missing)
    plane = await ControlPlane.open(settings, providers=providers)
    try:
        yield plane
    finally:
        await plane.close()


async def deploy(plane: ControlPlane, context: str = "c", **more: object) -> SandboxInfo:
    request = SandboxRequest.model_validate({"context_id": context, **more})
    return (await plane.operations.deploy_or_resume(ADMIN, request))[0]


async def refused(plane: ControlPlane, *requests: dict[str, object]) -> None:
    for request in requests:
        with pytest.raises(CarrelError) as caught:
            await deploy(plane, **request)  # type: ignore[arg-type]
        assert caught.value.code in REFUSED and caught.value.hint


async def test_resume_fork_and_restore_where_the_strong_provider_is_gone(settings: Settings) -> None:
    async with serving(settings) as plane:
        assert (await deploy(plane, trust="low")).isolation_level == 2
        await plane.operations.write_file(ADMIN, "c", "file", b"hostile")
        snapshot = await plane.snapshots.take(ADMIN, "c")
        restored = await plane.snapshots.restore(ADMIN, "c", snapshot.id)  # under a running sandbox
        assert (restored.state, restored.provider, restored.trust) == (State.RUNNING, "strong", Trust.LOW)
        twin = await plane.snapshots.fork(ADMIN, "c", "twin", snapshot.id)
        assert (twin.provider, twin.isolation_level, twin.trust) == ("strong", 2, Trust.LOW)
        assert (await deploy(plane, "usual")).provider == "strong", "auto takes the strongest"
    async with serving(settings, Broken) as plane:
        await refused(plane, {}, {"provider": "strong"}, {"provider": "namespace"}, {"context": "twin"})
    async with serving(settings, None) as plane:
        await plane.snapshots.restore(ADMIN, "c", snapshot.id)
        await refused(plane, {}, {"provider": "namespace"}, {"context": "twin"})
        with pytest.raises(CarrelError) as caught:
            await plane.snapshots.fork(ADMIN, "c", "other", snapshot.id)
        assert caught.value.code in REFUSED
        assert not await plane.workspaces.exists("other"), "a refused fork leaves nothing"
        # A session that got more than it asked for gets nothing weaker either, unless a caller says that it may.
        await refused(plane, {"context": "usual"}, {"context": "usual", "trust": "medium"})
        assert (await deploy(plane, "usual", trust="high")).provider == "namespace"
        assert {box.record.context_id for box in plane.sessions.live()} == {"usual"}


async def test_an_archived_snapshot_on_another_server(node_settings: list[Settings]) -> None:
    first, second = node_settings
    async with serving(first) as plane:
        await deploy(plane, trust="low")
        await plane.operations.write_file(ADMIN, "c", "file", b"hostile")
        await plane.sessions.stop("c")
        [snapshot] = (await plane.snapshots.page(ADMIN, "c")).items
        assert snapshot.archived
    async with serving(second, None) as plane:
        with pytest.raises(CarrelError) as caught:
            await plane.snapshots.fork(ADMIN, "c", "new", snapshot.id)
        assert caught.value.code in REFUSED
        await refused(plane, {})
    async with serving(second) as plane:
        new = await plane.snapshots.fork(ADMIN, "c", "new", snapshot.id)
        assert (new.provider, new.trust, new.node) == ("strong", Trust.LOW, "b")
        assert (
            await plane.operations.run_command(ADMIN, "new", CommandRequest(command="cat file"))
        ).stdout == "hostile"


async def test_a_sandbox_is_adopted_by_its_own_provider_or_ended(settings: Settings) -> None:
    async with serving(settings) as plane:
        await deploy(plane, trust="low")
        await killed(plane)
        async with serving(settings) as other:
            assert other.recovered.adopted == 1
            box = await other.sessions.find("c")
            assert (box.provider.name, box.record.trust) == ("strong", Trust.LOW)
            await killed(other)
            async with serving(settings, None) as without:
                assert (without.recovered.adopted, without.recovered.ended) == (0, 1)
                assert not await box.provider.alive(box.handle)
                await refused(without, {})


async def test_files_of_an_ended_session_are_trusted_no_more_than_before(settings: Settings) -> None:
    async with serving(settings) as plane:
        await deploy(plane, trust="low")
        await plane.operations.write_file(ADMIN, "c", "file", b"hostile")
        await plane.sessions.terminate(ADMIN, "c")
        again = await deploy(plane)
        assert (again.provider, again.trust) == ("strong", Trust.LOW)
        await plane.sessions.terminate(ADMIN, "c")
    async with serving(settings, None) as plane:
        await refused(plane, {})
        assert (await deploy(plane, trust="medium")).provider == "namespace", "the caller says what it trusts"
        await plane.sessions.terminate(ADMIN, "c", delete_workspace=True)
        assert (await deploy(plane)).trust is Trust.MEDIUM


async def test_trust_chooses_the_network_of_a_request_that_names_none(settings: Settings) -> None:
    sandbox = settings.sandbox.model_copy(update={"network": Network.ALLOWLIST})
    async with serving(settings.model_copy(update={"sandbox": sandbox})) as plane:
        for trust, network in ((Trust.HIGH, "allowlist"), (Trust.MEDIUM, "allowlist"), (Trust.LOW, "none")):
            assert (await deploy(plane, f"c-{trust}", trust=trust)).network == network
        assert (await deploy(plane, "c-asked", trust="low", network="allowlist")).network == "allowlist"
        await plane.sessions.stop("c-medium")
        assert (await deploy(plane, "c-medium")).network == "allowlist", "a session keeps its network"
        await plane.sessions.stop("c-medium")
        assert (await deploy(plane, "c-medium", trust="low")).network == "none", "unless it is trusted less"
    rules = Path(settings.data_dir, "settings.json")
    rules.write_text('{"permissions": {"allow": ["network(outbound:a.example)"]}}')
    policy = settings.policy.model_copy(update={"settings_file": str(rules)})
    async with serving(settings.model_copy(update={"policy": policy})) as plane:
        assert (await deploy(plane, "d", trust="low")).network == "allowlist", "the policy has the last word"
        assert (await deploy(plane, "e", trust="low", network="none")).network == "none"
