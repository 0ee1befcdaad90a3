"""Images that try to break out: their files are in the hands of whoever made them, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import images
from tests.support.attacks import answer, words
from tests.support.servers import ROOT

from carrel.isolation import ids, linux
from carrel.primitives.trees import remove_tree

RUN = """
import asyncio, json, os, sys
import httpx
from carrel.errors import CarrelError
from carrel.models import Network
from carrel.providers import Launch, open_providers
from carrel.providers.base import RootImage

async def commands(handle, wanted):
    transport = httpx.AsyncHTTPTransport(uds=handle["socket"])
    async with httpx.AsyncClient(transport=transport, base_url="http://sandbox", timeout=30) as http:
        for command in wanted:
            answer = await http.post("/commands?wait=1", json={"command": command, "timeout": 20})
            yield answer.json()

async def main():
    place, wanted = sys.argv[1], json.loads(sys.stdin.readline())
    provider = open_providers(place + "/run", place + "/ws", allow_process=False, images=place + "/images")["namespace"]
    for name, image in wanted.items():
        root = place + "/images/" + image["root"]
        found, told = os.stat(root), []
        root_image = RootImage(
            root, (found.st_dev, found.st_ino), user=image.get("user", ""), writable=image.get("writable", False)
        )
        launch = Launch(name, place + "/ws/w", Network.NONE, image=root_image, trust=True, processes=60)
        try:
            handle = await provider.start(launch)
            try:
                told = [each async for each in commands(handle, image["commands"])]
            finally:
                await provider.remove(handle)
        except CarrelError as error:
            told = [error.detail]
        print(json.dumps(told), flush=True)
    await provider.close()

