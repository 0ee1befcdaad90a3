"""Sandboxes as pods: what conformance does not say. The cluster is real, and so are the walls that are tested."""

from __future__ import annotations

import asyncio
import os
import secrets
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.cluster.ground import Cluster, Ground
from tests.support.remote_provider import identities

from carrel.errors import CarrelError, PlatformError, ProviderUnavailable, Unsupported
from carrel.models import Network
from carrel.providers.base import FolderMounts, HostMount, Launch
from carrel.providers.kubernetes.provider import KubernetesProvider
from carrel.providers.links import RemoteAddress, RemoteLink
from carrel.testing import Harness, Running, workspaces_in

DEADLINE_S = 60
METADATA = "169.254.169.254"


def harness_of(ground: Ground) -> Harness:
    return Harness(ground.provider, workspaces_in(str(ground.volume)))


@pytest.fixture
async def harness(ground):
    found = harness_of(ground)
    yield found
    await found.close()
    assert ground.left() == []


@asynccontextmanager
async def reached(provider: KubernetesProvider, handle, workspace: str):
    box = Running(handle, workspace, provider.link(handle))
    try:
        yield box
    finally:
        box.connection.close()
        await provider.remove(handle)


async def until(holds):
    async with asyncio.timeout(DEADLINE_S):
        while not await holds():
            await asyncio.sleep(0.1)


async def said(box: Running, command: str) -> str:
    return (await box.run(command)).stdout.strip()


@pytest.fixture(scope="session")
def plain(grounds):
    return grounds(agent_sandbox=False)


async def test_without_agent_sandbox_a_sandbox_is_a_plain_pod(plain):
    harness = harness_of(plain)
    async with harness.sandbox(memory_mb=256) as box:
        assert await said(box, "echo here > file; cat file") == "here"
        assert [each.partition("/")[0] for each in plain.left()] == ["Pod"]
    await harness.close()
    assert plain.left() == []


