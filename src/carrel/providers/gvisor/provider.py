"""Starts, finds and ends gVisor sandboxes.

A sandbox is a directory below the server's run directory (its configuration, the control directory, gVisor's state), a
cgroup with its processes, and nothing else: its mounts belong to its processes. No process of ours watches it, so a
restarted server finds it as it was. It is ended by killing the processes in its group; `runsc` is not asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from carrel.errors import PlatformError, Unsupported
from carrel.isolation import inside, late_masks, late_mounts, probe, staging
from carrel.isolation.cgroups import start_time
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.isolation.staging import StagedMount, StageOrder
from carrel.models import Network
from carrel.primitives.atomic import write_file
from carrel.primitives.kernel_files import read_if_there
from carrel.primitives.trees import remove_tree
from carrel.providers import base_root, bundle, foreign_processes, groups, staged
from carrel.providers.base import NETWORK_CAPABILITY, Capability, Handle, Launch, Provider, ResourceUse
from carrel.providers.base_root import BaseRoot
from carrel.providers.control_directory import REPORT, ControlDirectory, WaitingSupervisor, facts_of, waiting_supervisor
from carrel.providers.groups import SandboxGroups
from carrel.providers.gvisor import oci, runsc
from carrel.providers.gvisor.options import LIMITS, GvisorOptions
from carrel.providers.stagers import Stagers
from carrel.threads import run_to_end

_SANDBOXES, _ROOTS = "gvisor", "gvisor-roots"
_CONTROL, _ROOT, _COVERS, _STATE, _CONFIG, _PID, _SOCKET = "c", "root", "covers", "state", "config.json", "pid", "s"
_ORDER, _MASKS, _LATE = "order.json", "masks", "late"
_OVERHEAD_MB = 128
"""What gVisor itself may use besides the memory of the sandbox."""


class GvisorProvider(Provider):
    """Sandboxes whose kernel is gVisor's: a program that has few ways to the host's kernel, and serves theirs itself.

    They have no network but loopback. With an allow list, the supervisor carries connections from the port of the proxy
    to a socket of the host, which is the sandbox's identity. A memory limit holds for the whole sandbox: one that
    exceeds it is ended, because the host's kernel sees one process and not those in the sandbox.
    """

    name = "gvisor"
    isolation_level = 2

    def __init__(
        self,
        run_dir: str,
        shared: Mapping[str, str] = MappingProxyType({}),
        *,
        options: GvisorOptions,
        bundles: str,
        images: str = "",
    ):
        """`bundles` is the directory of the supervisor's bundles; the rest is as for the other providers."""
        self._sandboxes = os.path.join(run_dir, _SANDBOXES)
        self._roots = os.path.join(run_dir, _ROOTS)
        self._shared = dict(shared)
        self._options = options
        self._bundles = bundles
        self._images = images
        self._groups = SandboxGroups()
        self._stagers = Stagers(staging.__name__, "runsc")
        self._waiting: dict[str, WaitingSupervisor] = {}
        """The supervisors of slots that nobody has claimed."""
        self._preparing: asyncio.Future[tuple[BaseRoot, bundle.SupervisorBundle]] | None = None

    @cached_property
    def _lacking(self) -> str | None:
        program = runsc.find(self._options.runsc)
        if program is None:
            where = f"{self._options.runsc} is not a program" if self._options.runsc else "there is no runsc on PATH"
            return f"{where}; install gVisor, or build it with scripts/build-runsc, and set CARREL_GVISOR_RUNSC"
        if os.geteuid() != 0:
            return "carrel does not run as root; run `carrel serve` as root to use gVisor"
        if (problem := runsc.problem(program)) is not None:
            return problem
        if "memory" not in probe.host().controllers:
            return "no cgroup for memory can be made on this host; run `carrel doctor`"
        if self._options.platform == "kvm" and not os.access("/dev/kvm", os.R_OK | os.W_OK):
            return "/dev/kvm cannot be used; set CARREL_GVISOR_PLATFORM=systrap, or make KVM available"
        return None

    def missing(self) -> str | None:
        return self._lacking

    def capabilities(self) -> frozenset[Capability]:
        promised = {
            Capability.FILE_ISOLATION,
            Capability.PROCESS_ISOLATION,
            Capability.LIMIT_MEMORY,
            Capability.LIMIT_PROCESSES,
            Capability.LIMIT_DISK,
            Capability.NETWORK_NONE,
            Capability.NETWORK_ALLOWLIST,
            Capability.MASKS,
            Capability.SECRETS,
            Capability.TERMINAL,
            Capability.SURVIVES_RESTART,
        }
        host = probe.host()
        if "cpu" in host.controllers:
            promised.add(Capability.LIMIT_CPUS)
        if inside.ENVIRONMENTS in self._shared:
            promised.add(Capability.ENVIRONMENTS)
        if self._images and host.overlays:
            promised.add(Capability.IMAGES)
        return frozenset(promised)

    async def warm(self) -> None:
        if await asyncio.to_thread(self.missing) is None:
            with contextlib.suppress(PlatformError):  # the first start of a sandbox gets the reason
                await self._prepared()
                self._stagers.prepare()

    async def _prepared(self) -> tuple[BaseRoot, bundle.SupervisorBundle]:
        """Return the root and the bundle of every sandbox, which are made once per server."""
        if self._preparing is None or (self._preparing.done() and self._preparing.exception() is not None):
            self._preparing = asyncio.ensure_future(asyncio.to_thread(self._prepare))
        return await asyncio.shield(self._preparing)

    def _prepare(self) -> tuple[BaseRoot, bundle.SupervisorBundle]:
        try:
            os.makedirs(self._sandboxes, 0o700, exist_ok=True)
            os.makedirs(self._roots, 0o700, exist_ok=True)
            self._remove_unused_roots()
            made = base_root.make(os.path.join(self._roots, secrets.token_hex(8)), self._shared)
        except OSError as error:
            raise PlatformError(f"the root of gVisor sandboxes cannot be made: {error}") from error
        return made, bundle.provide(self._bundles)

    def _remove_unused_roots(self) -> None:
        """Remove the roots of servers that are gone, and of whose sandboxes none is left."""
        if not os.listdir(self._sandboxes):
            for name in os.listdir(self._roots):
                remove_tree(os.path.join(self._roots, name))

    async def start(self, launch: Launch) -> Handle:
        self._check(launch)
        slot = await self.start_slot(replace(self._slot_for(launch), id=launch.id))
        return await self.claim(slot, launch)

    def _check(self, launch: Launch) -> None:
        self.require(NETWORK_CAPABILITY[launch.network])
        _refuse(launch)
        if launch.image is not None:
            self.require(Capability.IMAGES)

    def slot_for(self, launch: Launch) -> Launch | None:
        return None if launch.folder is not None else self._slot_for(launch)

    def _slot_for(self, launch: Launch) -> Launch:
        """Return what is fixed when gVisor starts: the root with its masks, and the sizes of memory file systems."""
        return Launch(
            id="",
            workspace="",
            network=Network.NONE,
            memory_mb=launch.memory_mb,
            masks=None if launch.masks is None else launch.masks.of_root(),
            trust=launch.trust and launch.image is not None,
            image=launch.image,
        )

    async def start_slot(self, launch: Launch) -> Handle:
        self._check(launch)
        base, made = await self._prepared()
        await self.remove({"id": launch.id})  # a start that was killed may have left something
        started = False
        try:
            handle = await self._start_slot(launch, base, made)
            started = True
        except OSError as error:
            raise PlatformError(f"the gVisor sandbox could not be started: {error}") from error
        finally:
            if not started:
                await asyncio.shield(self.remove({"id": launch.id}))
        return handle

    async def _start_slot(self, launch: Launch, base: BaseRoot, made: bundle.SupervisorBundle) -> Handle:
        place = self._place(launch.id)
        control = ControlDirectory(f"{place}/{_CONTROL}")
        # A start that is cancelled waits for these: what they make is removed afterwards.
        await run_to_end(lambda: self._write(launch, place, control))
        order = await run_to_end(lambda: self._order(launch, base, made, place, control))
        with control.listen_for_supervisor() as listener:
            supervisor = await waiting_supervisor(listener, await self._stagers.start(order))
        self._waiting[launch.id] = supervisor
        pid, gofer = await _pid(f"{place}/{_PID}"), await asyncio.to_thread(_gofer, launch.id)
        self._stagers.prepare()
        return {
            "provider": self.name,
            "id": launch.id,
            "socket": "",
            "pid": pid,
            "start_time": start_time(pid),
            "gofer": gofer,
            "gofer_start_time": start_time(gofer),
        }

    async def claim(self, slot: Handle, launch: Launch) -> Handle:
        id = str(slot["id"])
        claimed = False
        try:
            self._check(launch)
            handle = await self._claim(id, slot, launch)
            claimed = True
        except OSError as error:
            raise PlatformError(f"the gVisor sandbox could not be started: {error}") from error
        finally:
            if not claimed:
                await asyncio.shield(self.remove(slot))
        return handle

    async def _claim(self, id: str, slot: Handle, launch: Launch) -> Handle:
        place = self._place(id)
        supervisor = self._waiting.pop(id, None)
        if supervisor is None:
            raise PlatformError(f"'{id}' is not a slot of this server")
        with contextlib.closing(supervisor):
            await run_to_end(lambda: self._attach(id, slot, launch))
            await supervisor.begin(_facts(id, launch))
        socket = ControlDirectory(f"{place}/{_CONTROL}").socket_path
        return {
            "provider": self.name,
            "id": id,
            "socket": await asyncio.to_thread(_take_socket, socket, f"{place}/{_SOCKET}"),
            "pid": slot["pid"],
            "start_time": slot["start_time"],
            "egress": launch.network.proxied,
        }

    def _attach(self, id: str, slot: Handle, launch: Launch) -> None:
        """Give a slot the workspace and the limits of its owner. The process that serves files sees later mounts."""
        if launch.cpus is not None:
            self._groups.limit_cpus(id, launch.cpus)
        gofer, started = slot.get("gofer"), slot.get("gofer_start_time")
        if not isinstance(gofer, int) or not isinstance(started, int):
            raise PlatformError(f"'{id}' is not a slot")
        tree = late_mounts.open_directory(launch.workspace)
        try:
            with late_mounts.Sandbox(gofer, started) as sandbox:
                sandbox.mount([late_mounts.LateMount(tree, oci.LATE + inside.WORKSPACE)])
                if launch.masks is not None and (masks := launch.masks.of_workspace()) is not None:
                    late_masks.cover(sandbox, oci.LATE, masks)
        finally:
            os.close(tree)

    def _write(self, launch: Launch, place: str, control: ControlDirectory) -> None:
        os.mkdir(place, 0o700)
        late = f"{place}/{_LATE}"
        for path in (f"{place}/{_ROOT}", f"{place}/{_COVERS}", f"{place}/{_STATE}", late):
            os.mkdir(path, 0o755)
        for below in (inside.WORKSPACE, late_masks.COVERS):
            os.mkdir(late + below, 0o755)
        control.create()
        os.mkdir(f"{control.path}/private/{os.path.basename(oci.LATE)}", 0o700)
        spec = oci.GvisorSpec(
            id=launch.id,
            root=f"{place}/{_ROOT}",
            control=control.path,
            late=late,
            secrets=f"{control.path}/private/secrets",
            command=tuple(bundle.command(REPORT)),
            environments=self._shared.get(inside.ENVIRONMENTS, ""),
            memory_mb=launch.memory_mb,
        )
        write_file(f"{place}/{_CONFIG}", json.dumps(oci.configuration(spec)).encode())

    def _order(
        self, launch: Launch, base: BaseRoot, made: bundle.SupervisorBundle, place: str, control: ControlDirectory
    ) -> str:
        """Write the order for the process that builds the root and becomes `runsc`; return its path."""
        program = runsc.find(self._options.runsc)
        if program is None:
            raise PlatformError("runsc is gone", hint="run `carrel doctor`")
        image = launch.image
        if image is not None:
            staged.check_image(image, self._images)
        own = StagedMount(made.path, inside.BUNDLE)
        path = image.environment.get("PATH", "").split(":")[:64] if image is not None else []
        order = StageOrder(
            root=f"{place}/{_ROOT}",
            layers=[base.root] if image is None else base.layers(image.directory, trust=launch.trust),
            mounts=(*(base.mounts if image is None else base.tools), own),
            covers=f"{place}/{_COVERS}",
            secrets=f"{control.path}/private/secrets",
            owner=SANDBOX_UID,
            program=oci.command(
                program, f"{place}/{_STATE}", self._options.platform, place, f"{place}/{_PID}", launch.id
            ),
            groups=self._groups.make(launch.id, None if launch.memory_mb is None else launch.memory_mb + _OVERHEAD_MB),
            masks=staged.write_masks(launch.masks, f"{place}/{_MASKS}"),
            path=[folder for folder in path if folder.startswith("/")],
        )
        write_file(f"{place}/{_ORDER}", order.text().encode())
        return f"{place}/{_ORDER}"

    def _place(self, id: str) -> str:
        if not id or "/" in id or id.startswith("."):
            raise PlatformError(f"'{id[:64]}' cannot be the id of a sandbox")
        return os.path.join(self._sandboxes, id)

    async def alive(self, handle: Handle) -> bool:
        pid, started = handle.get("pid"), handle.get("start_time")
        return isinstance(pid, int) and isinstance(started, int) and foreign_processes.runs(pid, started)

    async def running(self) -> list[str]:
        try:
            return sorted(await asyncio.to_thread(os.listdir, self._sandboxes))
        except FileNotFoundError:
            return []

    async def remove(self, handle: Handle) -> None:
        id = str(handle["id"])
        if (supervisor := self._waiting.pop(id, None)) is not None:
            supervisor.close()
        await asyncio.to_thread(self._groups.end, id)
        await asyncio.to_thread(remove_tree, self._place(id))

    async def way_out(self, handle: Handle) -> int | None:
        if not handle.get("egress"):
            return None
        control = ControlDirectory(f"{self._place(str(handle['id']))}/{_CONTROL}")
        listener = await asyncio.to_thread(control.listen_for_egress)
        return listener.detach()

    async def out_of_memory_kills(self, handle: Handle) -> int:
        return (await asyncio.to_thread(groups.usage, str(handle["id"]))).get("oom_kills", 0)

    async def resources(self, handles: Sequence[Handle]) -> Mapping[str, ResourceUse]:
        return await asyncio.to_thread(groups.resources, [str(handle["id"]) for handle in handles])

    async def close(self) -> None:
        for id in list(self._waiting):
            await self.remove({"id": id})
        if self._preparing is not None:
            await asyncio.gather(self._preparing, return_exceptions=True)
            if not self._preparing.cancelled() and self._preparing.exception() is None:
                base, _ = self._preparing.result()
                if not await self.running():
                    await asyncio.to_thread(remove_tree, base.place)
        await self._stagers.close()
        self._groups.close()