asyncio.run(main())
"""
PLACES = ("dev", "envs", "etc", "home", "proc", "run", "sys", "tmp", "var", "workspace")


@pytest.fixture
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="i"))
    directory.chmod(0o755)
    for name in ("run", "ws/w", "images"):
        (directory / name).mkdir(parents=True)
    yield directory
    remove_tree(str(directory))


def run(spawn: Any, place: Path, **wanted: dict[str, object]) -> Iterator[list[Any]]:
    """The answers of the commands in each image, one image after the other; or its error."""
    if ROOT:
        os.chown(place / "ws/w", 1000, 1000)
    with spawn(RUN, place) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(wanted) + "\n")
        process.stdin.close()
        lines = process.stdout.read().splitlines()
        assert process.wait(60) == 0
    return (json.loads(line) for line in lines)


def test_hostile_images(spawn: Any, place: Path) -> None:
    """Links out, programs with a set-user-ID bit, devices, and files that never end, where carrel reads or mounts."""
    (place / "secret").write_text("canary")
    roots = place / "images"
    images.debian(roots / "links", python=False, programs=("cat", "id", "ls", "readlink", "sh", "stat", "touch"))
    for name in PLACES:
        found = roots / "links" / name
        if found.is_dir() and not found.is_symlink():
            remove_tree(str(found))
        found.symlink_to({"etc": "/proc/1/root/etc", "run": "../../../..", "tmp": str(place)}.get(name, "/"))
    (roots / "links/out").symlink_to(place)
    (roots / "links/usr/bin/id").chmod(0o4755)
    if ROOT:
        os.mknod(roots / "links/disk", stat.S_IFBLK | 0o666, os.makedev(254, 0))
        (roots / "links/disk").chmod(0o666)
    for name in ("pipe", "loop", "long"):
        (roots / name / "etc").mkdir(parents=True)
    os.mkfifo(roots / "pipe/etc/passwd")
    (roots / "loop/etc/passwd").symlink_to("passwd")
    (roots / "long/etc/passwd").write_text("x:" * 4_000_000 + f"\na:x:{'9' * 5000}:0:\n")
    look = [
        *(["stat", "-c", "%F", f"/{name}"] for name in PLACES),
        "cat /out/secret /tmp/secret /run/secret; touch /out/x /tmp/secret.x; ls -A /workspace",
        "id -u; id -ru; cat /disk | head -c1; readlink /etc/ssl/cert.pem",
    ]
    answers = run(
        spawn,
        place,
        links={"root": "links", "user": "5:5", "commands": look},
        pipe={"root": "pipe", "user": "a", "commands": []},
        loop={"root": "loop", "user": "a", "commands": []},
        long={"root": "long", "user": "a", "commands": []},
        number={"root": "pipe", "user": "70000", "commands": [["x"]]},
    )
    links = next(answers)
    assert [each["stdout"] for each in links[: len(PLACES)]] == ["directory\n"] * len(PLACES)
    assert "canary" not in links[-2]["stdout"] and not (place / "x").exists()
    assert links[-1]["stdout"].split() == ["5", "5", "/run/secrets/carrel-ca.pem"]
    for told in (next(answers), next(answers), next(answers)):
        assert told == ["the image wants to run as user 'a', which its /etc/passwd does not have"]
    assert next(answers)[0]["exit_code"] == 127
    assert (place / "secret").read_text() == "canary"


def test_every_kind_of_image(spawn: Any, place: Path) -> None:
    """An empty image, one with a single program, one with another C library and a small Debian."""
    for name in ("empty", "static", "musl", "debian"):
        getattr(images, name)(place / "images" / name)
    root = "id -u; head -n1 /proc/self/uid_map; touch /usr/x; python3 -c 'import ssl, ctypes; print(int(ssl.PROTOCOL_TLS))'"
    answers = run(
        spawn,
        place,
        empty={"root": "empty", "commands": ["true"]},
        static={"root": "static", "commands": [[images.HELLO]]},
        musl={"root": "musl", "user": "7", "commands": [["who"], "who;"]},
        debian={"root": "debian", "commands": [root]},
    )
    assert "this sandbox has no shell" in next(answers)[0]["stderr"]
    assert next(answers)[0]["stderr"] == "hello\n"
    musl = next(answers)
    assert musl[0]["stdout"] == "musl 7\n" and "no shell" in musl[1]["stderr"]
    debian = next(answers)[0]
    assert debian["stdout"].split() == ["0", "0", "1000", "1", "2"]
    assert "Read-only" in debian["stderr"]


def as_root_of_a_build() -> object:
    """A hostile RUN line, as root with the capabilities that package managers use. Returns what it got by them."""
    import ctypes
    import os
    import socket
    import stat

    libc = ctypes.CDLL(None, use_errno=True)
    got = []

    def attempt(name, action):
        try:
            result = action()
        except OSError:
            return
        if result not in {None, False, -1}:
            got.append(name)

    def write(path, text):
        file = os.open(path, os.O_WRONLY)
        try:
            return os.write(file, text)
        finally:
            os.close(file)

    def enter(path):
        file = os.open(path, os.O_RDONLY)
        try:
            return libc.setns(file, 0) == 0
        finally:
            os.close(file)

    def as_user(uid, action):
        """In a child that has become another user of the image; a CAP_SETUID reaches all of them."""
        child = os.fork()
        if child == 0:
            code = 0
            try:
                os.setresuid(uid, uid, uid)
                code = 1 if action() not in {None, False, -1} else 0
            except OSError:
                pass
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1

    def processes():
        """Start as many processes as every user may; all users together have one limit."""
        count, gate = 0, os.pipe()
        for uid in (0, 33, 1000, 2000):
            child = os.fork()
            if child == 0:
                try:
                    os.setresuid(uid, uid, uid)
                    started = 0
                    while started < 200:
                        if os.fork() == 0:
                            os.close(gate[1])
                            os.read(gate[0], 1)
                            os._exit(0)
                        started += 1
                except OSError:
                    pass
                os._exit(started)
            count += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(gate[1])
        return count > 70 and count

    attempt("mount", lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0)
    attempt("unmount", lambda: libc.umount2(b"/proc", 2) == 0)
    attempt("device", lambda: os.mknod("/tmp/null", stat.S_IFCHR | 0o666, os.makedev(1, 3)) or True)
    attempt("raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
    attempt("packets", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
    for name, flag in {"user": 0x10000000, "mount": 0x20000, "network": 0x40000000}.items():
        attempt(f"new {name} namespace", lambda flag=flag: libc.unshare(flag) == 0)
    for name in ("user", "mnt", "net"):
        attempt(f"namespace {name} of PID 1", lambda name=name: enter(f"/proc/1/ns/{name}"))
    settings = (
        "net/ipv4/ip_forward",
        "net/ipv4/tcp_rmem",
        "kernel/hostname",
        "kernel/core_pattern",
        "fs/mqueue/msg_max",
    )
    for setting in settings:
        for uid in (0, 1, 1000, 65534):
            attempt(
                f"{setting} as {uid}",
                lambda uid=uid, setting=setting: as_user(uid, lambda: write(f"/proc/sys/{setting}", b"1")),
            )
    attempt("ids beyond the image", lambda: as_user(65535, lambda: True) or as_user(2**31 - 5, lambda: True))
    attempt("trace PID 1", lambda: libc.ptrace(16, 1, 0, 0) == 0)
    attempt("memory of PID 1", lambda: os.open("/proc/1/mem", os.O_RDWR))
    attempt("files of PID 1", lambda: len(os.listdir("/proc/1/fd")))
    attempt("ids of PID 1", lambda: write("/proc/1/uid_map", b"0 0 4294967295"))
    attempt("limits of PID 1", lambda: __import__("resource").prlimit(1, 7, (1, 1)))
    attempt("file capability", lambda: os.setxattr("/etc/passwd", "security.capability", bytes(20)) or True)
    attempt("environments", lambda: os.open("/envs/x", os.O_WRONLY | os.O_CREAT))
    attempt("carrel's files", lambda: os.open("/etc/carrel/warm.py", os.O_WRONLY))
    attempt("processes", processes)
    # The root of the sandbox is all that a chroot, and an escape from it, can lead to.
    before = os.stat("/").st_ino
    os.makedirs("/tmp/jail", exist_ok=True)
    try:
        os.chroot("/tmp/jail")
        for _ in range(50):
            os.chdir("..")
        os.chroot(".")
    except PermissionError:
        pass
    attempt("another root", lambda: os.stat("/").st_ino != before)
    with open("/proc/self/status") as file:
        told = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
    powers = [int(told[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb", "NoNewPrivs")]
    os.close(os.open("/tmp/set", os.O_CREAT | os.O_WRONLY, 0o755))
    os.chmod("/tmp/set", 0o6755)
    return [got, powers]


def test_root_of_a_build_reaches_nothing_else(spawn: Any, place: Path, debian_root: Path, request: Any) -> None:
    subprocess.run(["cp", "-al", str(debian_root), str(place / "images/debian")], check=True)
    worker = "id -u; grep CapEff /proc/self/status; stat -c %u:%g /etc/passwd /var; touch /etc/x; rm -f /etc/hosts"
    answers = run(
        spawn,
        place,
        root={"root": "debian", "writable": True, "commands": [words(as_root_of_a_build)]},
    )
    got, powers = (answer(next(answers)[0]["stdout"]) or {})["evidence"]
    as_root = spawn_is_root(request)
    allowed = sum(1 << each for each in linux.FOR_INSTALLING) if as_root else 0
    assert (got, powers) == ([], [allowed, allowed, allowed, 0, 0, 1])
    found = (place / "ws/w/upper/tmp/set").stat()
    assert not (place / "ws/w/upper/tmp/null").exists() and stat.S_IMODE(found.st_mode) == 0o6755
    if as_root:  # whoever could reach it would become a user that the host does not have
        assert found.st_uid >= ids.FIRST and found.st_gid >= ids.FIRST
    remove_tree(str(place / "ws/w"))
    (place / "ws/w").mkdir()
    answers = run(spawn, place, worker={"root": "debian", "writable": True, "user": "agent", "commands": [worker]})
    other = next(answers)[0]
    uid, none, *owners = other["stdout"].replace("CapEff:\t", "").split()
    assert (uid, int(none, 16)) == ("1234", 0) and "Permission denied" in other["stderr"] if as_root else uid == "1234"
    assert owners == ["0:0", "0:0"] if as_root else len(owners) == 2


def spawn_is_root(request: Any) -> bool:
    """Whether the code of this test's `spawn` runs as root."""
    return "user" not in request.node.callspec.params.values()
