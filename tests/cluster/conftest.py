"""A real Kubernetes, which `make cluster-test` has started. Without it, these tests are not collected."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cluster.ground import Cluster, Ground
    from tests.cluster.installation import Installation

collect_ignore_glob = [] if "CARREL_CLUSTER" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The cluster, with the image of the tests' sandboxes and the one of the bundle."""
    from tests.cluster.ground import Cluster, add_images  # late: `make test` reads this file too

    found = Cluster()
    add_images(found, tmp_path_factory.mktemp("images"))
    return found


@pytest.fixture(scope="session")
def grounds(cluster: Cluster) -> Iterator[Callable[..., Ground]]:
    """Makes namespaces with a shared volume, which are removed at the end."""
    from tests.cluster.ground import Ground

    made: list[Ground] = []

    def make(**options: object) -> Ground:
        place = Path(tempfile.mkdtemp(prefix="k"))
        place.chmod(0o755)
        made.append(Ground(cluster, place, **options))
        return made[-1]

    yield make
    for each in made:
        each.remove()


@pytest.fixture(scope="session")
def ground(grounds: Callable[..., Ground]) -> Ground:
    """A namespace whose pods run on runc, as sandboxes of agent-sandbox."""
    return grounds()


@pytest.fixture(scope="session")
def installation(cluster: Cluster) -> Iterator[Installation]:
    """carrel as the chart installs it, with two servers."""
    from tests.cluster.installation import Installation, add_images

    add_images(cluster)
    made = Installation(cluster)
    try:
        made.install()
        yield made
    finally:
        print(made.said())  # pytest shows it where a test fails
        made.remove()
