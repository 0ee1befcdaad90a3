"""One server, two sandboxes and everything outside, for all attempts to get past the egress.

An attempt is a function that runs inside a sandbox. Each family has a control: the same technique toward a target that
is allowed works, so that a wall can be told from an attempt that never was one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from tests.support.evader import Evader
from tests.support.far import ALLOWED, FORBIDDEN, Far

from carrel.isolation.sandbox import PROXY_PORT


@pytest.fixture(scope="session")
def far() -> Iterator[Far]:
    """Servers that may be reached, servers that may not, and their names."""
    far = Far()
    yield far
    far.close()


@pytest.fixture(scope="session")
def governed(far: Far, serve: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    """A carrel server that asks the outside's own name server, and trusts its certificate."""
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as roots:
        roots.write(far.certificate)
        roots.flush()
        options = {"egress.nameservers": far.nameserver, "egress.roots_file": roots.name, "egress.ask_wait_s": "0"}
        options["egress.allow_internet"] = "true"
        with serve(user=False, options=options) as server:
            yield server


@pytest.fixture(scope="session")
def evader(far: Far, governed: Any) -> Iterator[Evader]:
    """May reach `allowed.test` and names that lead elsewhere, on the ports that every server has."""
    registries = [
        {"name": name, "url": f"{index.web.url}/simple/"}
        for name, index in (("main", far.index), ("second", far.second_index))
    ]
    evader = Evader(
        governed.client,
        far,
        "evader",
        {
            "allowed_domains": ["allowed.test", "inspected.test", "opaque.test", "*.names.test", ALLOWED],
            "allowed_ports": [far.http, far.tls, far.retry, PROXY_PORT],
            "opaque_domains": ["opaque.test"],
            "inspected_domains": ["inspected.test"],
        },
        addresses=[ALLOWED],
        package_managers={"pip": {"registries": registries, "blocked_packages": ["py-auto-gui"]}},
    )
    yield evader
    evader.close()


@pytest.fixture(scope="session")
def roamer(far: Far, governed: Any) -> Iterator[Evader]:
    """May reach all of the internet, and of the servers here, which have loopback addresses, the allowed one."""
    roamer = Evader(governed.client, far, "roamer", {}, addresses=[ALLOWED], network="internet")
    yield roamer
    roamer.close()


@pytest.fixture(scope="module", params=["evader", "roamer"])
def whoever(request: pytest.FixtureRequest) -> Evader:
    """Each of those who may reach something."""
    found: Evader = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def neighbour(far: Far, governed: Any) -> Iterator[Evader]:
    """May reach what the evader may not."""
    neighbour = Evader(
        governed.client,
        far,
        "neighbour",
        {"allowed_domains": ["allowed.test", "forbidden.test", FORBIDDEN], "allowed_ports": [far.http, far.tls]},
        addresses=[ALLOWED, FORBIDDEN],
    )
    yield neighbour
    neighbour.close()
