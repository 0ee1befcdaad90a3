"""One virtual machine, started once, whose server has gone since: what it can do, and how its programs are confined."""

import asyncio
import os
import signal
import socket
import stat
from pathlib import Path

import pytest
from tests.support import microvm

from carrel.isolation import ids
from carrel.isolation.masks import Masks
from carrel.models import Network
from carrel.providers import groups
from carrel.providers.base import Launch
from carrel.testing.harness import Running, workspaces_in

DISK_MB, SLOW_S = 4, 120
ID = f"machine-{os.getpid()}"
"""Groups are found by the id of a sandbox, on the whole host: two runs of these tests need two."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory, bundles):
    place = tmp_path_factory.mktemp("m")
    for name in ("run", "ws"):
        (place / name).mkdir()

    def provider():
        return microvm.usable(str(bundles), str(place / "run"))

    async def start():
        first = provider()
        launch = Launch(
            ID,
            workspaces_in(str(place / "ws"))("eph-machine"),
            Network.ALLOWLIST,
            cpus=1,
            memory_mb=256,
            disk_mb=DISK_MB,
            processes=64,
            masks=Masks(programs=("base64",), readonly=("/workspace/kept",), refusal={"base64": "no"}),
        )
        (Path(launch.workspace) / "kept").write_bytes(b"as it was")
        os.chown(Path(launch.workspace) / "kept", 1000, 1000)
        handle = await first.start(launch)
        await first.close()
        return launch, handle

    async def remove(handle):
        last = provider()
        await last.remove(handle)
        assert not await last.running()
        await last.close()

    launch, handle = asyncio.run(start())
    yield provider, launch, handle
    asyncio.run(remove(handle))
    assert not list(groups.find(ID))
    assert not [each for each in (place / "run").rglob("*") if not each.is_dir()]


@pytest.fixture
async def machine(ground):
    running = Running(ground[2], ground[1].workspace)
    yield running
    running.connection.close()


def processes():
    """The keeper, the file server and QEMU, by their names."""
    pids = {pid for group, _ in groups.find(ID) for pid in groups.processes(group)}
    names = {"keeper": "python", "server": "virtiofsd", "machine": "qemu"}
    found = {
        name: [pid for pid in pids if word in os.path.basename(os.readlink(f"/proc/{pid}/exe"))]
        for name, word in names.items()
    }
    assert all(len(each) == 1 for each in found.values()) and len(pids) == 3, found
    return {name: pid for name, [pid] in found.items()}


async def test_the_agent_has_a_kernel_of_its_own_and_no_power_there(machine):
    script = "id -u; uname -r; cut -d: -f1 /proc/net/dev | tail -n +3 | tr -d ' '; grep ^Cap /proc/self/status; "
    script += "ls /proc | grep -c '^[0-9]'; touch /usr/x 2>&1; echo x > /proc/sys/kernel/hostname; cat /proc/1/cgroup"
    said = (await machine.run(script, timeout=SLOW_S)).stdout.splitlines()
    assert said[0] == "1000"
    assert said[1] != os.uname().release and said[1] in microvm.find_kernel()
    assert said[2] == "lo"
    assert all(line.split()[1].strip("0") == "" for line in said[3:8]), said
    assert int(said[8]) < 10, "processes of the kernel or of PID 1 are in sight"
    assert "touch: cannot touch '/usr/x'" in said[9] and said[-1] == "0::/"


async def test_files_on_the_host_have_one_owner_and_no_power(machine):
    script = "echo a > plain; chmod u+s plain; chmod g+s .; mknod dev c 1 3; mkdir d; ln -s /etc l; "
    script += "head -c 20M /dev/zero > big; chown 0:0 plain; base64 x; echo x > kept; true"
    await machine.run(script, timeout=SLOW_S)
    found = {path.name: path.lstat() for path in Path(machine.workspace).iterdir()}
    assert {"plain", "d", "l", "big", "kept"} <= found.keys() and "dev" not in found
    for name, status in {**found, ".": os.stat(machine.workspace)}.items():
        assert (status.st_uid, status.st_gid) == (1000, 1000), name
        assert not status.st_mode & (stat.S_ISUID | stat.S_ISGID), name
    assert found["big"].st_size <= DISK_MB << 20
    assert (Path(machine.workspace) / "kept").read_bytes() == b"as it was"


async def test_masks_hold(machine):
    result = await machine.run("/usr/bin/base64 --version", timeout=SLOW_S)
    assert result.exit_code == 126 and "no" in result.stderr


async def test_large_answers_and_small_ones_side_by_side(machine):
    data = os.urandom(3 << 20)
    (Path(machine.workspace) / "large").write_bytes(data)
    os.chown(Path(machine.workspace) / "large", 1000, 1000)
    read, *said = await asyncio.gather(
        machine.read("large"), *(machine.run(f"echo {number}", timeout=SLOW_S) for number in range(4))
    )
    assert read == data
    assert [each.stdout for each in said] == [f"{number}\n" for number in range(4)]


async def test_the_way_out_is_a_socket_of_the_host(machine, ground):
    provider = ground[0]()
    listener = socket.socket(fileno=await provider.way_out(ground[2]))
    with listener:
        listener.setblocking(False)
        knock = "exec 3<>/dev/tcp/127.0.0.1/${http_proxy##*:}; echo hello >&3; cat <&3"
        command = await machine.start(["bash", "-c", knock], timeout=SLOW_S)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(SLOW_S):
            accepted, _ = await loop.sock_accept(listener)
            with accepted:
                accepted.setblocking(False)
                assert await loop.sock_recv(accepted, 100) == b"hello\n"
                await loop.sock_sendall(accepted, b"answer\n")
        assert (await machine.result(command.id)).stdout == "answer\n"
    await provider.close()


def test_its_programs_are_confined(ground):
    users = {}
    for name, pid in processes().items():
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        users[name] = int(status["Uid"].split()[0])
        assert len(set(status["Uid"].split() + status["Gid"].split())) == 1 and not status["Groups"].strip()
        assert {status[each].strip("0") for each in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {""}, name
        assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2", name
        for space in ("mnt", "net", "ipc", "uts", *(() if name == "keeper" else ("pid",))):
            assert os.readlink(f"/proc/{pid}/ns/{space}") != os.readlink(f"/proc/self/ns/{space}"), (name, space)
        assert set(Path(f"/proc/{pid}/net/dev").read_text().split()[0:]) & {"eth0:", "docker0:"} == set()
    assert users["machine"] == users["keeper"] >= ids.FIRST
    assert users["server"] == users["keeper"] + 1000, "the file servers of all machines are one user of the host"
    pids = processes()
    public = {"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "dev", "proc", "tmp"}
    assert set(os.listdir(f"/proc/{pids['keeper']}/root")) == {"control"}
    assert set(os.listdir(f"/proc/{pids['machine']}/root")) <= public | {"kernel", "initramfs"}
    served = f"/proc/{pids['server']}/root"
    assert os.path.isdir(f"{served}/etc/carrel") and not os.path.exists(served + __file__)


async def test_another_server_finds_it_and_what_it_does(machine, ground):
    provider = ground[0]()
    assert await provider.alive(ground[2]) and await provider.running() == [ID]
    used = (await provider.resources([ground[2]]))[ID]
    assert (used.memory_bytes or 0) > 64 << 20 and (used.cpu_s or 0) > 0
    command = await machine.start("sleep 0.1; echo done")
    again = Running(ground[2], machine.workspace)
    assert (await again.result(command.id)).stdout == "done\n"
    again.connection.close()
    await provider.close()


async def test_zz_all_of_it_ends_with_its_keeper(ground):
    ends = {name: os.pidfd_open(pid) for name, pid in processes().items()}
    signal.pidfd_send_signal(ends["keeper"], signal.SIGKILL)
    loop = asyncio.get_running_loop()
    for name, end in ends.items():
        gone = loop.create_future()
        loop.add_reader(end, gone.set_result, None)
        async with asyncio.timeout(30):
            await gone
        loop.remove_reader(end)
        os.close(end)
        assert name
    provider = ground[0]()
    assert not await provider.alive(ground[2])
    await provider.close()
