"""The host's part of a control plane: its directories, volumes and providers.

It is opened first and imports little, so that the zygote, which is a process of its own, starts while the rest of the
control plane is imported.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from carrel.config import ImageSettings, MicrovmSettings, Settings
from carrel.errors import CarrelError
from carrel.images.layer_reading import LayerLimits
from carrel.images.reference import ImageReference
from carrel.images.storage import ImageStorage
from carrel.isolation.inside import ENVIRONMENTS
from carrel.isolation.tools import shared_tools
from carrel.providers import open_providers
from carrel.providers.base import Provider
from carrel.providers.bundle import bundles_of
from carrel.providers.gvisor.options import GvisorOptions
from carrel.providers.kubernetes.options import KubernetesOptions
from carrel.providers.microvm.options import MicrovmOptions
from carrel.workspaces.environments import EnvironmentStorage
from carrel.workspaces.layout import Layout
from carrel.workspaces.volumes import VolumeDriver, open_driver

if TYPE_CHECKING:
    from carrel.spiffe.identities import Identities

log = logging.getLogger("carrel.control")


class HostParts:
    """Opened directories, volumes and providers. `open` them, `close` them when every sandbox has ended."""

    def __init__(
        self,
        layout: Layout,
        driver: VolumeDriver,
        storage: EnvironmentStorage,
        images: ImageStorage,
        providers: Mapping[str, Provider],
        registry: str,
        identities: Identities | None,
    ):
        self.layout = layout
        self.driver = driver
        self.storage = storage
        self.images = images
        self.providers = dict(providers)
        self._registry = registry
        self.identities = identities
        self._warming = asyncio.ensure_future(
            asyncio.gather(*(each.warm() for each in providers.values() if not each.unsafe))
        )

    @classmethod
    async def open(
        cls,
        settings: Settings,
        providers: Mapping[str, Provider] | None = None,
        *,
        first: bool = True,
        last: bool = True,
    ) -> HostParts:
        """Open the data directory, and start to prepare the providers. None: those of this host. `first`: no other
        process uses the directory yet; `last`: none does after `close`.
        """
        layout = Layout(settings.data_dir)
        await asyncio.to_thread(layout.prepare)
        storage = EnvironmentStorage(os.path.join(layout.data_dir, "envs"))
        await asyncio.to_thread(storage.prepare)
        directory = settings.images.directory or os.path.join(layout.data_dir, "images")
        images = await asyncio.to_thread(_open_images, settings.images, directory)
        sizes = {"pool_bytes": settings.volumes_mb << 20, "pool_max_bytes": settings.volumes_max_mb << 20}
        driver = await asyncio.to_thread(
            lambda: open_driver(layout.storage, settings.volumes, first=first, last=last, **sizes)
        )
        identities: Identities | None = None
        try:
            identities = await _open_identities(settings, layout)
            if providers is None:
                shared = {ENVIRONMENTS: storage.path, **await asyncio.to_thread(shared_tools)}
                providers = open_providers(
                    layout.run,
                    driver.directory,
                    allow_process=settings.sandbox.allow_process,
                    shared=shared,
                    folder_roots=settings.sandbox.folder_root_paths,
                    images=images.directory,
                    docker=settings.docker.socket,
                    bundles=bundles_of(layout.data_dir),
                    gvisor=GvisorOptions(settings.gvisor.runsc, settings.gvisor.platform),
                    third_party=settings.sandbox.third_party_names,
                    microvm=microvm_options(settings.microvm),
                    identities=None if identities is None else identities.sandboxes,
                    kubernetes=kubernetes_options(settings),
                )
            return cls(layout, driver, storage, images, providers, settings.images.registry, identities)
        except BaseException:
            if identities is not None:
                await identities.close()
            await asyncio.to_thread(driver.close)
            raise

    def still_means(self, image: str, digest: str) -> bool:
        """Whether the name of an image still means the image with that digest. Blocking."""
        found = self.images.find(ImageReference.parse(image, self._registry))
        return found is not None and found.digest == digest

    async def ready(self) -> None:
        """Wait until the providers are prepared."""
        await self._warming

    async def close(self) -> None:
        """Release everything. A provider that fails is logged."""
        await asyncio.gather(self._warming, return_exceptions=True)
        for provider in self.providers.values():
            try:
                await provider.close()
            except Exception:
                log.exception("provider %s could not be closed", provider.name)
        if self.identities is not None:
            await self.identities.close()
        self.storage.close()
        try:
            await asyncio.to_thread(self.driver.close)
        except CarrelError:
            log.exception("the volumes could not be closed")


async def _open_identities(settings: Settings, layout: Layout) -> Identities | None:
    """Get this server's identity; None where servers have none."""
    given = settings.spiffe
    if given.source == "none":
        return None
    from carrel.secrets import Vault
    from carrel.spiffe.identities import Identities

    vault = await asyncio.to_thread(Vault.open, layout.data_dir, settings.secret_key)
    return await Identities.open(
        given.source,
        seed=vault.derived("certificate authority"),
        node=settings.node or layout.node(),
        trust_domain=given.trust_domain,
        lifetime_s=given.lifetime_s,
        agent_socket=given.agent_socket,
    )


def _open_images(settings: ImageSettings, directory: str) -> ImageStorage:
    limits = LayerLimits(settings.layer_max_mb << 20, settings.layer_max_entries, settings.layer_max_ratio)
    storage = ImageStorage(directory, limits)
    storage.prepare()
    return storage


def microvm_options(settings: MicrovmSettings) -> MicrovmOptions | None:
    """Return how virtual machines are made, or None if they are switched off."""
    return MicrovmOptions(**settings.model_dump(exclude={"enabled"})) if settings.enabled else None


def kubernetes_options(settings: Settings) -> KubernetesOptions | None:
    """Return how a cluster is used, or None if it is not."""
    return cluster_options(settings) if settings.kubernetes.enabled else None


def cluster_options(settings: Settings) -> KubernetesOptions:
    """Return how a cluster would be used."""
    given = settings.kubernetes
    fields = given.model_dump(exclude={"enabled", "kubeconfig", "volume_directory"})
    return KubernetesOptions(
        **fields,
        kubeconfig=given.kubeconfig or "",
        volume_directory=given.volume_directory or settings.data_dir,
        identified=settings.spiffe.source != "none",
    )
