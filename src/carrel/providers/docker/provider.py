"""Sandboxes as containers. The supervisor comes from the bundle, so an image needs nothing.

A container is found by names and labels that are made from the data directory and the sandbox's id, also by a server
that did not start it. The containers of one host have one user in common, who owns the workspaces: see SECURITY.md.
"""

from __future__ import annotations

import asyncio
import glob
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from carrel.errors import CarrelError, PlatformError, Unsupported
from carrel.isolation import cgroups, launchers, seccomp, watchdog
from carrel.isolation.inside import ENVIRONMENTS
from carrel.isolation.late_mounts import Sandbox
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.models import Network
from carrel.providers import bundle, foreign_processes
from carrel.providers.base import (
    ISOLATING,
    Capability,
    Handle,
    Launch,
    Provider,
    ResourceUse,
    RootImage,
)
from carrel.providers.bundle import SupervisorBundle
from carrel.providers.control_directory import ControlDirectory, WaitingSupervisor, facts_of, waiting_supervisor
from carrel.providers.docker import containers, late_parts, roots
from carrel.providers.docker.engine import Engine, EngineRefusal, changes_limits, probe
from carrel.providers.docker.masking import Masking
from carrel.providers.zygote_provider import number
from carrel.threads import run_to_end

SOCKET = "/var/run/docker.sock"
PROBED_FOR_S = 10.0
"""How long the answer of a daemon about itself is used."""
REMOVAL_S = 60.0
_FOLDER = "docker"
_PAUSE_S = 0.05
_MOST_FOLDERS = 64
_MAPPED = ("name=userns", "name=rootless")
_LIMITS = {
    Capability.LIMIT_MEMORY: "MemoryLimit",
    Capability.LIMIT_PROCESSES: "PidsLimit",
    Capability.LIMIT_CPUS: "CpuCfsQuota",
}
"""Limits that a daemon may lack, and how it says so."""


@dataclass(frozen=True)
class _Slot:
    """A container that waits for its owner: its supervisor, when that started, and what it was started with."""

    supervisor: WaitingSupervisor
    started: int
    launch: Launch


