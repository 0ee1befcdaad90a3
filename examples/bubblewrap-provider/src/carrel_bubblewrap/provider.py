"""The provider: starts, finds, reaches and removes sandboxes. What happens inside is the supervisor's business."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil

from carrel.errors import PlatformError
from carrel.isolation import seccomp
from carrel.isolation.cgroups import start_time
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.primitives.atomic import write_file
from carrel.primitives.trees import remove_tree
from carrel.providers import Capability, Handle, Launch, Provider, ProviderContext, bundle, foreign_processes
from carrel.providers.control_directory import ControlDirectory, facts_of, waiting_supervisor
from carrel_bubblewrap.command import bwrap_command

PROMISED = frozenset(
    {
        Capability.FILE_ISOLATION,
        Capability.PROCESS_ISOLATION,
        Capability.LIMIT_DISK,
        Capability.NETWORK_NONE,
        Capability.NETWORK_ALLOWLIST,
        Capability.TERMINAL,
        Capability.SURVIVES_RESTART,
    }
)

MOST_READ = 4096


def open_provider(context: ProviderContext) -> Provider:
    """The factory that the entry point names. It creates nothing."""
    return BubblewrapProvider(context.run_dir, context.bundles, context.settings.get("program", "bwrap"))


class BubblewrapProvider(Provider):
    """Sandboxes with namespaces of their own, made by `bwrap` as root. The agent is user 1000."""

    name = "bubblewrap"
    isolation_level = 1

    def __init__(self, run_dir: str, bundles: str, program: str):
        self._run_dir = run_dir
        self._bundles = bundles
        self._program = program
        self._children: set[int] = set()
        """Processes of `bwrap` that were started by this object and must be waited for."""

    def capabilities(self) -> frozenset[Capability]:
        return PROMISED

    def missing(self) -> str | None:
        if shutil.which(self._program) is None:
            return f"there is no program {self._program}; install bubblewrap, or set CARREL_PROVIDER_BUBBLEWRAP_PROGRAM"
        return None if os.geteuid() == 0 else "carrel does not run as root; run `carrel serve` as root"

    async def start(self, launch: Launch) -> Handle:
        self.require_for(launch)
        self._reap()
        place = self._place(launch.id)
        try:
            await asyncio.to_thread(os.makedirs, self._run_dir, 0o700, exist_ok=True)
            await asyncio.to_thread(os.mkdir, place, 0o700)
            return await self._start(launch, place, ControlDirectory(f"{place}/control"))
        except BaseException as error:
            await asyncio.shield(self.remove({"id": launch.id}))
            if isinstance(error, OSError):
                raise PlatformError(f"the sandbox could not be started: {error}") from error
            raise

    async def _start(self, launch: Launch, place: str, control: ControlDirectory) -> Handle:
        await asyncio.to_thread(control.create)
        made = await asyncio.to_thread(bundle.provide, self._bundles)
        command = bwrap_command(self._program, made, control.path, launch.workspace)
        with control.listen_for_supervisor() as listener:
            bwrap = await asyncio.to_thread(_spawn, command, f"{place}/log")
            self._children.add(bwrap)
            handle: Handle = {"provider": self.name, "id": launch.id, "socket": control.socket_path, "bwrap": bwrap}
            supervisor = await waiting_supervisor(listener, _ended(bwrap, f"{place}/log"))
        with contextlib.closing(supervisor):
            handle |= {"pid": supervisor.pid, "start_time": start_time(supervisor.pid)}
            handle["egress"] = launch.network.proxied
            # Written before an agent runs: a server that is killed now finds the sandbox again.
            await asyncio.to_thread(write_file, f"{place}/handle", json.dumps(handle).encode())
            facts = facts_of(launch, uid=SANDBOX_UID, gid=SANDBOX_UID, secrets=False, seccomp=seccomp.build())
            await supervisor.begin(facts)
        return handle

    async def alive(self, handle: Handle) -> bool:
        pid, started = handle.get("pid"), handle.get("start_time")
        return isinstance(pid, int) and isinstance(started, int) and foreign_processes.runs(pid, started)

    async def remove(self, handle: Handle) -> None:
        """End the supervisor, and with it everything in its PID namespace. One that has no facts yet ends by itself."""
        place = self._place(str(handle["id"]))
        with contextlib.suppress(FileNotFoundError):
            kept = json.loads(await asyncio.to_thread(_read, f"{place}/handle"))
            await foreign_processes.end(kept["pid"], kept["start_time"])
            if kept["bwrap"] in self._children:  # else another server has started it
                self._children.discard(kept["bwrap"])
                await asyncio.to_thread(os.waitpid, kept["bwrap"], 0)
        self._reap()
        await asyncio.to_thread(remove_tree, place)

    def _reap(self) -> None:
        """Wait for the processes that have ended by themselves."""
        for child in tuple(self._children):
            if os.waitpid(child, os.WNOHANG)[0] == child:
                self._children.discard(child)

    async def running(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(await asyncio.to_thread(os.listdir, self._run_dir))
        return []

    async def way_out(self, handle: Handle) -> int | None:
        if not handle.get("egress"):
            return None
        control = ControlDirectory(f"{self._place(str(handle['id']))}/control")
        return (await asyncio.to_thread(control.listen_for_egress)).detach()

    def _place(self, id: str) -> str:
        if not id or "/" in id or id.startswith("."):
            raise PlatformError(f"'{id[:64]}' cannot be the id of a sandbox")
        return os.path.join(self._run_dir, id)


def _spawn(command: list[str], log: str) -> int:
    """Start a program that outlives this server; return its PID. Blocking."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawnp(command[0], command, {"PATH": "/usr/bin:/bin"}, file_actions=actions, setsid=True)


async def _ended(pid: int, log: str) -> str:
    """Wait until a process ends, and return what it said last."""
    process = os.pidfd_open(pid)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(process, ended.set)
    try:
        await ended.wait()
        return (await asyncio.to_thread(_read, log)).decode(errors="replace").strip()
    finally:
        loop.remove_reader(process)
        os.close(process)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(MOST_READ)
