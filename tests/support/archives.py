"""A node for the tests of the archive: an archive with a cache of its own, on a remote that others may share."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from tests.support.trees_for_tests import mutate

from carrel.workspaces.archive import Archive
from carrel.workspaces.remote import Remote
from carrel.workspaces.volumes import VolumeDriver

MB = 1 << 20


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


Nodes = Callable[..., Node]
"""Makes a node with a driver of a kind on a remote."""


def furnish(node: Node, volume: str = "v", seed: int = 1) -> str:
    """A volume with a bit of everything in it."""
    node.driver.create(volume, None)
    path = node.driver.path(volume)
    mutate(path, random.Random(seed), 60)
    Path(path, "big").write_bytes(random.Random(seed).randbytes(3 * MB))
    with open(os.path.join(path, "sparse"), "wb") as file:
        file.seek(5 * MB)
        file.write(b"end")
        file.truncate(9 * MB)
    os.link(os.path.join(path, "big"), os.path.join(path, "linked"))
    return path


def files_of(node: Node, prefix: str) -> list[Path]:
    """The files beneath a directory remote."""
    return sorted(path for path in Path(node.remote.description, prefix).rglob("*") if path.is_file())