class DockerProvider(Provider):
    """Containers without a network, without capabilities, with a read-only root and the daemon's seccomp filter."""

    name = "docker"
    isolation_level = 1

    def __init__(
        self,
        run_dir: str,
        bundles: str,
        *,
        socket_path: str = SOCKET,
        shared: Mapping[str, str] = MappingProxyType({}),
        images: str = "",
    ):
        """`bundles` is the directory of bundles. `shared` maps paths in every sandbox to what is mounted there from the
        host. The roots of images are below the directory `images`.
        """
        self._folder = os.path.join(os.path.realpath(run_dir), _FOLDER)
        self._instance = hashlib.sha256(self._folder.encode()).hexdigest()[:16]
        self._bundles = bundles
        self._shared = dict(shared)
        self._images = images
        self._engine = Engine(socket_path)
        self._roots = roots.DockerRoots(self._engine, self._folder)
        self._bundle: SupervisorBundle | None = None
        self._bundling = asyncio.Lock()
        self._egress: dict[str, socket.socket] = {}
        self._masking = Masking()
        self._late_limits: bool | None = None
        self._starting: set[str] = set()
        self._slots: dict[str, _Slot] = {}
        self._probed: tuple[float, str | None, dict[str, Any]] = (-PROBED_FOR_S, None, {})

    # what this host can do

    def missing(self) -> str | None:
        return self._probe()[0]

    def capabilities(self) -> frozenset[Capability]:
        promised = set(ISOLATING)
        info = self._probe()[1]
        promised |= {limit for limit, key in _LIMITS.items() if info.get(key) is True}
        if ENVIRONMENTS in self._shared:
            promised.add(Capability.ENVIRONMENTS)
        if self._images:
            promised.add(Capability.IMAGES)
        return frozenset(promised)

    def _probe(self) -> tuple[str | None, dict[str, Any]]:
        """Return why the daemon cannot be used, and what it says about itself."""
        at, missing, info = self._probed
        if time.monotonic() - at >= PROBED_FOR_S:
            missing, info = _look_at(self._engine.path)
            self._probed = (time.monotonic(), missing, info)
        return missing, info

    # sandboxes

    async def start(self, launch: Launch) -> Handle:
        user = await self._user(launch)
        limits = replace(_root_of(launch), memory_mb=launch.memory_mb, cpus=launch.cpus, processes=launch.processes)
        return await self._claim(await self.start_slot(replace(limits, id=launch.id)), launch, user)

    def slot_for(self, launch: Launch) -> Launch | None:
        """See `Provider.slot_for`: a container has the root of its image from the start, and gets all else late."""
        possible = launch.folder is None and (launch.image is None or not launch.image.writable)
        return _root_of(launch) if possible and self._changes_limits() else None

    def _changes_limits(self) -> bool:
        """Whether the daemon can change the limits of a container, which a slot needs."""
        if self._late_limits is None:
            try:
                self._late_limits = changes_limits(self._engine.path)
            except (OSError, ValueError):
                return False  # it does not answer now, but may later
        return self._late_limits

    async def start_slot(self, launch: Launch) -> Handle:
        self._refuse(launch)
        made = await self._provide_bundle()
        await asyncio.to_thread(os.makedirs, self._folder, 0o711, exist_ok=True)
        root = await (self._roots.of_host() if launch.image is None else self._roots.of_image(launch.image))
        control = self._control(launch.id)
        request = containers.ContainerRequest(
            launch, self._instance, root, made.path, control.path, self._mounts(launch, made)
        )
        self._starting.add(launch.id)
        try:
            await asyncio.to_thread(control.remove)  # of a start that was killed
            await asyncio.to_thread(control.create)
            supervisor = await self._run(request, control)
            started = cgroups.start_time(supervisor.pid)
            slot = self._slots[launch.id] = _Slot(supervisor, started, launch)
            await self._change_mounts(slot, late_parts.confine)
        except BaseException:
            await asyncio.shield(self._discard(launch.id))
            raise
        finally:
            self._starting.discard(launch.id)
        return {
            "provider": self.name,
            "id": launch.id,
            "socket": control.socket_path,
            "pid": supervisor.pid,
            "start_time": started,
            "egress": False,
        }

    async def claim(self, slot: Handle, launch: Launch) -> Handle:
        try:
            user = await self._user(launch)
        except BaseException:
            await asyncio.shield(self.remove(slot))
            raise
        return await self._claim(slot, launch, user)

    async def _claim(self, handle: Handle, launch: Launch, user: str) -> Handle:
        id = str(handle["id"])
        try:
            slot = self._slots.get(id)
            if slot is None or _root_of(launch) != _root_of(slot.launch):
                raise PlatformError(f"slot {id} cannot become sandbox {launch.id}")
            await self._become(id, slot, launch, user)
            del self._slots[id]
            slot.supervisor.close()
        except BaseException:
            await asyncio.shield(self._discard(id))
            raise
        return {**handle, "egress": launch.network.proxied}

    async def _become(self, id: str, slot: _Slot, launch: Launch, user: str) -> None:
        """Give a container what belongs to its owner. Its supervisor becomes the agent with the facts, last of all."""
        facts = facts_of(launch, uid=SANDBOX_UID, gid=SANDBOX_UID, secrets=True, user=user, seccomp=seccomp.build())
        if launch.network.proxied:
            self._egress[id] = self._control(id).listen_for_egress()
        limiting = asyncio.ensure_future(self._limit(id, slot.launch, launch))  # meanwhile, it takes some milliseconds
        try:
            await self._change_mounts(slot, lambda box: late_parts.attach(box, launch.workspace, launch.memory_mb))
            await self._mask(slot, launch)
            await slot.supervisor.begin(facts)
            await self._change_mounts(slot, late_parts.seal)
            await limiting
        finally:
            limiting.cancel()
            await asyncio.gather(limiting, return_exceptions=True)

    async def _mask(self, slot: _Slot, launch: Launch) -> None:
        if launch.masks is not None:
            path = launch.image.environment.get("PATH", "").split(":")[:_MOST_FOLDERS] if launch.image else []
            folders = [folder for folder in path if folder.startswith("/")]
            await self._masking.apply(slot.supervisor.pid, slot.started, launch.masks, folders)

    async def _limit(self, id: str, slot: Launch, launch: Launch) -> None:
        """Have the daemon set the limits that a container was not created with. It tells systemd, which would undo
        those that are written to cgroups behind its back.
        """
        limits = containers.limits(launch)
        if limits != containers.limits(slot):
            await self._engine.post(f"/containers/{self._name(id)}/update", limits)

    async def _change_mounts(self, slot: _Slot, change: Callable[[Sandbox], None]) -> None:
        def work() -> None:
            with Sandbox(slot.supervisor.pid, slot.started) as sandbox:
                change(sandbox)

        name = self._name(slot.launch.id)
        try:
            await run_to_end(work)
        except OSError as error:
            # The daemon removes the files of a container that has ended, so any path may be missing in its root.
            if isinstance(error, ProcessLookupError) or not foreign_processes.runs(slot.supervisor.pid, slot.started):
                raise PlatformError(f"container {name} ended as soon as it had started") from error
            raise PlatformError(f"the mounts of container {name} cannot be changed: {error}") from error

    async def _user(self, launch: Launch) -> str:
        """Return the name of the agent in its image. Raises `Unsupported` for what cannot be a container."""
        self._refuse(launch)
        if launch.image is None:
            return ""
        user = await asyncio.to_thread(roots.user_of, launch.image)
        return user.name if user.uid == SANDBOX_UID else ""

    def _refuse(self, launch: Launch) -> None:
        """Refuse what was not promised and would otherwise be dropped."""
        self.require_for(launch)
        if launch.image is not None and launch.image.writable:
            raise Unsupported(
                "provider 'docker' cannot keep the changes of a root",
                field="image",
                hint="use the provider 'namespace' to build images",
            )

    async def _provide_bundle(self) -> SupervisorBundle:
        async with self._bundling:
            if self._bundle is None:
                self._bundle = await asyncio.to_thread(bundle.provide, self._bundles)
            return self._bundle

    def _mounts(self, launch: Launch, made: SupervisorBundle) -> dict[str, str]:
        if launch.image is not None:
            return self._shared
        pips = [found for pattern in launchers.MAINS for found in glob.glob(pattern)]
        return self._shared | containers.host_mounts(
            roots.host_directories(), pips, made.own_files, launchers.MAIN_PLACE
        )

    async def _run(self, request: containers.ContainerRequest, control: ControlDirectory) -> WaitingSupervisor:
        """Create and start a container; return its supervisor once that waits for its facts."""
        name = self._name(request.launch.id)
        with control.listen_for_supervisor() as listener:
            try:
                await _to_its_end(self._engine.post("/containers/create", containers.body(request), name=name))
                await _to_its_end(self._engine.post(f"/containers/{name}/start"))
            except EngineRefusal as refusal:
                raise PlatformError(f"sandbox {request.launch.id} could not be started: {refusal.detail}") from refusal
            return await waiting_supervisor(listener, self._end_of(name))

    async def _end_of(self, name: str) -> str:
        """Wait until a container has ended; return what it said."""
        ended = await self._engine.post(f"/containers/{name}/wait", patience_s=3600)
        with suppress(CarrelError):
            if said := await self._engine.log(name):
                return said
        return f"it ended with exit code {(ended or {}).get('StatusCode')}"

    async def alive(self, handle: Handle) -> bool:
        return foreign_processes.runs(number(handle, "pid"), number(handle, "start_time"))

    async def running(self) -> list[str]:
        if not os.path.isdir(self._folder) or await asyncio.to_thread(self.missing) is not None:
            return []
        filters = json.dumps({"label": [f"{containers.INSTANCE}={self._instance}"]})
        found = await self._engine.get("/containers/json", all="true", filters=filters) or ()
        return [str(each["Labels"][containers.SANDBOX]) for each in found]

    async def clean(self) -> None:
        if not os.path.isdir(self._folder) or await asyncio.to_thread(self.missing) is not None:
            return
        async with self._roots.resting():  # a root is built there too
            found = await asyncio.to_thread(os.listdir, self._folder)
            starting = set(self._starting)  # what starts after this look was not found
            keep = {self._key(id) for id in (*starting, *await self.running(), *self._starting)}
            await asyncio.to_thread(self._remove_strays, set(found) - keep)

    def _remove_strays(self, strays: set[str]) -> None:
        """Remove control directories without a container: a server was killed between the two."""
        for entry in strays:
            ControlDirectory(os.path.join(self._folder, entry)).remove()

    async def remove(self, handle: Handle) -> None:
        await self._discard(str(handle["id"]))

    async def _discard(self, id: str) -> None:
        """Remove whatever there is of a sandbox; return when nothing is left."""
        if (listener := self._egress.pop(id, None)) is not None:
            listener.close()
        if (slot := self._slots.pop(id, None)) is not None:
            slot.supervisor.close()
        await self._delete(f"/containers/{self._name(id)}", force="true", v="true")
        await asyncio.to_thread(self._control(id).remove)

    async def _delete(self, path: str, **query: str) -> None:
        """Delete an object of the daemon that others may be deleting or using for a moment."""
        until = time.monotonic() + REMOVAL_S
        while True:
            try:
                await self._engine.delete(path, **query)
                return
            except EngineRefusal as refusal:
                if refusal.number != 409 or time.monotonic() > until:
                    raise PlatformError(f"a sandbox could not be removed: {refusal.detail}") from refusal
            await asyncio.sleep(_PAUSE_S)

    async def way_out(self, handle: Handle) -> int | None:
        if not handle.get("egress"):
            return None
        id = str(handle["id"])
        if id not in self._egress:  # a server before this one started it
            self._egress[id] = await asyncio.to_thread(self._control(id).listen_for_egress)
        return os.dup(self._egress[id].fileno())

    async def out_of_memory_kills(self, handle: Handle) -> int:
        return (await asyncio.to_thread(cgroups.usage_of, number(handle, "pid"))).get("oom_kills", 0)

    async def resources(self, handles: Sequence[Handle]) -> Mapping[str, ResourceUse]:
        pids = {str(handle["id"]): number(handle, "pid") for handle in handles}
        found = await asyncio.to_thread(lambda: {id: cgroups.usage_of(pid) for id, pid in pids.items()})
        return {id: ResourceUse.counted(used) for id, used in found.items() if used}

    async def held_bytes(self, handle: Handle) -> int:
        def look() -> int:
            device = os.stat(f"/proc/{number(handle, 'pid')}/root/workspace").st_dev
            return watchdog.deleted_open_bytes(number(handle, "pid"), device)

        try:
            return await asyncio.to_thread(look)
        except OSError:
            return 0

    async def close(self) -> None:
        for id in list(self._slots):  # nobody can claim them any more
            await self._discard(id)
        for listener in self._egress.values():
            listener.close()
        self._egress.clear()
        await self._masking.close()
        await self._engine.close()
        with suppress(OSError):  # it has the control directories of sandboxes that go on
            os.rmdir(self._folder)

    # names

    def _key(self, id: str) -> str:
        return hashlib.sha256(id.encode()).hexdigest()[:16]

    def _name(self, id: str) -> str:
        return f"carrel-{self._instance}-{self._key(id)}"

    def _control(self, id: str) -> ControlDirectory:
        return ControlDirectory(os.path.join(self._folder, self._key(id)))


