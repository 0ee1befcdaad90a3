"""Slots of the Docker provider: what a claim adds, what a slot shows to others, and what is left after a kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.images import image
from tests.support.sandboxes import until

from carrel.errors import PlatformError
from carrel.isolation import cgroups, rootfs
from carrel.models import Network
from carrel.providers import Masks
from carrel.providers.docker import DockerProvider
from carrel.testing import Harness, workspaces_in
from carrel.testing.harness import Running


@pytest.fixture
async def harness(docker, bundles, tmp_path):
    for name in ("run", "ws", "images"):
        (tmp_path / name).mkdir()
    images = str(tmp_path / "images")
    harness = Harness(
        lambda: DockerProvider(str(tmp_path / "run"), str(bundles), socket_path=docker.socket, images=images),
        workspaces_in(str(tmp_path / "ws")),
        images,
    )
    yield harness
    await harness.close()
    assert docker.objects() == []
    assert not (tmp_path / "run/docker").exists()


SLOT = f"slot-{os.getpid()}"
"""Groups are found by the id of a sandbox, on the whole host."""


async def slot_of(harness, launch, id=SLOT):
    return await harness.provider.start_slot(replace(harness.provider.slot_for(launch), id=id))


LISTENING = "00010000"


def sockets(pid):
    """The Unix sockets with a name in the network of a process."""
    lines = Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
    return [fields for line in lines if len(fields := line.split()) > 7]


def mounts(pid):
    lines = [line.split(" ") for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    return {line[4]: set(line[5].split(",")) for line in lines}


async def test_a_slot_becomes_the_sandbox_of_its_owner(harness):
    masks = Masks(programs=("base64",), hidden=("/workspace/*.key",), readonly=("/workspace/docs/**",))
    terms = {"memory_mb": 96, "cpus": 0.5, "processes": 40, "disk_mb": 4, "env": {"OWNER": "me"}, "masks": masks}
    launch = harness.launch(network=Network.ALLOWLIST, **terms)
    other = harness.launch(network=Network.NONE, memory_mb=64)
    assert harness.provider.slot_for(launch) == harness.provider.slot_for(other)  # one kind of slot for both
    (Path(launch.workspace) / "docs").mkdir()
    (Path(launch.workspace) / "docs/a").write_text("text")
    (Path(launch.workspace) / "a.key").write_text("key")
    slot = await slot_of(harness, launch)
    assert (slot["id"], slot["egress"], await harness.provider.alive(slot)) == (SLOT, False, True)
    assert await harness.provider.running() == [SLOT]
    pid = int(slot["pid"])

    # Nobody can reach it, and nothing of anybody is in it.
    assert not {"/workspace", "/run/secrets"} & mounts(pid).keys()
    assert not Path(str(slot["socket"])).exists()
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6", "udp")]
    assert tables == [[], [], []]
    assert not [line for line in sockets(pid) if line[3] == LISTENING]
    assert (Path(str(slot["socket"])).parent.stat().st_mode & 0o777) == 0o700
    async with harness.sandbox() as neighbour:
        code = "ls /run/carrel/ /run/carrel/private /proc/1/root 2>&1; grep -c . /proc/net/unix; ls -d /proc/[0-9]*"
        said = (await neighbour.run(code)).stdout
        assert said.count("Permission denied") == 3 and "/proc/1\n" in said

    handle = await harness.provider.claim(slot, launch)
    box = Running(handle, launch.workspace)
    try:
        assert (handle["id"], handle["pid"], handle["egress"]) == (SLOT, pid, True)
        for place, wanted in {"/workspace": {"rw"}, "/run/secrets": {"ro", "noexec"}, "/run/carrel": {"ro"}}.items():
            assert {"nosuid", "nodev", *wanted} <= mounts(pid)[place], place
        assert "/run/carrel/private/secrets" not in mounts(pid)
        assert [(line[3], line[7]) for line in sockets(pid)] == [(LISTENING, "socket")]  # no path of the host
        said = await box.run(
            "echo $OWNER; pwd; cat docs/a; df -m --output=size /tmp /dev/shm | tail -n2 | tr -d ' \\n'; touch /tmp/x"
        )
        assert (said.stdout, said.stderr) == ("me\n/workspace\ntext248", "")
        said = await box.run("base64 x; cat a.key; echo b > docs/a; head -c 5M /dev/zero > big; exit 3")
        assert (said.stdout, said.exit_code) == ("", 3)
        assert [word in said.stderr for word in ("Permission denied", "Read-only file system")] == [True, True]
        assert os.path.getsize(f"{launch.workspace}/big") == 4 << 20
        assert limits_of(pid) == {"memory": 96 << 20, "processes": 41, "cpu": 0.5}
        listener = await harness.provider.way_out(handle)
        assert listener is not None
        with socket.socket(fileno=listener) as outside:
            asked = asyncio.ensure_future(
                box.run(["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/3128; echo hi >&3; cat <&3"])
            )
            outside.setblocking(False)
            connection, _ = await asyncio.get_running_loop().sock_accept(outside)
            connection.close()
            await asked
    finally:
        box.connection.close()
        await harness.provider.remove(handle)
    assert Path(launch.workspace, "docs/a").read_text() == "text"


def limits_of(pid):
    """The limits that hold for a process by its own cgroups."""
    places = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, place = line.split(":", 2)
        places |= dict.fromkeys(names.split(",") if names else [""], place)
    lines = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    roots = {}
    for line in lines:
        if "cgroup" in line:
            roots |= dict.fromkeys(line[-1].split(","), line[4])
        elif "cgroup2" in line:
            roots.setdefault("", line[4])

    def text(controller, one, two):
        if controller in roots and controller in places:
            return Path(roots[controller] + places[controller], one).read_text().split()
        return Path(roots[""] + places[""], two).read_text().split()

    memory = int(text("memory", "memory.limit_in_bytes", "memory.max")[0])
    processes = int(text("pids", "pids.max", "pids.max")[0])
    quota = text("cpu", "cpu.cfs_quota_us", "cpu.max")
    period = quota[1] if len(quota) > 1 else text("cpu", "cpu.cfs_period_us", "cpu.max")[0]
    return {"memory": memory, "processes": processes, "cpu": int(quota[0]) / int(period)}


async def test_a_slot_ends_with_its_server_and_cannot_be_claimed_by_another(harness):
    launch = harness.launch()
    slot = await slot_of(harness, launch)
    other = harness.make_provider()
    try:
        with pytest.raises(PlatformError, match="cannot become"):
            await other.claim(dict(slot), launch)  # which removes it
        assert await other.running() == []
        with pytest.raises(PlatformError):
            await harness.provider.claim(slot, launch)
    finally:
        await other.close()
    slot = await slot_of(harness, launch, "slot-2")
    (found,) = harness.provider._slots.values()
    found.supervisor.close()  # as the kernel does when the server ends

    async def ended():
        return not await harness.provider.alive(slot)

    await until(ended, what="the end of the slot")
    assert await harness.provider.running() == ["slot-2"]
    await harness.provider.remove(slot)


async def test_a_container_that_is_removed_before_it_gets_its_mounts_has_ended(harness, docker):
    launch = harness.launch()
    slot = await slot_of(harness, launch)
    words = ["docker", "--host", f"unix://{docker.socket}", "rm", "-f", docker.objects()[0]]
    subprocess.run(words, check=True, capture_output=True)
    with pytest.raises(PlatformError, match="ended as soon as it had started"):
        await harness.provider.claim(slot, launch)


async def test_a_slot_that_nobody_claimed_ends_with_its_provider(harness):
    provider = harness.make_provider()
    launch = harness.launch()
    slot = await provider.start_slot(replace(provider.slot_for(launch), id=SLOT))
    await provider.close()
    assert not await harness.provider.alive(slot)
    assert await harness.provider.running() == []


@pytest.mark.parametrize("evil", ["link", "file"])
async def test_an_image_cannot_lead_the_workspace_elsewhere(harness, debian_root, tmp_path, evil):
    root = tmp_path / "images/evil"
    (root / "etc").mkdir(parents=True)
    for name in ("workspace", "tmp", "home"):
        (root / name).symlink_to("/etc") if evil == "link" else (root / name).write_text("a file")
    (root / "run").symlink_to("workspace")
    launch = harness.launch(image=image(root))
    Path(launch.workspace, "mine").write_text("mine")
    async with harness.sandbox(launch.workspace, image=image(root)) as box:
        pid = int(box.handle["pid"])
        assert Path(f"/proc/{pid}/root/workspace/mine").read_text() == "mine"
        assert sorted(os.listdir(f"/proc/{pid}/root/etc")) != ["mine"]
        assert {"/workspace", "/run/secrets", "/tmp", "/home/agent"} <= mounts(pid).keys()
        assert await box.read("mine") == b"mine"
    assert os.listdir(root / "etc") == []


async def test_what_stands_in_the_way_of_a_late_mount_is_refused(harness):
    """Should a root have a link where the workspace belongs, by whatever way, the claim fails and leaves nothing."""
    launch = harness.launch()
    slot = await slot_of(harness, launch)
    place = f"/proc/{slot['pid']}/root"
    subprocess.run(["nsenter", "-t", str(slot["pid"]), "-m", "mount", "-o", "remount,rw", "/"], check=True)
    os.rmdir(f"{place}/workspace")
    os.symlink("/tmp", f"{place}/workspace")
    with pytest.raises(PlatformError, match="nothing can be mounted at /workspace"):
        await harness.provider.claim(slot, launch)
    assert os.listdir(launch.workspace) == []


async def test_a_root_that_is_built_while_another_task_cleans_up_is_whole(harness, monkeypatch):
    """Only directories that a killed server left are removed; else the image of the root would lack what was removed."""
    building, go, built = threading.Event(), threading.Event(), rootfs.apply_plan

    def built_slowly(plan, folder):
        built(plan, folder)
        building.set()
        assert go.wait(60)

    monkeypatch.setattr(rootfs, "apply_plan", built_slowly)
    launch = harness.launch()
    starting = asyncio.create_task(slot_of(harness, launch))
    assert await asyncio.to_thread(building.wait, 60)
    cleaning = asyncio.create_task(harness.provider.clean())
    await asyncio.wait({cleaning}, timeout=0.5)
    go.set()
    await cleaning
    handle = await harness.provider.claim(await starting, launch)
    assert "/workspace" in mounts(int(handle["pid"]))
    await harness.provider.remove(handle)


STEPS = ("control", "created", "started", "connected", "confined", "attached", "limited", "masked", "begun", "claimed")
SOME = ("created", "started", "confined", "limited", "begun")
"""The steps at which a server is killed in every run of the tests; `make kills` does it at all."""
KILLED = """
import asyncio, json, os, signal, sys
from dataclasses import replace
from carrel.control.supervisor.connection import SupervisorConnection
from carrel.models import Network
from carrel.providers import Masks
from carrel.providers.base import Launch
from carrel.providers import control_directory
from carrel.providers.docker import late_parts, masking
from carrel.providers.docker.engine import Engine
from carrel.providers.docker.provider import DockerProvider
from carrel.providers.links import LocalLink

