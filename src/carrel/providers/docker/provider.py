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
from collections.abc import Coroutine, Mapping
from contextlib import closing, suppress
from types import MappingProxyType
from typing import Any

from carrel.errors import CarrelError, PlatformError, Unsupported
from carrel.isolation import cgroups, launchers, seccomp, watchdog
from carrel.isolation.inside import ENVIRONMENTS
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.providers import bundle, foreign_processes
from carrel.providers.base import NETWORK_CAPABILITY, Capability, Handle, Launch, Provider
from carrel.providers.bundle import SupervisorBundle
from carrel.providers.control_directory import ControlDirectory, facts_of, waiting_supervisor
from carrel.providers.docker import containers, roots
from carrel.providers.docker.engine import Engine, EngineRefusal, probe
from carrel.providers.zygote_provider import number

SOCKET = "/var/run/docker.sock"
PROBED_FOR_S = 10.0
"""How long the answer of a daemon about itself is used."""
REMOVAL_S = 60.0
_FOLDER = "docker"
_PAUSE_S = 0.05
_MAPPED = ("name=userns", "name=rootless")
_LIMITS = {
    Capability.LIMIT_MEMORY: "MemoryLimit",
    Capability.LIMIT_PROCESSES: "PidsLimit",
    Capability.LIMIT_CPUS: "CpuCfsQuota",
}
"""Limits that a daemon may lack, and how it says so."""


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
        self._starting: set[str] = set()
        self._probed: tuple[float, str | None, dict[str, Any]] = (-PROBED_FOR_S, None, {})

    # what this host can do

    def missing(self) -> str | None:
        return self._probe()[0]

    def capabilities(self) -> frozenset[Capability]:
        promised = {
            Capability.FILE_ISOLATION,
            Capability.PROCESS_ISOLATION,
            Capability.LIMIT_DISK,
            Capability.NETWORK_NONE,
            Capability.NETWORK_ALLOWLIST,
            Capability.SECRETS,
            Capability.TERMINAL,
            Capability.SURVIVES_RESTART,
        }
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
        self.require(NETWORK_CAPABILITY[launch.network])
        self._refuse(launch)
        image = launch.image
        user = await asyncio.to_thread(roots.user_of, image) if image is not None else None
        made = await self._provide_bundle()
        await asyncio.to_thread(os.makedirs, self._folder, 0o711, exist_ok=True)
        root = await (self._roots.of_host() if image is None else self._roots.of_image(image))
        control = self._control(launch.id)
        egress = launch.network.proxied
        facts = facts_of(
            launch,
            uid=SANDBOX_UID,
            gid=SANDBOX_UID,
            secrets=True,
            user=user.name if user is not None and user.uid == SANDBOX_UID else "",
            seccomp=seccomp.build(),
        )
        request = containers.ContainerRequest(
            launch, self._instance, root, made.path, control.path, self._volume(launch.id), self._mounts(launch, made)
        )
        self._starting.add(launch.id)
        try:
            await asyncio.to_thread(control.remove)  # of a start that was killed
            await asyncio.to_thread(control.create)
            if egress:
                self._egress[launch.id] = control.listen_for_egress()
            pid = await self._run(request, control, facts)
            started = cgroups.start_time(pid)
            if not started:
                raise PlatformError(f"sandbox {launch.id} ended as soon as it had started")
        except BaseException:
            await asyncio.shield(self._discard(launch.id))
            raise
        finally:
            self._starting.discard(launch.id)
        return {
            "provider": self.name,
            "id": launch.id,
            "socket": control.socket_path,
            "pid": pid,
            "start_time": started,
            "egress": egress,
        }

    def _refuse(self, launch: Launch) -> None:
        """Refuse what was not promised and would otherwise be dropped."""
        if launch.masks is not None:
            self.require(Capability.MASKS)
        if launch.folder is not None:
            self.require(Capability.FOLDERS)
        if launch.image is not None:
            self.require(Capability.IMAGES)
            if launch.image.writable:
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

    async def _run(
        self, request: containers.ContainerRequest, control: ControlDirectory, facts: Mapping[str, Any]
    ) -> int:
        """Create and start a container; return the PID of its supervisor once that is ready."""
        name = self._name(request.launch.id)
        with control.listen_for_supervisor() as listener:
            try:
                await _to_its_end(self._engine.post("/containers/create", containers.body(request), name=name))
                await _to_its_end(self._engine.post(f"/containers/{name}/start"))
            except EngineRefusal as refusal:
                raise PlatformError(f"sandbox {request.launch.id} could not be started: {refusal.detail}") from refusal
            supervisor = await waiting_supervisor(listener, self._end_of(name))
        with closing(supervisor):
            await supervisor.begin(facts)
            return supervisor.pid

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
        ids = [str(each["Labels"][containers.SANDBOX]) for each in found]
        await asyncio.to_thread(self._remove_strays, {self._key(id) for id in (*ids, *self._starting)})
        return ids

    def _remove_strays(self, keep: set[str]) -> None:
        """Remove control directories without a container: a server was killed between the two."""
        for entry in os.listdir(self._folder):
            if entry not in keep:
                ControlDirectory(os.path.join(self._folder, entry)).remove()

    async def remove(self, handle: Handle) -> None:
        await self._discard(str(handle["id"]))

    async def _discard(self, id: str) -> None:
        """Remove whatever there is of a sandbox; return when nothing is left."""
        if (listener := self._egress.pop(id, None)) is not None:
            listener.close()
        await self._delete(f"/containers/{self._name(id)}", force="true", v="true")
        await self._delete(f"/volumes/{self._volume(id)}", force="true")
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

    async def memory_bytes(self, handle: Handle) -> int | None:
        return (await asyncio.to_thread(cgroups.usage_of, number(handle, "pid"))).get("memory_bytes")

    async def held_bytes(self, handle: Handle) -> int:
        def look() -> int:
            device = os.stat(f"/proc/{number(handle, 'pid')}/root/workspace").st_dev
            return watchdog.deleted_open_bytes(number(handle, "pid"), device)

        try:
            return await asyncio.to_thread(look)
        except OSError:
            return 0

    async def close(self) -> None:
        for listener in self._egress.values():
            listener.close()
        self._egress.clear()
        await self._engine.close()
        with suppress(OSError):  # it has the control directories of sandboxes that go on
            os.rmdir(self._folder)

    # names

    def _key(self, id: str) -> str:
        return hashlib.sha256(id.encode()).hexdigest()[:16]

    def _name(self, id: str) -> str:
        return f"carrel-{self._instance}-{self._key(id)}"

    def _volume(self, id: str) -> str:
        return f"{self._name(id)}-secrets"

    def _control(self, id: str) -> ControlDirectory:
        return ControlDirectory(os.path.join(self._folder, self._key(id)))


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
    if not os.path.exists(path):
        return (
            f"there is no Docker daemon at {path}: install Docker (Debian: docker.io) or podman and start its service, "
            "or set CARREL_DOCKER_SOCKET to its socket",
            {},
        )
    if os.geteuid() != 0:
        return "carrel has to run as root to use Docker: the files of workspaces belong to the user of the agents", {}
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
