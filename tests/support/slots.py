"""A provider with slots for tests of the pool.

Its slots are namespace sandboxes on an empty directory of their own, with a supervisor that answers. A claim ends the
one sandbox and starts another of the same id on the workspace, with everything that the launch asks for.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from carrel.config import Settings
from carrel.errors import PlatformError
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.providers.base import Handle, Launch
from carrel.providers.namespace import NamespaceProvider

ROOT = os.geteuid() == 0


class SlotProvider(NamespaceProvider):
    """Sandboxes with slots. `start_s` is how long a cold start and the start of a slot take besides."""

    def __init__(self, run_dir: str, workspaces: str, images: str = "", *, start_s: float = 0.0):
        super().__init__(run_dir, workspaces, images=images)
        self._directory = workspaces
        for left in Path(workspaces).glob("slot-*.empty"):  # of a server that was killed
            left.rmdir()
        self.start_s = start_s
        self.failing: str | None = None
        """Why no slot can be started now."""
        self.cold = 0
        self.claims: list[str] = []
        """The ids of the slots that were claimed."""
        self.slots: dict[str, Handle] = {}
        """The slots that this object has started and nobody has claimed."""

    async def start(self, launch: Launch) -> Handle:
        await asyncio.sleep(self.start_s)
        self.cold += 1
        return await super().start(launch)

    def slot_for(self, launch: Launch) -> Launch | None:
        """Only the workspace and the variables come late, and a network that is none must stay none."""
        if launch.folder is not None:
            return None
        return replace(launch, id="", workspace="", env={}, cpus=None, disk_mb=None)

    async def start_slot(self, launch: Launch) -> Handle:
        await asyncio.sleep(self.start_s)
        if self.failing is not None:
            raise PlatformError(self.failing)
        place = Path(self._directory, f"{launch.id}.empty")
        place.mkdir()
        try:
            if ROOT:
                os.chown(place, SANDBOX_UID, SANDBOX_UID)
            handle = await super().start(replace(launch, workspace=str(place)))
        finally:
            place.rmdir()  # the sandbox keeps the mount
        self.slots[launch.id] = handle
        return handle

    async def claim(self, slot: Handle, launch: Launch) -> Handle:
        self.claims.append(str(slot["id"]))
        del self.slots[str(slot["id"])]
        alive = await self.alive(slot)
        await super().remove(slot)
        if not alive:
            raise PlatformError("the slot has ended")
        return await super().start(replace(launch, id=str(slot["id"])))

    async def remove(self, handle: Handle) -> None:
        self.slots.pop(str(handle["id"]), None)
        await super().remove(handle)


def slot_provider(settings: Settings, *, start_s: float = 0.0) -> SlotProvider:
    """The provider of a server on a volume of plain directories."""
    data = Path(settings.data_dir)
    places = (str(data / each) for each in ("run", "storage/volumes", "images"))
    return SlotProvider(*places, start_s=start_s)
