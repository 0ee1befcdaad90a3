"""A real S3 server, remotes of both kinds, and drivers of both kinds, each on storage of its own."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import MemoryStore
from tests.support.archives import Node, Nodes
from tests.support.s3 import S3Server

from carrel.workspaces.volumes import BtrfsDriver, DirectoryDriver, VolumeDriver

Drivers = Callable[[str], VolumeDriver]


@pytest.fixture(scope="session")
def s3_client() -> None:
    """Start what the S3 client keeps for the rest of a process."""
    obstore.put(MemoryStore(), "x", b"")


@pytest.fixture(params=["directory", "s3"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty place of each kind."""
    if request.param == "directory":
        return str(tmp_path / "remote")
    server: S3Server = request.getfixturevalue("s3")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.url(uuid.uuid4().hex)


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[Drivers]:
    """Makes an open driver of a kind."""
    made: list[VolumeDriver] = []

    def one(kind: str) -> VolumeDriver:
        place = str(tmp_path / f"driver-{kind}{len(made)}")
        if kind == "directory":
            driver: VolumeDriver = DirectoryDriver(place)
        else:
            driver = BtrfsDriver(place, pool_bytes=256 << 20, pool_max_bytes=1 << 30)
            if (reason := driver.missing()) is not None:
                pytest.skip(reason)
        driver.open()
        made.append(driver)
        return driver

    yield one
    for driver in made:
        driver.close()


@pytest.fixture
def nodes(tmp_path: Path, drivers: Drivers) -> Nodes:
    """Makes a node with a driver of a kind on a remote."""
    numbers = itertools.count()

    def one(url: str | Path, kind: str = "directory") -> Node:
        return Node(str(url), tmp_path / f"cache{next(numbers)}", drivers(kind))

    return one


@pytest.fixture
def node(nodes: Nodes, tmp_path: Path) -> Iterator[Node]:
    """A node with the directory driver on a directory."""
    node = nodes(tmp_path / "remote")
    yield node
    assert node.leftovers() == []
