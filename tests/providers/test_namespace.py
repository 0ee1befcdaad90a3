"""What the namespace provider promises of limits, and that it works for an ordinary user too."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.sandboxes import KINDS, ROOT, House, parent, until

from carrel.isolation import landlock, probe
from carrel.isolation.sandbox import PROXY_PORT
from carrel.models import Network
from carrel.providers import Capability

pytestmark = pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")
CONTROLLERS = probe.host().controllers


@pytest.fixture
async def mine(houses: dict[str, House]) -> AsyncIterator[House]:
    house = House("namespace", houses["namespace"].directory)
    yield house
    await house.provider.close()


def test_limits_are_promised_only_where_they_can_be_kept(mine: House) -> None:
    promised = mine.provider.capabilities()
    assert {Capability.FILE_ISOLATION, Capability.NETWORK_NONE, Capability.LIMIT_PROCESSES} <= promised
    assert (Capability.LIMIT_CPUS in promised) is ("cpu" in CONTROLLERS)
    assert {Capability.NETWORK_ALLOWLIST, Capability.NETWORK_HOST} <= promised
    assert (Capability.NETWORK_BRIDGE in promised) is probe.host().bridges


async def test_memory_over_the_limit_is_killed_and_counted(mine: House) -> None:
    async with mine.box(memory_mb=64) as box:
        assert await mine.provider.out_of_memory_kills(box.handle) == 0
        other = await box.supervisor.start("sleep 60")
        result = await box.supervisor.run(["python3", "-c", "x = bytearray(200 << 20); print(len(x))"])
        assert result["stdout"] == ""
        assert (await box.supervisor.info(other))["running"]
        found = (await mine.provider.resources([box.handle]))[str(box.handle["id"])]
        used = found.memory_bytes
        assert used is not None
        assert 0 < used <= 64 << 20
        assert found.memory_peak_bytes is not None
        assert found.memory_peak_bytes >= used
        assert (await box.supervisor.run("echo on"))["stdout"] == "on\n"
        if "memory" in CONTROLLERS:
            assert result["signal"] == "SIGKILL"
            assert await mine.provider.out_of_memory_kills(box.handle) == 1


async def test_a_small_sandbox_remembers_its_commands(mine: House) -> None:
    async with mine.box(memory_mb=64) as box:
        for number in range(3):
            await box.supervisor.run(f"echo {number}")
        assert len((await box.supervisor.ask("GET", "/commands"))["items"]) == 3


@pytest.mark.skipif("cpu" not in CONTROLLERS, reason="this user cannot limit CPU time")
async def test_cpu_below_one_core_is_enforced(mine: House) -> None:
    script = "import time\nb=time.monotonic(); c=time.process_time()\nwhile time.monotonic()-b<1: pass\nprint(time.process_time()-c)"
    async with mine.box(cpus=0.25) as box:
        used = float((await box.supervisor.run(["python3", "-c", script]))["stdout"])
        assert 0 < used < 0.5


async def test_the_number_of_processes_is_limited(mine: House) -> None:
    async with mine.box(processes=20) as box:
        result = await box.supervisor.run("for i in $(seq 40); do sleep 5 & done; wait", timeout=5)
        assert result["exit_code"] != 0
        assert "fork" in result["stderr"].lower()


async def test_a_single_file_cannot_outgrow_the_disk_limit(mine: House) -> None:
    async with mine.box(disk_mb=1) as box:
        await box.supervisor.run("head -c 3000000 /dev/zero > big")
        assert (box.workspace / "big").stat().st_size <= 1 << 20


async def test_usage_of_an_unknown_sandbox_is_not_known(mine: House) -> None:
    handle = {"provider": "namespace", "id": "nobody", "socket": "/nowhere", "pid": 0, "start_time": 0}
    assert await mine.provider.out_of_memory_kills(handle) == 0
    assert await mine.provider.resources([handle]) == {}
    assert not await mine.provider.alive(handle)
    await mine.provider.remove(handle)


async def test_inside_nothing_of_the_host_is_seen(mine: House) -> None:
    async with mine.box() as box:
        supervisor = box.supervisor
        assert (await supervisor.run("hostname"))["stdout"] == "carrel\n"
        assert "host" not in (await supervisor.run("cat /proc/1/cmdline | tr '\\0' ' '"))["stdout"]
        capabilities = (await supervisor.run("grep -E 'Cap|NoNewPrivs|Seccomp:' /proc/self/status"))["stdout"].split()
        assert dict(zip(capabilities[::2], capabilities[1::2], strict=True)) == {
            "CapInh:": "0" * 16,
            "CapPrm:": "0" * 16,
            "CapEff:": "0" * 16,
            "CapBnd:": "0" * 16,
            "CapAmb:": "0" * 16,
            "NoNewPrivs:": "1",
            "Seccomp:": "2",
        }
        assert (await supervisor.run("ls /proc/1/root /proc/1/fd"))["exit_code"] != 0


KNOCK = f"""
import socket, sys
with socket.create_connection(("127.0.0.1", {PROXY_PORT}), 10) as one:
    one.sendall(sys.argv[1].encode())
    print(one.recv(100).decode())