async def test_a_pod_keeps_to_the_restricted_standard(harness, ground):
    async with harness.sandbox() as box:
        status = await said(box, "cat /proc/1/status /proc/self/status")
        for fact in ("NoNewPrivs:\t1", "Seccomp:\t2", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000"):
            assert status.count(fact) == 2, fact
        assert await said(box, "id -u; id -g") == "1000\n1000"
        assert (await box.run("touch /usr/x /etc/x /opt/carrel/x")).exit_code != 0
        assert await said(box, "ls -d /var/run/secrets/kubernetes.io /run/secrets/kubernetes.io 2>/dev/null") == ""
        assert "KUBERNETES" not in await said(box, "env; cat /proc/self/environ | tr '\\0' '\\n'")


async def test_the_credentials_of_slots_are_not_left_for_agents(harness):
    async with harness.sandbox() as box:
        assert await said(box, "ls -A /run/carrel") == ""
        assert await said(box, "grep -rlE 'BEGIN (EC )?PRIVATE' /run /tmp /home /dev/shm /opt/carrel 2>/dev/null") == ""


async def reached_directly(cluster: Cluster, box: Running, other: Running) -> list[str]:
    """What a sandbox reaches without the proxy: the API server, the node, the kubelet, another pod, metadata."""
    api = cluster.get("service", "kubernetes")["spec"]["clusterIP"]
    dial = "timeout 3 bash -c 'exec 3<>/dev/tcp/{0}/{1}' 2>/dev/null && echo reached {0}:{1}"
    neighbour = RemoteAddress.parse(str(other.handle["socket"]))
    places = [
        (api, 443),
        ("10.99.0.1", 6443),
        ("10.99.0.1", 10250),
        (neighbour.host, neighbour.port),
        (METADATA, 80),
    ]
    found = await asyncio.gather(*(said(box, dial.format(*place)) for place in places))
    # The same from outside of the pods: these places are there.
    for host, port in places[:4]:
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
    return [each for each in found if each]


async def test_nothing_of_the_cluster_is_reached(harness, cluster):
    async with harness.sandbox() as box, harness.sandbox() as other:
        assert await reached_directly(cluster, box, other) == []


async def test_a_server_of_another_authority_is_refused(harness):
    async with harness.sandbox() as box:
        address = RemoteAddress.parse(str(box.handle["socket"]))
        stranger = identities(seed=b"x" * 32).sandboxes
        with pytest.raises(OSError, match=r"(?i)certificate|handshake|aborted|reset"):
            await RemoteLink(address, stranger.client_context).connect(asyncio.Protocol)
        assert await said(box, "echo still here") == "still here"


async def test_another_server_finds_a_sandbox_and_sees_the_loss_of_its_pod(harness, ground, cluster):
    async with harness.sandbox() as box:
        another = ground.provider("two")
        try:
            assert await another.alive(box.handle)
            link = Running(box.handle, box.workspace, another.link(box.handle))
            assert await said(link, "echo found") == "found"
            link.connection.close()
            assert await another.running() == [box.handle["id"]]
            cluster.kubectl("delete", "pod", str(box.handle["pod"]), "-n", ground.name, "--wait=true")
            # agent-sandbox makes another pod of this name, which is not this sandbox.
            assert not await another.alive(box.handle)
            with pytest.raises(CarrelError):
                await box.connection.request_json("GET", "/health", deadline=5)
        finally:
            await another.close()


async def test_without_an_api_server_a_sandbox_works_on_and_is_not_taken_for_dead(harness, ground):
    nowhere = ground.with_options(kubeconfig=ground.kubeconfig("https://127.0.0.1:1")).provider()
    try:
        async with harness.sandbox() as box:
            assert await nowhere.alive(box.handle)
            assert await said(box, "echo works") == "works"
            with pytest.raises(ProviderUnavailable, match="cannot be reached"):
                await nowhere.remove(box.handle)
        with pytest.raises(ProviderUnavailable, match="cannot be reached"):
            await nowhere.alive(box.handle)
    finally:
        await nowhere.close()


async def test_a_slot_becomes_the_sandbox_of_a_new_workspace(harness, ground):
    provider = harness.provider
    launch = harness.launch(memory_mb=256, env={"NAME": "value"})
    kind = provider.slot_for(launch)
    assert kind == Launch("", "", Network.NONE, memory_mb=256)
    slot = await provider.start_slot(replace(kind, id="slot-1"))
    assert await provider.alive(slot)
    handle = await provider.claim(slot, launch)
    async with reached(provider, handle, launch.workspace) as box:
        assert await said(box, "pwd; echo $NAME; echo kept > file") == "/workspace\nvalue"
        assert await provider.alive(handle)
        with open(os.path.join(launch.workspace, "file")) as file:
            assert file.read() == "kept\n"
    assert os.listdir(launch.workspace) == ["file"]
    assert os.stat(launch.workspace).st_uid == 1000
    os.symlink("file", os.path.join(launch.workspace, "link"))
    assert provider.slot_for(launch) is None, "a workspace with more than a few files starts cold"
    async with harness.sandbox(launch.workspace) as box:
        assert await said(box, "cat file") == "kept"


async def test_a_slot_that_cannot_be_claimed_leaves_the_workspace_as_it_is(harness, ground):
    provider = harness.provider
    launch = harness.launch()
    kind = provider.slot_for(launch)
    slot = await provider.start_slot(replace(kind, id="slot-2"))
    os.symlink("nowhere", os.path.join(launch.workspace, "file"))
    with pytest.raises(PlatformError, match="cannot have the workspace"):
        await provider.claim(slot, launch)
    assert ground.left() == []
    assert os.listdir(launch.workspace) == ["file"]
    await harness.close()
    assert not os.path.exists(ground.volume / ".carrel-slots")


async def test_slots_end_with_their_server(ground):
    harness = harness_of(ground)
    await harness.provider.start_slot(Launch("slot-3", "", Network.NONE))
    assert len(ground.left()) == 2
    await harness.close()
    assert ground.left() == []


async def test_an_image_that_is_not_there_is_named_and_leaves_nothing(ground):
    ground = ground.with_options(image="localhost/nothing:none")
    provider = ground.provider()
    try:
        harness = Harness(lambda: provider, workspaces_in(str(ground.volume)))
        with pytest.raises(PlatformError, match="ErrImageNeverPull"):
            await provider.start(harness.launch())
    finally:
        await provider.close()
    assert ground.left() == []


@pytest.mark.parametrize(
    "more",
    [
        {"folder": FolderMounts(HostMount("/a", "/a", (0, 0)), HostMount("/b", "/b", (0, 0)))},
        {"network": Network.HOST},
        {"processes": 100},
    ],
    ids=["folder", "host", "processes"],
)
async def test_what_is_not_promised_is_refused(harness, ground, more):
    with pytest.raises(Unsupported):
        await harness.provider.start(replace(harness.launch(), **more))
    assert ground.left() == []


async def test_a_workspace_elsewhere_is_refused(harness, ground, tmp_path):
    with pytest.raises(PlatformError, match="not in the shared volume"):
        await harness.provider.start(harness.launch(str(tmp_path)))
    assert ground.left() == []


async def test_a_cancelled_start_leaves_nothing(harness, ground):
    starting = asyncio.ensure_future(harness.provider.start(harness.launch()))

    async def begun() -> bool:
        assert not starting.done()
        return bool(ground.left())

    await until(begun)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert ground.left() == []


@pytest.fixture(scope="session")
def pooled(grounds):
    return grounds(warm_pool=2)


async def test_sandboxes_are_claimed_from_a_warm_pool(pooled, cluster):
    harness = harness_of(pooled)
    first = harness.provider
    launch = harness.launch(memory_mb=256)
    handle = await first.start(launch)
    # As after a kill: another object, which has not made the pools.
    harness.provider = pooled.provider("two")
    async with reached(harness.provider, handle, launch.workspace) as box:
        assert await harness.provider.alive(handle)
        assert not await harness.provider.alive({**handle, "id": "never-was"})
        assert await said(box, "echo kept > file; cat file; touch x; pwd") == "kept\n/workspace"
        assert sorted(os.listdir(launch.workspace)) == ["file", "x"]
        (claim,) = cluster.get("sandboxclaims", "-n", pooled.name)["items"]
        assert claim["status"]["sandbox"]["name"] == handle["pod"]
        assert await harness.provider.running() == [launch.id]
    assert cluster.get("sandboxclaims", "-n", pooled.name)["items"] == []
    async with harness.sandbox(launch.workspace, memory_mb=256) as box:
        assert await said(box, "cat file") == "kept"
    slot = await harness.provider.start_slot(Launch("slot-4", "", Network.NONE, memory_mb=256))
    fresh = harness.launch(memory_mb=256)
    handle = await harness.provider.claim(slot, fresh)
    async with reached(harness.provider, handle, fresh.workspace) as box:
        assert await said(box, "ls -A; echo new") == "new"
    # Credentials are renewed before they end: then pods that have the old ones are in no pool any more.
    pools = {each["metadata"]["name"] for each in cluster.get("sandboxwarmpools", "-n", pooled.name)["items"]}
    harness.provider._credentials_until = 0.0
    async with harness.sandbox(memory_mb=256) as box:
        assert await said(box, "echo renewed") == "renewed"
    found = {each["metadata"]["name"] for each in cluster.get("sandboxwarmpools", "-n", pooled.name)["items"]}
    assert found and not found & pools
    await first.close()
    await harness.close()

    async def nothing_left() -> bool:
        return pooled.left() == []

    await until(nothing_left)
    assert cluster.get("sandboxwarmpools,sandboxtemplates", "-n", pooled.name)["items"] == []
    assert not os.path.exists(pooled.volume / ".carrel-slots")


async def is_bound(cluster: Cluster, ground: Ground) -> bool:
    claim = cluster.get("persistentvolumeclaim", "workspaces", "-n", ground.name)
    return bool(claim["status"].get("phase") == "Bound")


@pytest.fixture(scope="session")
def growing(cluster, grounds):
    """A namespace whose volume has a storage class that allows claims to grow. Nothing carries it out."""
    metadata = {"name": f"grows-{secrets.token_hex(4)}"}
    made = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": metadata}
    made |= {"provisioner": "none.example/none", "allowVolumeExpansion": True}
    cluster.kubectl("apply", "-f", "-", stdin=made)
    yield grounds(storage_class=metadata["name"], volume_max_gb=3)
    cluster.kubectl("delete", "storageclass", metadata["name"])


async def test_the_claim_of_the_volume_is_asked_to_grow(cluster, growing):
    provider = growing.provider()
    try:
        growth = provider.volume_growth()
        await until(lambda: is_bound(cluster, growing))
        assert await growth.look(0.5) is None
        assert await growth.look(0.85) == 2 << 30
        claim = cluster.get("persistentvolumeclaim", "workspaces", "-n", growing.name)
        assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"
        assert await growth.look(0.99) is None, "the first growth has not been carried out"
    finally:
        await provider.close()


async def test_a_claim_that_cannot_grow_says_so(cluster, ground):
    provider = ground.with_options(volume_max_gb=3).provider()
    try:
        await until(lambda: is_bound(cluster, ground))
        with pytest.raises(PlatformError, match=r"(?i)forbidden|only dynamically"):
            await provider.volume_growth().look(0.85)
    finally:
        await provider.close()
