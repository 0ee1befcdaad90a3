"""A real server process that can be killed and started again on the same data directory, and what it may leave there.

Knows processes, mounts and files; knows nothing of what clients do.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from tests.support.fork_server import Forked, start
from tests.support.leaks import below
from tests.support.sandboxes import parent

from carrel.client import AsyncClient

START_S = 60.0
STOP_S = 60.0
SETTLE_S = 60.0
_SPARES = 2
_ASIDE = re.compile(r"\.([0-9a-f]{8}){1,2}$")
"""How the server names a file that has not got its place yet."""


class Server:
    """One data directory and the server process on it, which comes and goes."""

    def __init__(
        self,
        database: str | None = None,
        volumes: str = "auto",
        *,
        checkpoint_s: float | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
    ):
        self._before = set(below(os.getpid()))
        self.directory = Path(tempfile.mkdtemp(prefix="k"))
        self.data = self.directory / "d"
        self.log = self.directory / "log"
        self._environment = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
        self._environment |= {"CARREL_VOLUMES": volumes, **settings}
        if checkpoint_s is not None:
            self._environment["CARREL_SANDBOX_CHECKPOINT_S"] = str(checkpoint_s)
        if database is not None:
            self._environment["CARREL_DATABASE"] = database
        self._process: Forked | subprocess.Popen[bytes] | None = None
        self.starts: list[float] = []

    @property
    def pid(self) -> int:
        """The server process."""
        assert self._process is not None
        return self._process.pid

    def _spawn(self) -> Forked | subprocess.Popen[bytes]:
        return self._start(["-m", "carrel", "serve", "--port", "0", "--data-dir", str(self.data)])

    def _start(self, words: list[str]) -> Forked | subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return start(
                [sys.executable, *words], env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    async def start_and_kill(self, part: float) -> bool:
        """Start, and kill it that part of the usual time later; says whether it was still starting."""
        self._process = self._spawn()
        await asyncio.sleep(part * (statistics.median(self.starts) if self.starts else 1.0))
        early = not self._ready()
        self.kill()
        await self.killed()
        return early

    async def start(self) -> None:
        """Start, and wait until it takes requests."""
        began = time.monotonic()
        self._process = self._spawn()
        while not self._ready():
            if self._process.poll() is not None:
                raise AssertionError(f"the server did not start: status {self._process.returncode}\n{self.tail()}")
            assert time.monotonic() < began + START_S, f"the server took longer than {START_S} s\n{self.tail()}"
            await asyncio.sleep(0.01)
        self.starts.append(time.monotonic() - began)

    def _ready(self) -> bool:
        try:
            return bool(json.loads((self.data / "server.json").read_bytes())["pid"] == self.pid)
        except (OSError, ValueError):
            return False

    def client(self) -> AsyncClient:
        """A client of the server as it runs now."""
        url = json.loads((self.data / "server.json").read_bytes())["url"]
        return AsyncClient(url, (self.data / "token").read_text().strip())

    def kill(self) -> None:
        """Kill the server process and nothing else; what it started lives on."""
        os.kill(self.pid, signal.SIGKILL)

    async def killed(self) -> None:
        """Wait until it is gone."""
        assert self._process is not None
        await asyncio.to_thread(self._process.wait)

    async def stop(self) -> None:
        """End it as its operator would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self._process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end within {STOP_S} s\n{self.tail()}") from None
        assert self._process.returncode == 0, f"it ended with status {self._process.returncode}\n{self.tail()}"

    def sandboxes(self) -> list[int]:
        """The first process of each sandbox."""
        tree = self._processes()
        zygotes = [pid for pid, above in tree.items() if pid != self.pid and above in {os.getpid(), self.pid}]
        return [pid for zygote in zygotes for pid in _sandboxes(zygote)]

    def tail(self, lines: int = 40) -> str:
        """The end of what the server said."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Whatever has happened: end what is left, remove the directory."""
        for _ in range(500):
            left = self._processes()
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
                except (ProcessLookupError, ChildProcessError):
                    pass
            if not left:
                break
            time.sleep(0.01)
        if self._process is not None:
            self._process.wait()
        for point in sorted(self._mounts(), reverse=True):
            subprocess.run(["umount", point], check=False)
        for device in self._loops():
            subprocess.run(["losetup", "--detach", device], check=False)
        shutil.rmtree(self.directory)

    # what there is

    async def settled(self, running: Collection[str], volumes: Collection[str]) -> None:
        """Wait until there is nothing but what these running sessions and these volumes need."""
        await self._until_none(lambda: self._surplus(set(running), set(volumes)))

    async def silent(self, volumes: Collection[str]) -> None:
        """Wait until a server that was stopped has left nothing but these volumes."""
        await self._until_none(lambda: self._remains(set(volumes)))

    async def _until_none(self, look: Callable[[], list[str]]) -> None:
        deadline = time.monotonic() + SETTLE_S
        while found := look():
            if time.monotonic() > deadline:
                raise AssertionError("left over:\n  " + "\n  ".join(found))
            self._bury()
            await asyncio.sleep(0.02)

    def _bury(self) -> None:
        """Wait for what was orphaned to this process and has ended: nobody else does."""
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != self.pid:
                try:
                    fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
                    if fields[0] == "Z" and int(fields[1]) == os.getpid():
                        os.waitpid(int(name), os.WNOHANG)
                except (OSError, ValueError, IndexError):
                    continue

    def _surplus(self, running: set[str], volumes: set[str]) -> list[str]:
        found = []
        boxes = 0
        tree = self._processes()
        zygotes = [pid for pid, above in tree.items() if pid != self.pid and above in {os.getpid(), self.pid}]
        if len(zygotes) != 1:
            found.append(f"{len(zygotes)} processes beside the server where one zygote should be: {zygotes}")
        for zygote in zygotes:
            boxes += len(_sandboxes(zygote))
            groups = _groups(zygote)
            if groups > len(running) + _SPARES:
                found.append(f"{groups} cgroups of zygote {zygote} for {len(running)} sandboxes")
        if boxes > len(running) + _SPARES:
            found.append(f"{boxes} sandbox processes for {len(running)} sandboxes")
        known = self._known_to_zygote()
        if known != len(running):
            found.append(f"the zygote has {known} sandboxes, {len(running)} sessions run")
        sockets = set(os.listdir(self.data / "run"))
        for name in running:
            own = [each for each in sockets if each.startswith(f"{name[:40]}-") and each.endswith(".sock")]
            sockets -= set(own)
            if len(own) != 1:
                found.append(f"{len(own)} sockets of running session {name}")
        sockets -= {"zygote-namespace.sock", "zygote-namespace.log"}
        found += [f"run/{name}" for name in sorted(sockets)]
        mounts = self._mounts()
        with suppress(ValueError):
            mounts.remove(str(self.data / "storage" / "pool"))
        found += [f"mount {point}" for point in mounts]
        if len(self._loops()) > 1:
            found.append(f"loop devices {self._loops()}")
        return found + self._files(volumes)

    def _remains(self, volumes: set[str]) -> list[str]:
        found = [f"process {pid}" for pid in self._processes()]
        found += [f"run/{name}" for name in sorted(os.listdir(self.data / "run"))]
        found += [f"mount {point}" for point in self._mounts()]
        found += [f"loop device {device}" for device in self._loops()]
        if (self.data / "server.json").exists():
            found.append("server.json")
        return found + self._files(volumes)

    def _files(self, volumes: set[str]) -> list[str]:
        found = [f"temporary {name}" for name in os.listdir(self.data) if _ASIDE.search(name)]
        found += [f"temporary cache/{name}" for name in _names(self.data / "cache") if name.startswith("snapshot-")]
        storage = self.data / "storage"
        for top in (storage, storage / "pool"):
            held = set(_names(top / "volumes"))
            if top == storage or os.path.ismount(top):
                found += [f"volume {name}" for name in sorted(held - volumes)]
            found += [f"temporary storage/tmp/{name}" for name in _names(top / "tmp")]
        filespaces = self.data / "filespaces"
        found += [f"temporary filespaces/spool/{name}" for name in _names(filespaces / "spool")]
        found += [f"temporary filespaces/bases/{name}" for name in _names(filespaces / "bases") if _ASIDE.search(name)]
        return found + [f"trash/{name}" for name in _names(self.data / "trash")]

    def snapshots(self) -> set[str]:
        """The snapshots on disk."""
        storage = self.data / "storage"
        return {*_names(storage / "snapshots"), *_names(storage / "pool" / "snapshots")}

    def _processes(self) -> dict[int, int]:
        """The server, what it started and what that started, each with its parent. Nobody else's: a database that was
        here before starts processes too."""
        parents = {}
        for pid, _started in below(os.getpid()):
            with suppress(OSError, KeyError):
                parents[pid] = parent(pid)
        old = {pid for pid, _started in self._before}

        def others(pid: int) -> bool:
            return pid in old or (pid in parents and others(parents[pid]))

        return {pid: above for pid, above in parents.items() if not others(pid)}

    def _known_to_zygote(self) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(10)
            try:
                connection.connect(str(self.data / "run" / "zygote-namespace.sock"))
                connection.send(json.dumps({"seq": 1, "op": "describe"}).encode())
                return int(json.loads(connection.recv(1 << 16))["sandboxes"])
            except (OSError, ValueError, KeyError):
                return -1

    def _mounts(self) -> list[str]:
        points = (line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
        return [point for point in points if point.startswith(f"{self.directory}/")]

    def _loops(self) -> list[str]:
        found = []
        for name in os.listdir("/sys/block"):
            try:
                behind = Path(f"/sys/block/{name}/loop/backing_file").read_text()
            except OSError:
                continue
            if behind.startswith(f"{self.directory}/"):
                found.append(f"/dev/{name}")
        return found


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _sandboxes(zygote: int) -> list[int]:
    """The children of a zygote but the forker, which is in the same PID namespace."""
    own = _pid_namespace(zygote)
    return [pid for pid in _children(zygote) if _pid_namespace(pid) not in {None, own}]


def _pid_namespace(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except FileNotFoundError:
        return None


def _children(pid: int) -> list[int]:
    """The living children of a process."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] not in "ZX":
                found.append(int(name))
    return found


def _groups(zygote: int) -> int:
    """How many groups a zygote has in the hierarchy that has most of them."""
    top = Path("/sys/fs/cgroup")
    own = [*top.glob(f"carrel-{zygote}-*"), *top.glob(f"*/carrel-{zygote}-*")]
    return max((sum(entry.is_dir() for entry in path.iterdir()) for path in own), default=0)
