"""Starts, finds and ends virtual machines.

A sandbox is a directory below the server's run directory, a cgroup with its processes on the host, and nothing else:
its mounts belong to its processes. They are a keeper (`carrel.isolation.machine.keeper`), QEMU and a file server, and
need no server: a restarted one finds them as they were. A sandbox is ended by killing the processes in its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import platform
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from carrel.errors import PlatformError, Unsupported
from carrel.isolation import inside, probe, seccomp
from carrel.isolation.cgroups import start_time
from carrel.isolation.machine import keeper
from carrel.isolation.machine.keeper import MachineOrder
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.isolation.staging import StagedMount, StageOrder
from carrel.primitives.atomic import write_file
from carrel.primitives.trees import remove_tree
from carrel.providers import base_root, bundle, foreign_processes, groups, staged
from carrel.providers.base import NETWORK_CAPABILITY, Capability, Handle, Launch, Provider, ResourceUse
from carrel.providers.base_root import BaseRoot
from carrel.providers.control_directory import ControlDirectory, facts_of, waiting_supervisor
from carrel.providers.groups import SandboxGroups
from carrel.providers.microvm import commands, initramfs, kernel, programs
from carrel.providers.microvm.commands import Machine
from carrel.providers.microvm.kernel import GuestKernel
from carrel.providers.microvm.options import MicrovmOptions
from carrel.providers.stagers import Stagers
from carrel.threads import run_to_end

_SANDBOXES, _ROOTS, _INITRAMFS = "microvm", "microvm-roots", "microvm-initramfs"
_CONTROL, _ROOT, _COVERS, _BOX, _SOCKET, _ORDER, _MASKS = "c", "root", "covers", "box", "s", "order.json", "masks"
_DEADLINE_S = {"kvm": 60.0, "tcg": 240.0}
"""How long the start of a machine may take. An emulated one needs seconds of processor time on a busy host."""
_MOST_CPUS = 8
"""The most processors of a machine without a limit of processors."""


@dataclass(frozen=True)
class _Prepared:
    """What all machines share, made once per server."""

    base: BaseRoot
    made: bundle.SupervisorBundle
    kernel: GuestKernel
    initramfs: str


class MicrovmProvider(Provider):
    """Sandboxes whose kernel is a Linux of their own in a virtual machine, without a network device.

    Files are served by a program that sees nothing but the root of the sandbox. Everything else goes over one serial
    line: the supervisor, and with an allow list connections to a socket of the host, the sandbox's identity.
    """

    name = "microvm"
    isolation_level = 3

    def __init__(
        self,
        run_dir: str,
        shared: Mapping[str, str] = MappingProxyType({}),
        *,
        options: MicrovmOptions,
        bundles: str,
        images: str = "",
    ):
        """`bundles` is the directory of the supervisor's bundles; the rest is as for the other providers."""
        self._run_dir = run_dir
        self._sandboxes = os.path.join(run_dir, _SANDBOXES)
        self._roots = os.path.join(run_dir, _ROOTS)
        self._shared = dict(shared)
        self._options = options
        self._bundles = bundles
        self._images = images
        self._groups = SandboxGroups()
        self._stagers = Stagers(keeper.__name__, "the virtual machine")
        self._preparing: asyncio.Future[_Prepared] | None = None

    @cached_property
    def _lacking(self) -> str | None:
        options = self._options
        if platform.machine() != "x86_64":
            return f"virtual machines need an x86-64 processor, and this one is {platform.machine()}"
        program = programs.qemu(options.qemu)
        if program is None:
            where = f"{options.qemu} is not a program" if options.qemu else "there is no qemu-system-x86_64 on PATH"
            return f"{where}; install QEMU (Debian: qemu-system-x86), or set CARREL_MICROVM_QEMU"
        if os.geteuid() != 0:
            return "carrel does not run as root; run `carrel serve` as root to use virtual machines"
        if (problem := programs.problem(program)) is not None:
            return problem
        if programs.file_server(options.virtiofsd) is None:
            return "there is no virtiofsd; install it (Debian: virtiofsd), or set CARREL_MICROVM_VIRTIOFSD"
        found = kernel.find(options.kernel, options.modules)
        if found is None:
            return (
                "there is no kernel with its modules in /boot and /lib/modules; install one "
                "(Debian: linux-image-cloud-amd64), or set CARREL_MICROVM_KERNEL"
            )
        try:
            found.needed()
        except PlatformError as error:
            return f"{error}; {error.hint}"
        if "memory" not in probe.host().controllers:
            return "no cgroup for memory can be made on this host; run `carrel doctor`"
        if not options.allow_emulation and (problem := programs.kvm_problem(program, found)) is not None:
            return f"{problem}; use a host with KVM, or set CARREL_MICROVM_ALLOW_EMULATION=true, which is slow"
        return None

    def missing(self) -> str | None:
        return self._lacking

    @cached_property
    def _accelerator(self) -> str:
        """How machines run. Blocking, the first time."""
        program, found = self._programs()[0], kernel.find(self._options.kernel, self._options.modules)
        return "kvm" if found is not None and programs.kvm_problem(program, found) is None else "tcg"

    def _programs(self) -> tuple[str, programs.FileServer]:
        program, server = programs.qemu(self._options.qemu), programs.file_server(self._options.virtiofsd)
        if program is None or server is None:
            raise PlatformError("QEMU or virtiofsd is gone", hint="run `carrel doctor`")
        return program, server

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

    async def _prepared(self) -> _Prepared:
        if self._preparing is None or (self._preparing.done() and self._preparing.exception() is not None):
            self._preparing = asyncio.ensure_future(asyncio.to_thread(self._prepare))
        return await asyncio.shield(self._preparing)

    def _prepare(self) -> _Prepared:
        found = kernel.find(self._options.kernel, self._options.modules)
        if found is None:
            raise PlatformError("the kernel of the virtual machines is gone", hint="run `carrel doctor`")
        try:
            os.makedirs(self._sandboxes, 0o700, exist_ok=True)
            os.makedirs(self._roots, 0o700, exist_ok=True)
            self._remove_unused()
            base = base_root.make(os.path.join(self._roots, secrets.token_hex(8)), self._shared)
        except OSError as error:
            raise PlatformError(f"the root of virtual machines cannot be made: {error}") from error
        made = bundle.provide(self._bundles)
        first = initramfs.provide(os.path.join(self._run_dir, _INITRAMFS), made.path, found.needed())
        return _Prepared(base, made, found, first)

    def _remove_unused(self) -> None:
        """Remove what servers that are gone have made, once none of their sandboxes is left."""
        if not os.listdir(self._sandboxes):
            for name in os.listdir(self._roots):
                remove_tree(os.path.join(self._roots, name))
            remove_tree(os.path.join(self._run_dir, _INITRAMFS))

    async def start(self, launch: Launch) -> Handle:
        self.require(NETWORK_CAPABILITY[launch.network])
        _refuse(launch)
        if launch.image is not None:
            self.require(Capability.IMAGES)
        prepared = await self._prepared()
        await self.remove({"id": launch.id})  # a start that was killed may have left something
        started = False
        try:
            handle = await self._start(launch, prepared)
            started = True
        except OSError as error:
            raise PlatformError(f"the virtual machine could not be started: {error}") from error
        finally:
            if not started:
                await asyncio.shield(self.remove({"id": launch.id}))
        return handle

    async def _start(self, launch: Launch, prepared: _Prepared) -> Handle:
        place = self._place(launch.id)
        control = ControlDirectory(f"{place}/{_CONTROL}")
        order = await run_to_end(lambda: self._order(launch, prepared, place, control))
        with control.listen_for_supervisor() as listener:
            failure = await self._stagers.start(order)
            supervisor = await waiting_supervisor(listener, failure, _DEADLINE_S[self._accelerator])
        with contextlib.closing(supervisor):
            pid = supervisor.pid  # the keeper has connected for it
            started = start_time(pid)
            await supervisor.begin(_facts(launch))
        self._stagers.prepare()
        return {
            "provider": self.name,
            "id": launch.id,
            "socket": f"{place}/{_SOCKET}",
            "pid": pid,
            "start_time": started,
            "egress": launch.network.proxied,
        }

    def _order(self, launch: Launch, prepared: _Prepared, place: str, control: ControlDirectory) -> str:
        """Make the directory of a sandbox, and write the order for its keeper; return the path of the order."""
        image, base = launch.image, prepared.base
        if image is not None:
            staged.check_image(image, self._images)
        program, server = self._programs()
        machine = Machine(
            accelerator=self._accelerator,
            cpus=max(1, math.ceil(launch.cpus or min(_MOST_CPUS, os.cpu_count() or 1))),
            memory_mb=launch.memory_mb,
            processes=launch.processes,
            default_mb=self._options.memory_mb,
            egress=launch.network.proxied,
        )
        os.mkdir(place, 0o700)
        for name in (_ROOT, _COVERS, _BOX):
            os.mkdir(f"{place}/{name}", 0o755)
        control.create()
        mounts = [StagedMount(launch.workspace, inside.WORKSPACE, writable=True)]
        if inside.ENVIRONMENTS in self._shared:
            mounts.append(StagedMount(self._shared[inside.ENVIRONMENTS], inside.ENVIRONMENTS))
        path = image.environment.get("PATH", "").split(":")[:64] if image is not None else []
        stage = StageOrder(
            root=f"{place}/{_ROOT}",
            layers=[base.root] if image is None else base.layers(image.directory, trust=launch.trust),
            mounts=(*(base.mounts if image is None else base.tools), *mounts),
            covers=f"{place}/{_COVERS}",
            secrets="",
            owner=SANDBOX_UID,
            program=(),
            groups=self._groups.make(launch.id, machine.host_mb, launch.cpus),
            masks=staged.write_masks(launch.masks, f"{place}/{_MASKS}"),
            path=[folder for folder in path if folder.startswith("/")],
        )
        devices = {programs.KVM: os.stat(programs.KVM).st_gid} if machine.accelerator == "kvm" else {}
        order = MachineOrder(
            stage=stage,
            box=f"{place}/{_BOX}",
            server=commands.file_server(server.path, of_qemu=server.of_qemu),
            machine=commands.qemu(program, machine),
            files={commands.KERNEL: prepared.kernel.path, commands.INITRAMFS: prepared.initramfs},
            packages=sorted({each for each in map(programs.package, (program, server.path)) if each is not None}),
            devices=devices,
            control=control.path,
            socket=f"{place}/{_SOCKET}",
            egress=launch.network.proxied,
            disk_mb=launch.disk_mb or 0,
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
        await asyncio.to_thread(self._groups.end, id)
        await asyncio.to_thread(remove_tree, self._place(id))

    async def way_out(self, handle: Handle) -> int | None:
        if not handle.get("egress"):
            return None
        control = ControlDirectory(f"{self._place(str(handle['id']))}/{_CONTROL}")
        listener = await asyncio.to_thread(control.listen_for_egress)
        return listener.detach()

    async def resources(self, handles: Sequence[Handle]) -> Mapping[str, ResourceUse]:
        return await asyncio.to_thread(groups.resources, [str(handle["id"]) for handle in handles])

    async def close(self) -> None:
        if self._preparing is not None:
            await asyncio.gather(self._preparing, return_exceptions=True)
            if not self._preparing.cancelled() and self._preparing.exception() is None:
                base = self._preparing.result().base
                if not await self.running():
                    await asyncio.to_thread(remove_tree, base.place)
        await self._stagers.close()
        self._groups.close()


def _facts(launch: Launch) -> dict[str, Any]:
    """Return the facts for the supervisor of a sandbox."""
    return facts_of(launch, uid=SANDBOX_UID, gid=SANDBOX_UID, secrets=True, user="agent", seccomp=seccomp.build())


def _refuse(launch: Launch) -> None:
    """Refuse what virtual machines cannot do and no capability names."""
    if launch.folder is not None:
        raise Unsupported("a virtual machine cannot work on a folder of the host", field="workspace_path")
    if launch.image is not None and launch.image.writable:
        raise Unsupported("the root of a virtual machine cannot be changed", field="image")
    for pattern in launch.masks.hidden if launch.masks is not None else ():
        if f"{pattern}/".startswith(("/proc/", "/dev/", "/sys/", "/run/", "/tmp/", f"{inside.HOME}/")):
            raise Unsupported(
                f"{pattern} cannot be hidden in a virtual machine: the machine makes it itself", field="masks"
            )