"""


def serve_one(descriptor: int) -> str:
    """Stand for the proxy: answer one connection with what it said, and let go of the socket."""
    with socket.socket(fileno=descriptor) as way_out:
        assert way_out.getsockname() == ("127.0.0.1", PROXY_PORT)
        way_out.settimeout(20)
        connection, _ = way_out.accept()
        with connection:
            said = connection.recv(100)
            connection.sendall(b"heard " + said)
            return said.decode()


async def test_the_way_out_leads_to_whoever_holds_the_socket_and_outlives_them(mine: House) -> None:
    async with mine.box(network=Network.ALLOWLIST) as one, mine.box(network=Network.ALLOWLIST) as two:
        for asked in range(2):  # the second time by another provider object, as after a restart
            provider = mine.another_provider() if asked else mine.provider
            for box, name in ((one, "one"), (two, "two")):
                command = await box.supervisor.start(["python3", "-c", KNOCK, name])  # may well come first
                way_out = await provider.way_out(box.handle)
                assert way_out is not None
                assert not os.get_inheritable(way_out)
                assert await asyncio.to_thread(serve_one, way_out) == name
                assert (await box.supervisor.result(command))["stdout"] == f"heard {name}\n"
            if asked:
                await provider.close()


async def test_a_way_out_that_nobody_waits_for_any_more_is_closed(mine: House) -> None:
    async with mine.box(network=Network.ALLOWLIST) as box:
        before = len(os.listdir("/proc/self/fd"))
        for turns in range(24):
            asked = asyncio.create_task(mine.provider.way_out(box.handle))
            for _ in range(turns % 4):
                await asyncio.sleep(0)
            if turns % 3 == 0:  # the answer is there, and is read in the very turn in which nobody wants it any more
                time.sleep(0.005)
                await asyncio.sleep(0)
            asked.cancel()
            try:
                os.close(await asked or -1)
            except asyncio.CancelledError:
                pass
        way_out = await mine.provider.way_out(box.handle)  # answers come in order: those before have come
        assert way_out is not None
        os.close(way_out)
        assert len(os.listdir("/proc/self/fd")) == before


async def test_without_a_network_only_the_supervisor_itself_answers(mine: House) -> None:
    async with mine.box() as box:
        assert await mine.provider.way_out(box.handle) is None
        ask = f"exec 3<>/dev/tcp/127.0.0.1/{PROXY_PORT}; printf 'GET / HTTP/1.1\\r\\n\\r\\n' >&3; cat <&3"
        result = await box.supervisor.run(["bash", "-c", ask])
        assert result["stdout"].startswith("HTTP/1.1 403 Forbidden (this sandbox has no network")
    assert await mine.provider.way_out(box.handle) is None
    assert await mine.provider.way_out({"provider": "namespace", "id": "nobody", "socket": ""}) is None


async def test_the_agent_cannot_take_the_place_of_the_way_out(mine: House) -> None:
    script = f"""
import os, socket
for host in ("127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1", "::"):
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        one.setsockopt(socket.SOL_SOCKET, option, 1)
        if ":" in host:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            one.bind((host, {PROXY_PORT}))
            one.listen()
            print("taken", host, option)
        except OSError:
            pass
inode = [line.split()[9] for line in open("/proc/net/tcp") if line.split()[1].endswith(":{PROXY_PORT:04X}")]
assert len(inode) == 1
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        places = [f"/proc/{{pid}}/fd/{{fd}}" for fd in os.listdir(f"/proc/{{pid}}/fd")]
        held = [os.readlink(place) for place in places if os.path.lexists(place)]
    except PermissionError:
        assert pid == "1"
    else:
        assert f"socket:[{{inode[0]}}]" not in held, pid
print("done")
"""
    async with mine.box(network=Network.ALLOWLIST) as box:
        result = await box.supervisor.run(["python3", "-c", script])
        assert result["stdout"] == "done\n", result["stderr"]
        held = (
            {os.stat(f"/proc/{box.pid}/fd/{fd}").st_ino for fd in os.listdir(f"/proc/{box.pid}/fd")} if ROOT else set()
        )
        way_out = await mine.provider.way_out(box.handle)
        assert way_out is not None
        assert os.fstat(way_out).st_ino not in held
        os.close(way_out)


async def test_a_way_out_inside_goes_with_its_sandbox_and_not_with_the_provider(mine: House) -> None:
    launch = mine.launch(network=Network.ALLOWLIST)
    handle = await mine.provider.start(launch)
    zygote = parent(int(handle["pid"] or 0))
    before = len(os.listdir(f"/proc/{zygote}/fd"))
    for _ in range(20):
        way_out = await mine.provider.way_out(handle)
        assert way_out is not None
        inode = os.fstat(way_out).st_ino
        os.close(way_out)

    def held() -> bool:
        names = [os.readlink(f"/proc/{zygote}/fd/{fd}") for fd in os.listdir(f"/proc/{zygote}/fd")]
        return f"socket:[{inode}]" in names

    assert held()
    assert len(os.listdir(f"/proc/{zygote}/fd")) < before + 20, "one for each time it was asked for"  # a spare has some
    await mine.provider.remove(handle)
    assert not held()
    shutil.rmtree(launch.workspace)


async def test_on_the_host_s_network_inside_has_no_power_over_it(mine: House) -> None:
    script = """