def _root_of(launch: Launch) -> Launch:
    """Return the launch of a container with the root of this one and nothing else."""
    image = launch.image
    return Launch("", "", Network.NONE, image=image and RootImage(image.directory, image.identity))


async def _to_its_end(request: Coroutine[Any, Any, object]) -> None:
    """Wait for a request also when the caller is cancelled: the daemon would complete it after the clean-up."""
    task = asyncio.ensure_future(request)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        task.exception()  # whether it failed does not matter any more
        raise


def _look_at(path: str) -> tuple[str | None, dict[str, Any]]:
    """Return why sandboxes cannot be containers of this daemon, and what it says about itself."""
    needs_root = "carrel has to run as root to use Docker: the files of workspaces belong to the user of the agents"
    root = os.geteuid() == 0
    if not os.path.exists(path):
        words = (
            f"there is no Docker daemon at {path}: install Docker (Debian: docker.io) or podman and start its service, "
            "or set CARREL_DOCKER_SOCKET to its socket"
        )
        return (words if root else f"{needs_root}; also, {words}"), {}
    if not root:
        return needs_root, {}
    try:
        info = probe(path)
    except (OSError, ValueError) as error:
        return f"the Docker daemon at {path} does not answer: {error}", {}
    if any(str(option).startswith(_MAPPED) for option in info.get("SecurityOptions") or ()):
        return (
            f"the Docker daemon at {path} maps users, so agents could not use their files: use another one",
            info,
        )
    if not any(str(option).startswith("name=seccomp") for option in info.get("SecurityOptions") or ()):
        return f"the Docker daemon at {path} does not filter system calls (seccomp): enable its default profile", info
    return None, info
