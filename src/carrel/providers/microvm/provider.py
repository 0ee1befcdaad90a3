"""Starts virtual machines; how they are found and ended is in `providers.staged`.

The processes of a machine are a keeper (`carrel.isolation.machine.keeper`), QEMU and a file server, and need no server.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from carrel.errors import PlatformError
from carrel.isolation import inside, seccomp
from carrel.isolation.cgroups import start_time
from carrel.isolation.machine import keeper
from carrel.isolation.machine.keeper import MachineOrder
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.isolation.staging import StagedMount
from carrel.providers.base import Handle, Launch
from carrel.providers.control_directory import facts_of, waiting_supervisor
from carrel.providers.microvm import commands, initramfs, kernel, programs
from carrel.providers.microvm.commands import Machine
from carrel.providers.microvm.kernel import GuestKernel
from carrel.providers.microvm.options import MicrovmOptions
from carrel.providers.staged import SOCKET, StagedParts, StagedProvider, write_order
from carrel.providers.stagers import Stagers
from carrel.threads import run_to_end

_INITRAMFS, _BOX = "initramfs", "box"
_DEADLINE_S = {"kvm": 60.0, "tcg": 240.0}
"""How long the start of a machine may take. An emulated one needs seconds of processor time on a busy host."""
_MOST_CPUS = 8
"""The most processors of a machine without a limit of processors."""


@dataclass(frozen=True)
class MachineParts(StagedParts):
    """What all machines share, made once per server."""

    kernel: GuestKernel
    initramfs: str


class MicrovmProvider(StagedProvider[MachineParts]):
    """Sandboxes whose kernel is a Linux of their own in a virtual machine, without a network device.

    Files are served by a program that sees nothing but the root of the sandbox. Everything else goes over one serial
    line: the supervisor, and with an allow list connections to a socket of the host, the sandbox's identity.
    """

    name = "microvm"
    isolation_level = 3
    noun = "a virtual machine"
    made_inside = ("/proc/", "/dev/", "/sys/", "/run/", "/tmp/", f"{inside.HOME}/")

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
        stagers = Stagers(keeper.__name__, "the virtual machine")
        super().__init__(run_dir, shared, stagers=stagers, bundles=bundles, images=images)
        self._options = options

    def _not_installed(self) -> str | None:
        options = self._options
        if platform.machine() != "x86_64":
            return f"virtual machines need an x86-64 processor, and this one is {platform.machine()}"
        if programs.qemu(options.qemu) is None:
            where = f"{options.qemu} is not a program" if options.qemu else "there is no qemu-system-x86_64 on PATH"
            return f"{where}; install QEMU (Debian: qemu-system-x86), or set CARREL_MICROVM_QEMU"
        if programs.file_server(options.virtiofsd) is None:
            return "there is no virtiofsd; install it (Debian: virtiofsd), or set CARREL_MICROVM_VIRTIOFSD"
        if kernel.find(options.kernel, options.modules) is None:
            return (
                "there is no kernel with its modules in /boot and /lib/modules; install one "
                "(Debian: linux-image-cloud-amd64), or set CARREL_MICROVM_KERNEL"
            )
        return None

    def _not_usable(self) -> str | None:
        program, found = self._programs()[0], self._kernel()
        if (problem := programs.problem(program)) is not None:
            return problem
        try:
            found.needed()
        except PlatformError as error:
            return f"{error}; {error.hint}"
        if not self._options.allow_emulation and (problem := programs.kvm_problem(program, found)) is not None:
            return f"{problem}; use a host with KVM, or set CARREL_MICROVM_ALLOW_EMULATION=true, which is slow"
        return None

    @cached_property
    def _accelerator(self) -> str:
        """How machines run. Blocking, the first time."""
        return "kvm" if programs.kvm_problem(self._programs()[0], self._kernel()) is None else "tcg"

    def _programs(self) -> tuple[str, programs.FileServer]:
        program, server = programs.qemu(self._options.qemu), programs.file_server(self._options.virtiofsd)
        if program is None or server is None:
            raise PlatformError("QEMU or virtiofsd is gone", hint="run `carrel doctor`")
        return program, server

    def _kernel(self) -> GuestKernel:
        found = kernel.find(self._options.kernel, self._options.modules)
        if found is None:
            raise PlatformError("the kernel of the virtual machines is gone", hint="run `carrel doctor`")
        return found

    def _prepare(self) -> MachineParts:
        parts, found = self._make_parts(), self._kernel()
        first = os.path.join(parts.base.place, _INITRAMFS)
        initramfs.write(first, parts.bundle.path, found.needed())
        return MachineParts(parts.base, parts.bundle, found, first)

    async def start(self, launch: Launch) -> Handle:
        return await self._start_whole(launch)

    async def _start(self, launch: Launch, parts: MachineParts, place: str) -> Handle:
        control = await run_to_end(lambda: self._make_place(place, (_BOX,)))
        order = await run_to_end(lambda: write_order(place, self._order(launch, parts, place, control.path).text()))
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
            "socket": f"{place}/{SOCKET}",
            "pid": pid,
            "start_time": started,
            "egress": launch.network.proxied,
        }

    def _order(self, launch: Launch, parts: MachineParts, place: str, control: str) -> MachineOrder:
        """Return the order for the keeper of a machine."""
        program, server = self._programs()
        machine = Machine(
            accelerator=self._accelerator,
            cpus=max(1, math.ceil(launch.cpus or min(_MOST_CPUS, os.cpu_count() or 1))),
            memory_mb=launch.memory_mb,
            processes=launch.processes,
            default_mb=self._options.memory_mb,
            egress=launch.network.proxied,
        )
        mounts = [StagedMount(launch.workspace, inside.WORKSPACE, writable=True)]
        if inside.ENVIRONMENTS in self._shared:
            mounts.append(StagedMount(self._shared[inside.ENVIRONMENTS], inside.ENVIRONMENTS))
        groups = self._groups.make(launch.id, machine.host_mb, launch.cpus)
        return MachineOrder(
            stage=self._stage(launch, parts.base, place, mounts, groups),
            box=f"{place}/{_BOX}",
            server=commands.file_server(server.path, of_qemu=server.of_qemu),
            machine=commands.qemu(program, machine),
            files={commands.KERNEL: parts.kernel.path, commands.INITRAMFS: parts.initramfs},
            packages=sorted({each for each in map(programs.package, (program, server.path)) if each is not None}),
            devices={programs.KVM: os.stat(programs.KVM).st_gid} if machine.accelerator == "kvm" else {},
            control=control,
            socket=f"{place}/{SOCKET}",
            egress=launch.network.proxied,
            disk_mb=launch.disk_mb or 0,
        )


def _facts(launch: Launch) -> dict[str, Any]:
    """Return the facts for the supervisor of a sandbox."""
    return facts_of(launch, uid=SANDBOX_UID, gid=SANDBOX_UID, secrets=True, user="agent", seccomp=seccomp.build())
