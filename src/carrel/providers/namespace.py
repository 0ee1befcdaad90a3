"""The namespace provider: Linux namespaces, a read-only root, seccomp, Landlock and cgroups, as root or not."""

from __future__ import annotations

from functools import cached_property

from carrel.isolation import probe
from carrel.providers.base import Capability, Handle
from carrel.providers.zygote_provider import ZygoteProvider


class NamespaceProvider(ZygoteProvider):
    """Sandboxes made of kernel namespaces, a fork away."""

    name = "namespace"
    isolation_level = 1
    plain = False

    @cached_property
    def _host(self) -> probe.Host:
        return probe.host()

    def missing(self) -> str | None:
        """See `Provider.missing`."""
        return self._host.missing

    def capabilities(self) -> frozenset[Capability]:
        """See `Provider.capabilities`: what is promised depends on which cgroups this user may make."""
        promised = {
            Capability.FILE_ISOLATION,
            Capability.PROCESS_ISOLATION,
            Capability.LIMIT_MEMORY,
            Capability.LIMIT_PROCESSES,
            Capability.LIMIT_DISK,
            Capability.NETWORK_NONE,
            Capability.MASKS,
            Capability.TERMINAL,
            Capability.SURVIVES_RESTART,
        }
        if "cpu" in self._host.controllers:
            promised.add(Capability.LIMIT_CPUS)
        return frozenset(promised)

    async def out_of_memory_kills(self, handle: Handle) -> int:
        """See `Provider.out_of_memory_kills`."""
        return int((await self._zygote.known("usage", id=handle["id"])).get("oom_kills", 0))

    async def held_bytes(self, handle: Handle) -> int:
        """See `Provider.held_bytes`."""
        return int((await self._zygote.known("held", id=handle["id"])).get("bytes", 0))

    async def memory_bytes(self, handle: Handle) -> int | None:
        """See `Provider.memory_bytes`."""
        used = (await self._zygote.known("usage", id=handle["id"])).get("memory_bytes")
        return int(used) if used is not None else None