def _facts(id: str, launch: Launch) -> dict[str, Any]:
    """Return the facts for the supervisor of a sandbox. `id` is that of its slot."""
    facts = facts_of(launch, uid=SANDBOX_UID, gid=SANDBOX_UID, secrets=True, user="agent")
    facts |= {"watch_memory": True, "late": oci.LATE}
    facts["limits"] = {name: facts["limits"][name] for name in LIMITS if name in facts["limits"]}
    if launch.processes is not None:
        facts["kernel_files"] = {oci.tasks_file(id): str(launch.processes)}
        facts["limits"]["RLIMIT_NPROC"] = launch.processes  # not enforced, but shown, and the supervisor goes by it
    return facts


def _refuse(launch: Launch) -> None:
    """Refuse what gVisor sandboxes cannot do and no capability names."""
    if launch.folder is not None:
        raise Unsupported("a gVisor sandbox cannot work on a folder of the host", field="workspace_path")
    if launch.image is not None and launch.image.writable:
        raise Unsupported("the root of a gVisor sandbox cannot be changed", field="image")
    for pattern in launch.masks.hidden if launch.masks is not None else ():
        if f"{pattern}/".startswith(("/proc/", "/dev/", "/sys/")):
            raise Unsupported(f"{pattern} cannot be hidden in a gVisor sandbox: it is made by gVisor", field="masks")


async def _pid(path: str) -> int:
    """Return the process of a sandbox that runs. The supervisor may be ready a moment before the file is written."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError, ValueError):
                return int(await asyncio.to_thread(Path(path).read_text))
            await asyncio.sleep(0.002)


def _gofer(id: str) -> int:
    """Return the process that serves files to a sandbox. Raises `PlatformError`."""
    for group, _ in groups.find(id):
        for pid in groups.processes(group):
            if read_if_there(f"/proc/{pid}/cmdline", 4096).startswith(b"runsc-gofer\0"):
                return pid
    raise PlatformError(f"sandbox {id} has no process that serves files; it has ended")


def _take_socket(source: str, target: str) -> str:
    """Move the supervisor's socket out of the directory that the sandbox can write, so that nothing can replace it."""
    os.rename(source, target)
    if not stat.S_ISSOCK(os.lstat(target).st_mode):
        raise PlatformError("the supervisor's socket is not a socket")
    return target
