"""What providers have in common whose root is built by `carrel.isolation.staging`, and whose kernel is a program of the
host: gVisor, and the keeper of a virtual machine.

A sandbox is a directory below the server's run directory (its orders, its root, the control directory), a cgroup with
its processes, and nothing else: its mounts belong to its processes. No process of ours watches it, so a restarted
server finds it as it was. It is ended by killing the processes in its group. Knows neither program.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar, Generic, TypeVar

from carrel.errors import PlatformError, Unsupported
from carrel.isolation import inside, masks, probe
from carrel.isolation.masks import Masks
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.isolation.staging import StagedMount, StageOrder
from carrel.primitives.atomic import write_file
from carrel.primitives.trees import remove_tree
from carrel.providers import base_root, bundle, foreign_processes, groups
from carrel.providers.base import (
    ISOLATING,
    NETWORK_CAPABILITY,
    Capability,
    Handle,
    Launch,
    Provider,
    ResourceUse,
    RootImage,
)
from carrel.providers.base_root import BaseRoot
from carrel.providers.bundle import SupervisorBundle
from carrel.providers.control_directory import ControlDirectory
from carrel.providers.groups import SandboxGroups
from carrel.providers.stagers import Stagers

CONTROL, ROOT, SOCKET = "c", "root", "s"
"""In the directory of a sandbox: the control directory, the root, and the socket, where no sandbox can write."""
_COVERS, _ORDER, _MASKS = "covers", "order.json", "masks"
_MOST_FOLDERS = 64


@dataclass(frozen=True)
class StagedParts:
    """What all sandboxes of a server share, made once."""

    base: BaseRoot
    bundle: SupervisorBundle


Parts = TypeVar("Parts", bound=StagedParts)


class StagedProvider(Provider, Generic[Parts]):
    """The order of a start, and how sandboxes are found and ended."""

    noun: ClassVar[str]
    """One sandbox in words, for errors: "a gVisor sandbox"."""
    made_inside: ClassVar[tuple[str, ...]]
    """Directories that the sandbox makes itself, so that nothing in them can be hidden from outside."""

    def __init__(
        self,
        run_dir: str,
        shared: Mapping[str, str] = MappingProxyType({}),
        *,
        stagers: Stagers,
        bundles: str,
        images: str = "",
    ):
        """`bundles` is the directory of the supervisor's bundles; the rest is as for the other providers."""
        self._sandboxes = os.path.join(run_dir, self.name)
        self._roots = os.path.join(run_dir, f"{self.name}-roots")
        self._shared = dict(shared)
        self._bundles = bundles
        self._images = images
        self._groups = SandboxGroups()
        self._stagers = stagers
        self._preparing: asyncio.Future[Parts] | None = None

    # what this host can do

    @abstractmethod
    def _not_installed(self) -> str | None:
        """Return which program is not there, and how to get it."""

    @abstractmethod
    def _not_usable(self) -> str | None:
        """Return why the programs, which are there, cannot be used by this process. Blocking."""

    @cached_property
    def _lacking(self) -> str | None:
        problem = self._not_installed()
        if os.geteuid() != 0:
            words = f"the provider '{self.name}' needs root; run `carrel serve` as root"
            return words if problem is None else f"{words}; also, {problem}"
        if problem is not None:
            return problem
        if "memory" not in probe.host().controllers:
            return "no cgroup for memory can be made on this host; run `carrel doctor`"
        return self._not_usable()

    def missing(self) -> str | None:
        return self._lacking

    def capabilities(self) -> frozenset[Capability]:
        promised = {*ISOLATING, Capability.LIMIT_MEMORY, Capability.LIMIT_PROCESSES}
        host = probe.host()
        if "cpu" in host.controllers:
            promised.add(Capability.LIMIT_CPUS)
        if inside.ENVIRONMENTS in self._shared:
            promised.add(Capability.ENVIRONMENTS)
        if self._images and host.overlays:
            promised.add(Capability.IMAGES)
        return frozenset(promised)

    # what is made once

    async def warm(self) -> None:
        if await asyncio.to_thread(self.missing) is None:
            with contextlib.suppress(PlatformError):  # the first start of a sandbox gets the reason
                await self._prepared()
                self._stagers.prepare()

    async def _prepared(self) -> Parts:
        """Return what all sandboxes share. A failure is tried again by the next start."""
        if self._preparing is None or (self._preparing.done() and self._preparing.exception() is not None):
            self._preparing = asyncio.ensure_future(asyncio.to_thread(self._prepare))
        return await asyncio.shield(self._preparing)

    @abstractmethod
    def _prepare(self) -> Parts:
        """Make what all sandboxes share. Blocking. Raises `PlatformError`."""

    def _make_parts(self) -> StagedParts:
        """Make the root and the bundle. Blocking."""
        try:
            os.makedirs(self._sandboxes, 0o700, exist_ok=True)
            os.makedirs(self._roots, 0o700, exist_ok=True)
            self._remove_unused()
            base = base_root.make(os.path.join(self._roots, secrets.token_hex(8)), self._shared)
        except OSError as error:
            raise PlatformError(f"the root of {self.noun} cannot be made: {error}") from error
        return StagedParts(base, bundle.provide(self._bundles))

    def _remove_unused(self) -> None:
        """Remove the roots of servers that are gone, once no sandbox is left. Blocking."""
        if not _names(self._sandboxes):
            base_root.remove_unused(self._roots)

    # starting

    def _check(self, launch: Launch) -> None:
        """Refuse a launch that needs what this host lacks, or what these sandboxes never have."""
        self.require(NETWORK_CAPABILITY[launch.network])
        if launch.folder is not None:
            raise Unsupported(f"{self.noun} cannot work on a folder of the host", field="workspace_path")
        if launch.image is not None and launch.image.writable:
            raise Unsupported(f"the root of {self.noun} cannot be changed", field="image")
        for pattern in launch.masks.hidden if launch.masks is not None else ():
            if f"{pattern}/".startswith(self.made_inside):
                raise Unsupported(f"{pattern} cannot be hidden in {self.noun}, which makes it itself", field="masks")
        if launch.image is not None:
            self.require(Capability.IMAGES)

    async def _start_whole(self, launch: Launch) -> Handle:
        """Start a sandbox by `_start`. A start that fails or is cancelled leaves nothing."""
        self._check(launch)
        parts = await self._prepared()
        await self.remove({"id": launch.id})  # a start that was killed may have left something
        with self._failing():
            try:
                return await self._start(launch, parts, self._place(launch.id))
            except BaseException:
                await asyncio.shield(self.remove({"id": launch.id}))
                raise

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Name what has failed."""
        try:
            yield
        except OSError as error:
            raise PlatformError(f"{self.noun} could not be started: {error}") from error

    @abstractmethod
    async def _start(self, launch: Launch, parts: Parts, place: str) -> Handle:
        """Start a sandbox whose directory is at `place` and is not there yet. Raises `OSError` or a `CarrelError`."""

    def _make_place(self, place: str, names: Sequence[str]) -> ControlDirectory:
        """Make the directory of a sandbox, with these directories in it. Blocking."""
        os.makedirs(self._sandboxes, 0o700, exist_ok=True)  # another object of this server may have removed it
        os.mkdir(place, 0o700)
        for name in (ROOT, _COVERS, *names):
            os.mkdir(f"{place}/{name}", 0o755)
        control = ControlDirectory(f"{place}/{CONTROL}")
        control.create()
        return control

    def _stage(
        self,
        launch: Launch,
        base: BaseRoot,
        place: str,
        mounts: Sequence[StagedMount],
        groups: Sequence[str],
        *,
        program: Sequence[str] = (),
        secrets: str = "",
    ) -> StageOrder:
        """Return the order for the root of a sandbox; see `StageOrder`. Its masks are written. Blocking."""
        image = launch.image
        if image is not None:
            self._check_image(image)
        path = image.environment.get("PATH", "").split(":")[:_MOST_FOLDERS] if image is not None else []
        return StageOrder(
            root=f"{place}/{ROOT}",
            layers=[base.root] if image is None else base.layers(image.directory, trust=launch.trust),
            mounts=(*(base.mounts if image is None else base.tools), *mounts),
            covers=f"{place}/{_COVERS}",
            secrets=secrets,
            owner=SANDBOX_UID,
            program=program,
            groups=groups,
            masks=_write_masks(launch.masks, f"{place}/{_MASKS}"),
            path=[folder for folder in path if folder.startswith("/")],
        )

    def _check_image(self, image: RootImage) -> None:
        """Check that the image is the directory that was meant, and that an overlay can name it."""
        found = os.lstat(image.directory)
        if (found.st_dev, found.st_ino) != tuple(image.identity):
            raise PlatformError(f"the image {image.directory} was replaced")
        if os.path.relpath(image.directory, self._images).startswith("..") or set(":,\\") & set(image.directory):
            raise PlatformError(f"the image {image.directory} is not below {self._images}")

    def _place(self, id: str) -> str:
        if not id or "/" in id or id.startswith("."):
            raise PlatformError(f"'{id[:64]}' cannot be the id of a sandbox")
        return os.path.join(self._sandboxes, id)

    # sandboxes that run

    async def alive(self, handle: Handle) -> bool:
        pid, started = handle.get("pid"), handle.get("start_time")
        return isinstance(pid, int) and isinstance(started, int) and foreign_processes.runs(pid, started)

    async def running(self) -> list[str]:
        return await asyncio.to_thread(_names, self._sandboxes)

    async def remove(self, handle: Handle) -> None:
        id = str(handle["id"])
        await asyncio.to_thread(self._groups.end, id)
        await asyncio.to_thread(remove_tree, self._place(id))

    async def way_out(self, handle: Handle) -> int | None:
        if not handle.get("egress"):
            return None
        control = ControlDirectory(f"{self._place(str(handle['id']))}/{CONTROL}")
        listener = await asyncio.to_thread(control.listen_for_egress)
        return listener.detach()

    async def resources(self, handles: Sequence[Handle]) -> Mapping[str, ResourceUse]:
        return await asyncio.to_thread(groups.resources, [str(handle["id"]) for handle in handles])

    async def close(self) -> None:
        if self._preparing is not None:
            await asyncio.gather(self._preparing, return_exceptions=True)
            if not self._preparing.cancelled() and self._preparing.exception() is None:
                os.close(self._preparing.result().base.lock)
        await asyncio.to_thread(self._remove_unused)
        await self._stagers.close()
        self._groups.close()
        for folder in (self._sandboxes, self._roots):
            with contextlib.suppress(OSError):  # not there, or with what sandboxes that go on need
                os.rmdir(folder)


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def write_order(place: str, text: str) -> str:
    """Write an order for a stager; return its path. Blocking."""
    path = f"{place}/{_ORDER}"
    write_file(path, text.encode())
    return path


def _write_masks(wanted: Masks | None, path: str) -> str:
    """Write masks for a `StageOrder`; return the path, or nothing without masks. Blocking."""
    if wanted is None:
        return ""
    packed = masks.pack(wanted)
    try:
        write_file(path, masks.content(packed))
    finally:
        os.close(packed)
    return path
