"""The interface of providers. A provider starts, finds and removes sandboxes; it does not know what happens inside one.

A provider promises capabilities by name. A request for anything else is refused before anything is created, never
ignored. A handle is a plain JSON value, so a restarted control plane finds its sandboxes again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from carrel.errors import Unsupported
from carrel.isolation.masks import Masks
from carrel.models import Network, ProviderStatus
from carrel.primitives.trees import Identity
from carrel.providers.links import LocalLink, SupervisorLink

Handle = dict[str, str | int | float | bool | None]
"""Identifies a sandbox: a flat JSON object, which always has `provider`, `id` and `socket`."""


class Capability(StrEnum):
    """A feature that a provider may promise."""

    FILE_ISOLATION = "file_isolation"
    PROCESS_ISOLATION = "process_isolation"
    LIMIT_CPUS = "limit_cpus"
    LIMIT_MEMORY = "limit_memory"
    LIMIT_PROCESSES = "limit_processes"
    LIMIT_DISK = "limit_disk"
    NETWORK_NONE = "network_none"
    NETWORK_ALLOWLIST = "network_allowlist"
    NETWORK_BRIDGE = "network_bridge"
    NETWORK_HOST = "network_host"
    MASKS = "masks"
    SECRETS = "secrets"
    ENVIRONMENTS = "environments"
    TERMINAL = "terminal"
    SURVIVES_RESTART = "survives_restart"
    FOLDERS = "folders"
    IMAGES = "images"
    IMAGE_BUILDS = "image_builds"


ISOLATING = frozenset(
    {
        Capability.FILE_ISOLATION,
        Capability.PROCESS_ISOLATION,
        Capability.LIMIT_DISK,
        Capability.NETWORK_NONE,
        Capability.NETWORK_ALLOWLIST,
        Capability.MASKS,
        Capability.SECRETS,
        Capability.TERMINAL,
        Capability.SURVIVES_RESTART,
    }
)
"""What every provider promises that isolates on this host, with whatever it makes sandboxes."""
NETWORK_CAPABILITY = {
    Network.NONE: Capability.NETWORK_NONE,
    Network.ALLOWLIST: Capability.NETWORK_ALLOWLIST,
    Network.INTERNET: Capability.NETWORK_ALLOWLIST,  # the same egress socket; only the proxy decides differently
    Network.BRIDGE: Capability.NETWORK_BRIDGE,
    Network.HOST: Capability.NETWORK_HOST,
}


@dataclass(frozen=True, slots=True)
class HostMount:
    """A file or directory of the host that belongs into a sandbox, and its identity when it was checked."""

    source: str
    target: str
    identity: Identity


@dataclass(frozen=True, slots=True)
class FolderMounts:
    """The mounts of a sandbox that works on a folder of the host in place. The folder is also the workspace."""

    folder: HostMount
    home: HostMount
    read_only: tuple[HostMount, ...] = ()


@dataclass(frozen=True, slots=True)
class RootImage:
    """An image that a sandbox runs from: a directory with the image's files, which no sandbox changes. It is below the
    provider's directory of images.

    `environment` holds beneath carrel's own variables and those of `Launch.env`. `working_directory` is where a command
    starts that names no directory; empty means the workspace. `user` is `USER` of the image, as it is written there: a
    name or number, with or without a group. Files are as they are in the image; whoever it names has no power outside.
    With `writable` the sandbox can change its root: the changes are kept in the directory `upper` of its volume.
    """

    directory: str
    identity: Identity
    environment: Mapping[str, str] = field(default_factory=dict)
    working_directory: str = ""
    user: str = ""
    writable: bool = False


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """The processor time of a sandbox since it started, and its memory now and at its peak. None: unknown."""

    cpu_s: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None

    @classmethod
    def counted(cls, found: Mapping[str, int]) -> ResourceUse:
        """Make it from what `cgroups.group_usage` returns."""
        cpu_us = found.get("cpu_us")
        return cls(None if cpu_us is None else cpu_us / 1e6, found.get("memory_bytes"), found.get("memory_peak_bytes"))


@dataclass(frozen=True)
class Launch:
    """Everything that a provider needs to start one sandbox. Limits and masks that are None are not enforced.

    With `trust`, the tools inside trust the certificates in `/run/secrets/carrel-ca.pem` and no others. `folder`
    replaces the workspace by a folder of the host. `image` replaces the host's programs by those of an image.
    """

    id: str
    workspace: str
    network: Network
    cpus: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    processes: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    masks: Masks | None = None
    trust: bool = False
    folder: FolderMounts | None = None
    image: RootImage | None = None


class Provider(ABC):
    """One way to create sandboxes."""

    name: str
    isolation_level: int
    unsafe: bool = False
    slot_lifetime_s: float = math.inf
    """How long a slot can wait for its owner; an older one is replaced."""

    @abstractmethod
    def capabilities(self) -> frozenset[Capability]:
        """Return what this provider can promise on this host. Cheap; may be called at any time."""

    @abstractmethod
    def missing(self) -> str | None:
        """Return None when the provider can be used here, else what is missing and how to get it."""

    async def warm(self) -> None:
        """Prepare for the first start, so that it is faster. Optional; raises nothing."""
        return

    @abstractmethod
    async def start(self, launch: Launch) -> Handle:
        """Start a sandbox whose supervisor accepts connections at `handle["socket"]` when this returns.

        Leaves nothing behind when it raises. Raises `PlatformError`, `ProviderUnavailable`, and `Unsupported` for masks
        that it cannot apply.
        """

    def slot_for(self, launch: Launch) -> Launch | None:
        """Return the launch of a slot that this sandbox could claim, or None if it has to start cold.

        A slot is a sandbox that has started for nobody yet. Its launch has what `claim` cannot add later, and nothing
        else: no id, no workspace, no variables. Sandboxes whose slots have equal launches can use the same slots.
        """
        return None

    async def start_slot(self, launch: Launch) -> Handle:
        """Start a slot, from a launch of `slot_for` that was given an id. Its network is closed and no code of an agent
        has run in it. It ends with this process if nobody claims it.

        Leaves nothing behind when it raises. Raises as `start` does.
        """
        raise Unsupported(f"provider '{self.name}' has no slots", hint="choose another provider")

    async def claim(self, slot: Handle, launch: Launch) -> Handle:
        """Turn a slot into the sandbox of `launch`, and return its handle, which keeps the id of the slot.

        The slot was made by this object for an equal `slot_for(launch)`, and nobody else claims it. If it raises, the
        slot is removed. Raises as `start` does.
        """
        raise Unsupported(f"provider '{self.name}' has no slots", hint="choose another provider")

    def link(self, handle: Handle) -> SupervisorLink:
        """Return how the supervisor of a sandbox is reached: at a Unix socket, unless the provider says otherwise.
        Raises `PlatformError`.
        """
        return LocalLink(str(handle["socket"]))

    @abstractmethod
    async def alive(self, handle: Handle) -> bool:
        """Return whether the sandbox of this handle still runs, also after a restart of the control plane."""

    @abstractmethod
    async def remove(self, handle: Handle) -> None:
        """End the sandbox, and return when no process, mount or cgroup of it is left.

        May be called twice, and for a sandbox that is already gone. The workspace is not touched.
        """

    async def running(self) -> list[str]:
        """Return the ids of all sandboxes that the provider knows, even if their start was cancelled."""
        return []

    async def clean(self) -> None:  # noqa: B027 - most have nothing to remove
        """Remove what a killed server left beside its sandboxes. Called at the start of a server, before the first
        sandbox and while no other process uses the same directories.
        """

    async def out_of_memory_kills(self, handle: Handle) -> int:
        """Return how many processes of this sandbox were killed for lack of memory; 0 when unknown."""
        return 0

    async def held_bytes(self, handle: Handle) -> int:
        """Return the disk space of deleted workspace files that are still open in the sandbox; 0 when unknown."""
        return 0

    async def resources(self, handles: Sequence[Handle]) -> Mapping[str, ResourceUse]:
        """Return what sandboxes use, by the ids of their handles, without those of which nothing is known."""
        return {}

    async def way_out(self, handle: Handle) -> int | None:
        """Return the egress socket: the listening socket for the sandbox's outbound connections; None without one.

        A sandbox has one when its network is an allow list. The caller closes the descriptor. May be called again at
        any time, also after a restart of the control plane: connections wait while nobody accepts them.
        """
        return None

    async def protect(self, handle: Handle, paths: Sequence[str]) -> None:
        """Make read-only paths of a folder read-only again, given relative to it, which were replaced on the host.

        Raises `PlatformError` if it cannot be done.
        """
        raise Unsupported(f"provider '{self.name}' cannot protect paths", hint="choose another provider")

    async def pause(self, handle: Handle) -> bool:
        """Stop every process of the sandbox but its supervisor; return whether all are stopped."""
        raise Unsupported(f"provider '{self.name}' cannot pause a sandbox", hint="choose another provider")

    async def unpause(self, handle: Handle) -> None:
        """Continue the processes that `pause` stopped."""
        raise Unsupported(f"provider '{self.name}' cannot pause a sandbox", hint="choose another provider")

    async def kill_paused(self, handle: Handle) -> None:
        """Kill every process of the sandbox that is stopped."""
        raise Unsupported(f"provider '{self.name}' cannot pause a sandbox", hint="choose another provider")

    async def close(self) -> None:
        """Release the provider's own resources. Running sandboxes are not touched."""
        return

    def status(self) -> ProviderStatus:
        """Return the status that `carrel doctor` shows."""
        missing = self.missing()
        return ProviderStatus(
            name=self.name,
            isolation_level=self.isolation_level,
            unsafe=self.unsafe,
            available=missing is None,
            reason=missing,
            capabilities=sorted(self.capabilities()),
        )

    def require_for(self, launch: Launch) -> None:
        """Raise `Unsupported` if a launch needs what this provider does not promise. carrel does not ask for that, but
        a start that ignored it would be a hole.
        """
        asked = {
            Capability.LIMIT_CPUS: launch.cpus,
            Capability.LIMIT_MEMORY: launch.memory_mb,
            Capability.LIMIT_PROCESSES: launch.processes,
            Capability.MASKS: launch.masks,
            Capability.FOLDERS: launch.folder,
            Capability.IMAGES: launch.image,
        }
        needed = [capability for capability, value in asked.items() if value is not None]
        self.require(NETWORK_CAPABILITY[launch.network], *needed)

    def require(self, *wanted: Capability) -> None:
        """Raise `Unsupported` if this provider cannot promise these capabilities."""
        lacking = sorted(set(wanted) - self.capabilities())
        if lacking:
            raise Unsupported(
                f"provider '{self.name}' on this host cannot enforce: {', '.join(lacking)}",
                field="provider",
                hint="ask for less, choose another provider, or run `carrel doctor` to see what this host lacks",
                capabilities=lacking,
            )
