"""Starts gVisor sandboxes and gives them to their owners; how they are found and ended is in `providers.staged`.

`runsc` starts them, and is not asked afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from carrel.errors import PlatformError
from carrel.isolation import inside, late_masks, late_mounts, staging
from carrel.isolation.cgroups import start_time
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.isolation.staging import StagedMount
from carrel.models import Network
from carrel.primitives.atomic import write_file
from carrel.primitives.kernel_files import read_if_there
from carrel.providers import bundle, groups
from carrel.providers.base import Handle, Launch
from carrel.providers.control_directory import REPORT, ControlDirectory, WaitingSupervisor, facts_of, waiting_supervisor
from carrel.providers.gvisor import oci, runsc
from carrel.providers.gvisor.options import LIMITS, GvisorOptions
from carrel.providers.staged import CONTROL, ROOT, SOCKET, StagedParts, StagedProvider, write_order
from carrel.providers.stagers import Stagers
from carrel.threads import run_to_end

_STATE, _CONFIG, _PID, _LATE = "state", "config.json", "pid", "late"
_OVERHEAD_MB = 128
"""What gVisor itself may use besides the memory of the sandbox."""


class GvisorProvider(StagedProvider[StagedParts]):
    """Sandboxes whose kernel is gVisor's: a program that has few ways to the host's kernel, and serves theirs itself.

    They have no network but loopback. With an allow list, the supervisor carries connections from the port of the proxy
    to a socket of the host, which is the sandbox's identity. A memory limit holds for the whole sandbox: one that
    exceeds it is ended, because the host's kernel sees one process and not those in the sandbox.
    """

    name = "gvisor"
    isolation_level = 2
    noun = "a gVisor sandbox"
    made_inside = ("/proc/", "/dev/", "/sys/")

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
        stagers = Stagers(staging.__name__, "runsc")
        super().__init__(run_dir, shared, stagers=stagers, bundles=bundles, images=images)
        self._options = options
        self._waiting: dict[str, WaitingSupervisor] = {}
        """The supervisors of slots that nobody has claimed."""

    def _not_installed(self) -> str | None:
        if runsc.find(self._options.runsc) is not None:
            return None
        where = f"{self._options.runsc} is not a program" if self._options.runsc else "there is no runsc on PATH"
        return f"{where}; install gVisor, or build it with scripts/build-runsc, and set CARREL_GVISOR_RUNSC"

    def _not_usable(self) -> str | None:
        program = runsc.find(self._options.runsc)
        if program is not None and (problem := runsc.problem(program)) is not None:
            return problem
        if self._options.platform == "kvm" and not os.access("/dev/kvm", os.R_OK | os.W_OK):
            return "/dev/kvm cannot be used; set CARREL_GVISOR_PLATFORM=systrap, or make KVM available"
        return None

    def _prepare(self) -> StagedParts:
        return self._make_parts()

    async def start(self, launch: Launch) -> Handle:
        self._check(launch)
        slot = await self.start_slot(replace(self._slot_for(launch), id=launch.id))
        return await self.claim(slot, launch)

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
        return await self._start_whole(launch)

    async def _start(self, launch: Launch, parts: StagedParts, place: str) -> Handle:
        # A start that is cancelled waits for these: what they make is removed afterwards.
        control = await run_to_end(lambda: self._write(launch, place))
        order = await run_to_end(lambda: self._order(launch, parts, place, control))
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
        with self._failing():
            try:
                self._check(launch)
                return await self._claim(id, slot, launch)
            except BaseException:
                await asyncio.shield(self.remove(slot))
                raise

    async def _claim(self, id: str, slot: Handle, launch: Launch) -> Handle:
        place = self._place(id)
        supervisor = self._waiting.pop(id, None)
        if supervisor is None:
            raise PlatformError(f"'{id}' is not a slot of this server")
        with contextlib.closing(supervisor):
            await run_to_end(lambda: self._attach(id, slot, launch))
            await supervisor.begin(_facts(id, launch))
        socket = ControlDirectory(f"{place}/{CONTROL}").socket_path
        return {
            "provider": self.name,
            "id": id,
            "socket": await asyncio.to_thread(_take_socket, socket, f"{place}/{SOCKET}"),
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

    def _write(self, launch: Launch, place: str) -> ControlDirectory:
        """Make the directory of a sandbox, and write what `runsc` reads."""
        control = self._make_place(place, (_STATE, _LATE))
        late = f"{place}/{_LATE}"
        for below in (inside.WORKSPACE, late_masks.COVERS):
            os.mkdir(late + below, 0o755)
        os.mkdir(f"{control.path}/private/{os.path.basename(oci.LATE)}", 0o700)
        spec = oci.GvisorSpec(
            id=launch.id,
            root=f"{place}/{ROOT}",
            control=control.path,
            late=late,
            secrets=f"{control.path}/private/secrets",
            command=tuple(bundle.command(REPORT)),
            environments=self._shared.get(inside.ENVIRONMENTS, ""),
            memory_mb=launch.memory_mb,
        )
        write_file(f"{place}/{_CONFIG}", json.dumps(oci.configuration(spec)).encode())
        return control

    def _order(self, launch: Launch, parts: StagedParts, place: str, control: ControlDirectory) -> str:
        """Write the order for the process that builds the root and becomes `runsc`; return its path."""
        program = runsc.find(self._options.runsc)
        if program is None:
            raise PlatformError("runsc is gone", hint="run `carrel doctor`")
        order = self._stage(
            launch,
            parts.base,
            place,
            [StagedMount(parts.bundle.path, inside.BUNDLE)],
            self._groups.make(launch.id, None if launch.memory_mb is None else launch.memory_mb + _OVERHEAD_MB),
            program=oci.command(
                program, f"{place}/{_STATE}", self._options.platform, place, f"{place}/{_PID}", launch.id
            ),
            secrets=f"{control.path}/private/secrets",
        )
        return write_order(place, order.text())

    async def remove(self, handle: Handle) -> None:
        if (supervisor := self._waiting.pop(str(handle["id"]), None)) is not None:
            supervisor.close()
        await super().remove(handle)

    async def out_of_memory_kills(self, handle: Handle) -> int:
        return (await asyncio.to_thread(groups.usage, str(handle["id"]))).get("oom_kills", 0)

    async def close(self) -> None:
        for id in list(self._waiting):
            await self.remove({"id": id})
        await super().close()


def _facts(id: str, launch: Launch) -> dict[str, Any]:
    """Return the facts for the supervisor of a sandbox. `id` is that of its slot."""
    facts = facts_of(launch, uid=SANDBOX_UID, gid=SANDBOX_UID, secrets=True, user="agent")
    facts |= {"watch_memory": True, "late": oci.LATE}
    facts["limits"] = {name: facts["limits"][name] for name in LIMITS if name in facts["limits"]}
    if launch.processes is not None:
        facts["kernel_files"] = {oci.tasks_file(id): str(launch.processes)}
        facts["limits"]["RLIMIT_NPROC"] = launch.processes  # not enforced, but shown, and the supervisor goes by it
    return facts


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
