"""What a provider is: it starts, finds, reaches and removes sandboxes. What happens inside one is not its business.

A provider promises capabilities by name. What is asked of it and not promised is refused before anything is made, never
ignored. A handle is a plain JSON value, so that a control plane that was restarted finds its sandboxes again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from carrel.errors import Unsupported
from carrel.isolation.masks import Masks
from carrel.models import Network, ProviderStatus

Handle = dict[str, str | int | float | bool | None]
"""Where a sandbox is: a flat JSON object. `provider`, `id` and `socket` are always there."""


class Capability(StrEnum):
    """What may be asked of a provider."""

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


NETWORK_CAPABILITY = {
    Network.NONE: Capability.NETWORK_NONE,
    Network.ALLOWLIST: Capability.NETWORK_ALLOWLIST,
    Network.INTERNET: Capability.NETWORK_ALLOWLIST,  # the same way out; only the proxy decides differently
    Network.BRIDGE: Capability.NETWORK_BRIDGE,
    Network.HOST: Capability.NETWORK_HOST,
}


@dataclass(frozen=True)
class Launch:
    """Everything a provider needs to start one sandbox. Limits and masks that are None are not enforced.

    With `trust` the tools inside are told to trust the certificates in `/run/secrets/carrel-ca.pem`, and only those.
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


class Provider(ABC):
    """One way of making sandboxes."""

    name: str
    isolation_level: int
    unsafe: bool = False

    @abstractmethod
    def capabilities(self) -> frozenset[Capability]:
        """What this provider can promise on this host. Cheap; may be called at any time."""

    @abstractmethod
    def missing(self) -> str | None:
        """None when the provider can be used here, else what is missing and how to get it."""

    async def warm(self) -> None:
        """Do ahead what the first start would otherwise wait for. Optional; raises nothing."""
        return

    @abstractmethod
    async def start(self, launch: Launch) -> Handle:
        """Start a sandbox whose supervisor accepts connections at `handle["socket"]` when this returns.

        Leaves nothing behind when it raises. Raises `PlatformError` and `ProviderUnavailable`, and for masks that it
        cannot put on `Unsupported`.
        """

    @abstractmethod
    async def alive(self, handle: Handle) -> bool:
        """Whether the sandbox of this handle still runs, also after a restart of the control plane."""

    @abstractmethod
    async def remove(self, handle: Handle) -> None:
        """End the sandbox and everything in it; returns when no process, mount or cgroup of it is left.

        May be called twice, and for a sandbox that is already gone. The workspace is not touched.
        """

    async def running(self) -> list[str]:
        """The ids of the sandboxes the provider knows of, also those nobody waited for; none when it cannot tell."""
        return []

    async def out_of_memory_kills(self, handle: Handle) -> int:
        """How many processes the kernel has killed in this sandbox for lack of memory; 0 when it cannot be known."""
        return 0

    async def held_bytes(self, handle: Handle) -> int:
        """Disk space of workspace files that were deleted but are still open in the sandbox; 0 when unknown."""
        return 0

    async def memory_bytes(self, handle: Handle) -> int | None:
        """Memory the sandbox uses now; None when it cannot be known."""
        return None

    async def way_out(self, handle: Handle) -> int | None:
        """A listening socket that the sandbox's connections to its one way out arrive at; None when it has none.

        A sandbox has one when its network is an allow list. The descriptor is the caller's to close. May be asked for
        again at any time, also after a restart of the control plane: connections wait while nobody accepts them.
        """
        return None

    async def close(self) -> None:
        """Release what the provider itself holds. Sandboxes that still run are not touched."""
        return

    def status(self) -> ProviderStatus:
        """This provider as `carrel doctor` shows it."""
        missing = self.missing()
        return ProviderStatus(
            name=self.name,
            isolation_level=self.isolation_level,
            unsafe=self.unsafe,
            available=missing is None,
            reason=missing,
            capabilities=sorted(self.capabilities()),
        )

    def require(self, *wanted: Capability) -> None:
        """Refuse what this provider cannot promise."""
        lacking = sorted(set(wanted) - self.capabilities())
        if lacking:
            raise Unsupported(
                f"provider '{self.name}' on this host cannot enforce: {', '.join(lacking)}",
                field="provider",
                hint="ask for less, choose another provider, or run `carrel doctor` to see what this host lacks",
                capabilities=lacking,
            )