run, bundles, socket, workspace, step, SLOT = sys.argv[1:]

def then(owner, name, step_there):
    original = getattr(owner, name)
    async def later(*args, **kwargs):
        answer = await original(*args, **kwargs)
        if step == step_there(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer
    def now(*args, **kwargs):
        answer = original(*args, **kwargs)
        if step == step_there(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer
    setattr(owner, name, later if asyncio.iscoroutinefunction(original) else now)

REQUESTS = {"create": "created", "start": "started", "update": "limited"}
then(Engine, "post", lambda _self, path, *_: REQUESTS.get(path.rpartition("/")[2]))
then(control_directory.ControlDirectory, "create", lambda *_: "control")
then(control_directory.WaitingSupervisor, "begin", lambda *_: "begun")
then(late_parts, "confine", lambda *_: "confined")
then(late_parts, "attach", lambda *_: "attached")
then(masking.Masking, "apply", lambda *_: "masked")
import carrel.providers.docker.provider as own
then(own, "waiting_supervisor", lambda *_: "connected")

async def main():
    provider = DockerProvider(run, bundles, socket_path=socket)
    masks = Masks(programs=("base64",))
    launch = Launch("owner", workspace, Network.ALLOWLIST, memory_mb=128, masks=masks)
    slot = await provider.start_slot(replace(provider.slot_for(launch), id=SLOT))
    handle = await provider.claim(slot, launch)
    connection = SupervisorConnection(LocalLink(handle["socket"]))
    body = {"command": "until test -e go; do sleep 0.05; done; echo done", "timeout": 300}
    info = await connection.request_json("POST", "/commands", body)
    print(json.dumps([handle, info["id"]]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def killed_at(step, harness, docker, bundles, tmp_path):
    """Run a server that is killed at a step; return the workspace and what it has said."""
    workspace = harness.workspace()
    words = [sys.executable, "-c", KILLED, str(tmp_path / "run"), str(bundles), docker.socket, workspace, step, SLOT]
    process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == -signal.SIGKILL
    return workspace, said


@pytest.mark.parametrize("step", STEPS[:-1] if os.environ.get("CARREL_KILLS") else SOME)
async def test_nothing_is_left_of_a_server_that_was_killed(harness, docker, bundles, tmp_path, step):
    """At every step of a slot's start and of its claim. What runs then is a slot without a server, which ends by itself,
    or a sandbox without a record, which recovery ends.
    """
    workspace, said = await killed_at(step, harness, docker, bundles, tmp_path)
    assert said == b""
    for id in await harness.provider.running():
        assert id == SLOT
        await harness.provider.remove({"provider": "docker", "id": id, "socket": ""})
    assert await harness.provider.running() == []
    assert os.listdir(workspace) == [] and workspace not in Path("/proc/self/mountinfo").read_text()


async def test_a_claimed_container_outlives_its_server(harness, docker, bundles, tmp_path):
    workspace, said = await killed_at("claimed", harness, docker, bundles, tmp_path)
    handle, command = json.loads(said)
    assert await harness.provider.running() == [SLOT] and await harness.provider.alive(handle)
    box = Running(handle, workspace)
    try:
        Path(workspace, "go").touch()
        assert (await box.result(command)).stdout == "done\n"
        assert (await box.run("base64 x")).exit_code == 126
        listener = await harness.provider.way_out(handle)
        assert listener is not None
        os.close(listener)
        assert cgroups.usage_of(handle["pid"])["memory_bytes"] < 128 << 20
    finally:
        box.connection.close()
        await harness.provider.remove(handle)
