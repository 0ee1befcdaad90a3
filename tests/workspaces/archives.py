"""A node for the tests of the archive: an archive with a cache of its own, on a remote that others may share."""

from __future__ import annotations

import os
from pathlib import Path

from carrel.workspaces.archive import Archive
from carrel.workspaces.remote import Remote
from carrel.workspaces.volumes import VolumeDriver


class Node:
    """One node: a driver, an archive, and what is temporary on it."""

    def __init__(self, url: str, cache: Path, driver: VolumeDriver):
        self.remote = Remote.open(url)
        self.cache = cache
        self.archive = Archive(self.remote, str(cache))
        self.driver = driver

    def restore(self, volume: str, snapshot_id: str, into: str) -> str:
        """Fetch a snapshot into a volume, made when there is none; its path."""
        if not self.driver.exists(into):
            self.driver.create(into, None)
        with self.driver.replacing(into) as directory:
            self.archive.fetch(volume, snapshot_id, directory)
        return self.driver.path(into)

    def leftovers(self) -> list[str]:
        """What should not be there between operations."""
        return (
            os.listdir(self.cache / "work") + list(self.remote.list("intents")) + list(self.remote.list("collecting"))
        )
