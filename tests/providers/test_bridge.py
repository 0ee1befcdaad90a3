"""User-mode NAT: what is reached by it, and that a bridge ends with its sandbox, whoever else has died."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.sandboxes import KINDS, House, parent, provider, until

from carrel.errors import PlatformError, Unsupported
from carrel.isolation import cgroups, probe
from carrel.models import Network
from carrel.providers.bridge import Bridges

pytestmark = pytest.mark.skipif(
    "namespace" not in KINDS or not probe.host().bridges, reason="this host cannot make bridges: see carrel doctor"
)
READ = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).recv(100).decode())"


@pytest.fixture
async def mine(houses: dict[str, House]) -> AsyncIterator[House]:
    house = House("namespace", houses["namespace"].directory)
    yield house
    await house.provider.close()


@pytest.fixture
def outward() -> Iterator[str]:
    """An address of the host that is not its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no address but its loopback")
        yield one.getsockname()[0]


def runs(handle: dict[str, object]) -> bool:
    pid = handle["bridge_pid"]
    assert isinstance(pid, int)
    return cgroups.start_time(pid) == handle["bridge_start_time"]


async def test_a_bridge_leads_out_but_not_to_the_host_s_loopback(mine: House, outward: str) -> None:
    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    there = await asyncio.start_server(greet, outward, 0)
    loopback = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with there, loopback, mine.box(network=Network.BRIDGE) as box:

        async def read(address: str, server: asyncio.Server) -> str:
            port = str(server.sockets[0].getsockname()[1])
            return str((await box.supervisor.run(["python3", "-c", READ, address, port]))["stdout"])

        assert await read(outward, there) == "hello\n"
        for address in ("127.0.0.1", "10.0.2.2", "10.0.2.3"):
            assert await read(address, loopback) == ""
        assert (await box.supervisor.run("cat /etc/resolv.conf"))["stdout"] == "nameserver 10.0.2.3\n"
        assert (await box.supervisor.run("env | grep -i proxy"))["stdout"] == ""
        assert await mine.provider.way_out(box.handle) is None


async def test_a_bridge_is_confined_and_holds_nothing_of_ours(mine: House) -> None:
    async with mine.box(network=Network.BRIDGE) as box:
        pid = box.handle["bridge_pid"]
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
        assert (found["Seccomp"], found["NoNewPrivs"]) == ("2", "1")
        assert int(found["CapEff"], 16) & ~(1 << 10) == 0, "more than binding low ports"
        assert os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
        names = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert not [name for name in names if name.startswith("/") and not name.startswith(("/dev/", "/memfd:"))], names


async def test_a_bridge_has_no_power_inside(mine: House) -> None:
    script = """
import fcntl, socket, struct
for family, kind, protocol in ((2, 3, 1), (17, 3, 3), (16, 3, 16)):
    try:
        socket.socket(family, kind, protocol)
        print("made", family)
    except OSError:
        pass
try:
    fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, struct.pack("16sh14x", b"tap0", 0))
    print("changed")
except OSError:
    pass
print("done")
"""
    async with mine.box(network=Network.BRIDGE) as box:
        assert (await box.supervisor.run(["python3", "-c", script]))["stdout"] == "done\n"


async def test_a_bridge_ends_with_a_sandbox_that_another_provider_object_removes(mine: House) -> None:
    launch = mine.launch(network=Network.BRIDGE)
    handle = await mine.provider.start(launch)
    assert runs(handle)
    later = mine.another_provider()
    await later.remove(handle)
    assert not runs(handle)
    await later.close()
    await mine.provider.remove(handle)
    shutil.rmtree(launch.workspace)


async def test_a_bridge_ends_with_a_sandbox_that_dies(mine: House) -> None:
    launch = mine.launch(network=Network.BRIDGE)
    handle = await mine.provider.start(launch)
    os.kill(int(handle["pid"] or 0), signal.SIGKILL)
    await until(lambda: not runs(handle), what="the end of the bridge")
    await mine.provider.remove(handle)
    shutil.rmtree(launch.workspace)


async def test_a_bridge_ends_when_the_zygote_dies_and_the_sandbox_is_cut_off() -> None:
    async with provider("namespace") as house:
        handle = await house.provider.start(house.launch(network=Network.BRIDGE))
        os.kill(parent(int(handle["pid"] or 0)), signal.SIGKILL)
        await until(lambda: not runs(handle), what="the end of the bridge")
        await house.provider.remove(handle)


async def test_a_bridge_is_left_to_its_sandbox_by_a_provider_that_closes(mine: House) -> None:
    first = mine.another_provider()
    launch = mine.launch(network=Network.BRIDGE)
    handle = await first.start(launch)
    await first.close()
    assert runs(handle)
    await mine.provider.remove(handle)
    assert not runs(handle)
    os.waitpid(int(handle["bridge_pid"] or 0), 0)  # it was this process's child all the same
    shutil.rmtree(launch.workspace)


async def test_a_start_that_is_cancelled_leaves_no_bridge(mine: House) -> None:
    before = set(await mine.provider.running())
    for turn in range(6):
        launch = mine.launch(network=Network.BRIDGE)
        start = asyncio.create_task(mine.provider.start(launch))
        for _ in range(turn * 3):
            await asyncio.sleep(0.002)
        start.cancel()
        try:
            await mine.provider.remove(await start)
        except asyncio.CancelledError:
            pass

        async def quiet() -> bool:
            return set(await mine.provider.running()) <= before

        await until(quiet)
        shutil.rmtree(launch.workspace)


async def test_a_bridge_that_cannot_be_built_says_why_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with provider("namespace") as house:
        launch = house.launch(network=Network.BRIDGE)
        monkeypatch.setattr(probe, "PATH", ("/nowhere",))
        with pytest.raises(PlatformError, match="slirp4netns could not be run"):
            await house.provider.start(launch)
        assert await house.provider.running() == []
        assert [name for name in os.listdir(house.directory / "run") if not name.startswith("zygote-")] == []
        monkeypatch.undo()
        async with house.box(network=Network.BRIDGE) as box:
            assert runs(box.handle)


async def test_what_is_no_network_cannot_be_bridged() -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(PlatformError, match="slirp4netns did not start: "):
            await Bridges().build(null, read_end, null)
    finally:
        for descriptor in (null, read_end, write_end):
            os.close(descriptor)


async def test_a_bridge_is_refused_where_it_is_not_promised(houses: dict[str, House]) -> None:
    house = House("process", houses["process"].directory)
    with pytest.raises(Unsupported, match="network_bridge"):
        await house.provider.start(house.launch(network=Network.BRIDGE))
    await house.provider.close()
