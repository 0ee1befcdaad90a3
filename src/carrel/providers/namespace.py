"""The namespace provider: Linux namespaces, a read-only root, seccomp, Landlock and cgroups, as root or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from carrel.errors import PlatformError
from carrel.isolation import probe
from carrel.isolation.inside import ENVIRONMENTS
from carrel.models import Network
from carrel.primitives.channel import close_all
from carrel.providers.base import ISOLATING, Capability, Handle, Launch, ResourceUse
from carrel.providers.bridge import RESOLVER, Bridges
from carrel.providers.zygote_provider import ZygoteProvider
from carrel.providers.zygotes import ZygoteClient

MAX_RESOLVER = 16 * 1024
PATHS_IN_A_REQUEST = 40
"""A message to the zygote holds 256 KiB, a path has at most 4 KiB."""
SANDBOXES_IN_A_REQUEST = 20
"""Their resources are read while other requests wait: about 1 ms."""


class NamespaceProvider(ZygoteProvider):
    """Sandboxes made of kernel namespaces, which need only a fork.

    Their networks: `none` is a namespace with loopback; `allowlist` is that and one listening socket on it, see
    `way_out`; `bridge` is a namespace behind user-mode NAT, see `carrel.providers.bridge`; `host` is the host's own,
    with its loopback and everything that listens there. Landlock blocks abstract sockets of the host's network from
    version 6 on (Linux 6.12); on older kernels a sandbox on the host's network can connect to them. No sandbox has a
    capability over any network.
    """

    name = "namespace"
    isolation_level = 1
    plain = False

    def __init__(
        self,
        run_dir: str,
        workspaces: str,
        shared: Mapping[str, str] = MappingProxyType({}),
        zygote: ZygoteClient | None = None,
        folder_roots: Sequence[str] = (),
        images: str = "",
    ):
        super().__init__(run_dir, workspaces, shared, zygote, folder_roots, images)
        self._has_folders = bool(folder_roots)
        self._shares_environments = ENVIRONMENTS in shared
        self._bridges = Bridges()

    @cached_property
    def _host(self) -> probe.HostFindings:
        return probe.host()

    def missing(self) -> str | None:
        return self._host.missing

    def capabilities(self) -> frozenset[Capability]:
        """See `Provider.capabilities`: they depend on the cgroups that this user may create."""
        promised = {*ISOLATING, Capability.LIMIT_MEMORY, Capability.LIMIT_PROCESSES, Capability.NETWORK_HOST}
        if "cpu" in self._host.controllers:
            promised.add(Capability.LIMIT_CPUS)
        zygote = self._zygote.description  # a zygote may be older than this server, and share nothing
        if self._shares_environments and (not zygote or ENVIRONMENTS in zygote.get("shared", ())):
            promised.add(Capability.ENVIRONMENTS)
        if self._has_folders and (not zygote or zygote.get("folders")):
            promised.add(Capability.FOLDERS)
        if self._images and self._host.overlays and (not zygote or zygote.get("images")):
            promised |= {Capability.IMAGES, Capability.IMAGE_BUILDS}
        if self._host.bridges:
            promised.add(Capability.NETWORK_BRIDGE)
        return frozenset(promised)

    def _resolver(self, network: Network) -> str:
        if network is Network.BRIDGE:
            return RESOLVER
        return _resolver_of_the_host() if network is Network.HOST else ""

    async def _connect_network(self, launch: Launch, answer: dict[str, Any]) -> Handle:
        if launch.network is not Network.BRIDGE:
            return {}
        try:
            return await self._bridges.build(*answer["fds"])
        except PlatformError:
            await self._zygote.known("remove", id=launch.id)
            raise
        finally:
            close_all(answer.get("fds", ()))

    async def remove(self, handle: Handle) -> None:
        await super().remove(handle)
        await self._bridges.gone(handle)

    async def close(self) -> None:
        self._bridges.close()
        await super().close()

    async def way_out(self, handle: Handle) -> int | None:
        return await self._zygote.descriptor("way_out", id=handle["id"])

    async def out_of_memory_kills(self, handle: Handle) -> int:
        return int((await self._zygote.known("usage", id=handle["id"])).get("oom_kills", 0))

    async def held_bytes(self, handle: Handle) -> int:
        return int((await self._zygote.known("held", id=handle["id"])).get("bytes", 0))

    async def protect(self, handle: Handle, paths: Sequence[str]) -> None:
        for start in range(0, len(paths), PATHS_IN_A_REQUEST):
            some = list(paths[start : start + PATHS_IN_A_REQUEST])
            answer = await self._zygote.known("protect", id=handle["id"], paths=some)
            if not answer.get("known"):
                raise PlatformError("protected paths that were replaced cannot be made read-only again")

    async def resources(self, handles: Sequence[Handle]) -> Mapping[str, ResourceUse]:
        found: dict[str, dict[str, int]] = {}
        for start in range(0, len(handles), SANDBOXES_IN_A_REQUEST):
            ids = [str(handle["id"]) for handle in handles[start : start + SANDBOXES_IN_A_REQUEST]]
            found |= (await self._zygote.known("usages", ids=ids)).get("usages", {})
        return {id: ResourceUse.counted(used) for id, used in found.items() if used}


def _resolver_of_the_host() -> str:
    try:
        with open("/etc/resolv.conf", encoding="utf-8", errors="replace") as file:
            return file.read(MAX_RESOLVER)
    except OSError:
        return ""