import fcntl, os, socket, struct
print(os.readlink("/proc/self/ns/net"))
for family, kind, protocol in ((2, 3, 1), (2, 3, 255), (17, 3, 3), (16, 3, 16), (16, 3, 4)):
    try:
        socket.socket(family, kind, protocol)
        print("made", family, kind, protocol)
    except OSError:
        pass
try:
    fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, struct.pack("16sh14x", b"lo", 0x49))
    print("changed loopback")
except OSError:
    pass
for path in ("/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/core/somaxconn"):
    try:
        open(path, "w")
        print("opened", path)
    except OSError:
        pass
print(os.listdir("/sys"), socket.gethostname())
"""
    with open("/etc/resolv.conf", encoding="utf-8") as file:
        resolver = file.read()
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with mine.box(network=Network.HOST) as box:
            result = await box.supervisor.run(["python3", "-c", script])
            assert result["stdout"] == f"{os.readlink('/proc/self/ns/net')}\n[] carrel\n", result
            assert (await box.supervisor.run("cat /etc/resolv.conf"))["stdout"] == resolver
            assert (await box.supervisor.run("echo x > /etc/resolv.conf"))["exit_code"] != 0
            assert (await box.supervisor.run("grep -c Cap.*0000000000000000 /proc/self/status"))["stdout"] == "5\n"
            assert (await box.supervisor.run("env | grep -i proxy"))["stdout"] == ""
            assert await mine.provider.way_out(box.handle) is None
            port = server.getsockname()[1]
            connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
            assert (await box.supervisor.run(["python3", "-c", connect]))["exit_code"] == 0


@pytest.mark.skipif(landlock.abi() < 6, reason="this kernel's Landlock does not know of abstract sockets")
async def test_abstract_sockets_of_the_host_are_out_of_reach_even_on_its_network_inside(mine: House) -> None:
    name = f"carrel-test-{os.urandom(8).hex()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        async with mine.box(network=Network.HOST) as box:
            connect = f"import socket; socket.socket(socket.AF_UNIX).connect(chr(0) + {name!r})"
            result = await box.supervisor.run(["python3", "-c", connect])
            assert "PermissionError" in result["stderr"]


SELECTION = [
    "tests/providers/test_namespace.py",
    "tests/providers/test_bridge.py",
    "tests/providers/test_zygote_provider.py",
    "tests/providers/test_process.py",
    "tests/isolation/test_zygote.py",
    "tests/isolation/test_cgroups.py",
    "tests/supervisor/test_app.py",
    "tests/supervisor/test_mcp_servers.py",
    "tests/supervisor/test_mcp_misbehaviour.py",
]
WORDS = "memory or outlive or fails or inside or execute or terminal or secrets or opened or cancelled or spare or way or bridge or descendants"


@pytest.mark.timeout(660)
@pytest.mark.skipif(not ROOT, reason="this is an ordinary user already")
def test_all_this_works_for_an_ordinary_user(tmp_path: Path) -> None:
    """The checkout may not be readable to others, so it is seen through bind mounts in a mount namespace."""
    repository = Path(__file__).parents[2]
    home = Path(tempfile.mkdtemp(prefix="u"))
    try:
        for name in ("repo", "venv", "tmp"):
            (home / name).mkdir()
        (home / "tmp").chmod(0o777)
        os.mknod(home / "tun", stat.S_IFCHR | 0o666, os.makedev(10, 200))  # as udev makes it; some hosts have none
        (home / "tun").chmod(0o666)
        home.chmod(0o755)
        script = f"""
            set -e
            mount --bind {repository} {home}/repo
            mount --bind {sys.prefix} {home}/venv
            mount --bind {home}/tun /dev/net/tun
            cd {home}/repo
            exec setpriv --reuid 65534 --regid 65534 --clear-groups -- env -i PATH=$PATH HOME={home}/tmp \\
                TMPDIR={home}/tmp PYTHONPATH={home}/repo/src PYTHONDONTWRITEBYTECODE=1 \\
                {home}/venv/bin/python -m pytest -q -p no:cacheprovider --tb=short {" ".join(SELECTION)} -k '{WORDS}'
        """
        run = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert "passed" in run.stdout
    finally:
        shutil.rmtree(home)


async def test_opened_sandbox_ends_with_its_first_process(mine: House) -> None:
    launch = mine.launch()
    handle = await mine.provider.start(launch)
    os.kill(int(handle["pid"] or 0), 9)

    async def gone() -> bool:
        return not await mine.provider.alive(handle)

    await until(gone)
    await mine.provider.remove(handle)
    shutil.rmtree(launch.workspace)
