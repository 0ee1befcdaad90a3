"""Every test is watched for what it leaves behind, and may have real sandboxes."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tests.support import dockerd
from tests.support.dockerd import DockerDaemon
from tests.support.fork_server import CARREL, EGRESS, ZYGOTE, Subprocess, forking
from tests.support.images import debian
from tests.support.postgres import Postgres
from tests.support.registry import RegistryServer
from tests.support.s3 import S3Server
from tests.support.sandboxes import KINDS, Box, House, Supervisor, parent
from tests.support.servers import LITTLE, MUCH, ROOT, Server, science
from tests.support.statements import compile_statements_once
from tests.support.trust import read_certificates_once

# Hooks: the watch over what is left behind, workers, and the summary.
from tests.support.workers import pytest_configure, pytest_terminal_summary  # noqa: F401

# A machine that stands still for a moment is no failure: no example has a deadline.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
# The whole suite says the same every time it is run; whoever runs a part of it looks for more.
settings.register_profile("same", derandomize=True, database=None)

read_certificates_once()
compile_statements_once()
gc.disable()  # until everything is collected, which makes a fifth less work


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """On a machine that can have everything (root, in CI), what is skipped was not shown: that is a failure."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and os.geteuid() == 0:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first: a worker that is done takes tests from the end of another's list.

    Those with real packages before all others: they stay on one worker, and the packages are installed once. Attacks in
    Docker and in gVisor stay together, because a server for them takes five seconds.
    """

    def turn(item: pytest.Item) -> int:
        if "scientific" in getattr(item, "fixturenames", ()):
            return 0
        if {"end_to_end", "docs"} & set(item.path.parts[-3:]):
            return 1
        given = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        return next((turn for turn, setting in ((2, "root in Docker"), (3, "gvisor")) if setting in given), 4)

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """Every worker has imported every test, 600,000 objects that stay: the collector need not look at them again
    each time that it is called, which took a third of a second.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


async def _open(house: House) -> dict[str, Any]:
    handle = await house.provider.start(house.launch())
    await house.provider.close()
    return {"handle": handle, "zygote": parent(int(handle["pid"] or 0))}


async def _close(house: House, kept: dict[str, Any]) -> None:
    provider = house.another_provider()
    await provider.remove(kept["handle"])
    await provider.close()


@pytest.fixture(scope="session")
def docker() -> Iterator[DockerDaemon]:
    """One Docker daemon for the whole run, on a socket of its own."""
    if (missing := dockerd.missing()) is not None:
        pytest.skip(missing)
    daemon = DockerDaemon()
    yield daemon
    daemon.close()


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of bundles: the supervisor's bundle is made in it once."""
    return tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="session")
def houses() -> Iterator[dict[str, House]]:
    """A zygote for each kind of provider that all tests share: one sandbox keeps it from ending."""
    found, kept = {}, {}
    for kind in KINDS:
        found[kind] = House(kind, Path(tempfile.mkdtemp(prefix="h")))
        found[kind].directory.chmod(0o755)
        kept[kind] = asyncio.run(_open(found[kind]))
    yield found
    for kind, house in found.items():
        asyncio.run(_close(house, kept[kind]))
        deadline = time.monotonic() + 10
        while os.waitpid(kept[kind]["zygote"], os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        shutil.rmtree(house.directory)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers-of-server",
        type=int,
        default=1,
        help="how many workers the servers of the tests of the API and of the client have",
    )
    parser.addoption("--on-image", action="store_true", help="make every check and attack in sandboxes from an image")
    parser.addoption("--on-example", action="store_true", help="make every check on the provider in examples/")
    parser.addoption("--on-gvisor", action="store_true", help="make every check and attack in gVisor sandboxes")
    parser.addoption("--on-microvm", action="store_true", help="make every check and attack in virtual machines")
    parser.addoption("--on-docker", action="store_true", help="make every attack in containers of Docker")
    for name, runtime in (("kubernetes", "runc"), ("kubernetes-gvisor", "gVisor")):
        words = f"make every attack in pods on {runtime}, below `scripts/cluster run`"
        parser.addoption(f"--on-{name}", action="store_true", help=words)


@pytest.fixture(scope="session")
def debian_root() -> Iterator[Path]:
    """The root of an image, in a directory of images: a small Debian that every user can read."""
    directory = Path(tempfile.mkdtemp(prefix="i"))
    directory.chmod(0o755)
    debian(directory / "debian")
    yield directory / "debian"
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def planes_fork() -> Iterator[None]:
    """What a control plane starts is forked where a test asks for `forked`."""
    with forking(ZYGOTE, EGRESS):
        yield


@pytest.fixture
def forked(planes_fork: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control planes of this process fork their zygotes and egress processes; that they start is tested elsewhere."""
    monkeypatch.setattr("carrel.primitives.channel.subprocess", Subprocess())


@pytest.fixture(scope="session")
def carrel_forks() -> Iterator[None]:
    """Servers and commands that are started by `fork_server.start` are forked."""
    with forking(CARREL):
        yield


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """One S3 server for the whole run; a test that stops it starts it again."""
    server = S3Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def registry() -> Iterator[RegistryServer]:
    """One image registry for the whole run, over plain HTTP and without a password."""
    server = RegistryServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def private_registry() -> Iterator[RegistryServer]:
    """One image registry for the whole run with a password and a certificate of its own."""
    server = RegistryServer(password=True, tls=True)
    yield server
    server.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL for the whole run; each test has a schema of its own."""
    server = Postgres()
    yield server
    server.close()


@pytest.fixture(scope="session")
def science_as_root() -> Iterator[Server]:
    """A server with a template of real packages, built once for the whole run."""
    if not ROOT:
        pytest.skip("the server as root: the tests do not run as root")
    with science(MUCH, user=False) as server:
        yield server


@pytest.fixture(scope="session")
def science_as_user() -> Iterator[Server]:
    """The same as an ordinary user. Beside the server of root it only shows what code must not reach: one small package
    is enough for that.
    """
    with science(LITTLE if ROOT else MUCH, user=True) as server:
        yield server


@pytest.fixture(params=["root", "user"])
def scientific(request: pytest.FixtureRequest) -> Server:
    """A server with a template of real packages, as root and as an ordinary user."""
    server: Server = request.getfixturevalue(f"science_as_{request.param}")
    return server


@pytest.fixture(params=KINDS)
async def house(request: pytest.FixtureRequest, houses: dict[str, House]) -> AsyncIterator[House]:
    """A provider of each kind, on the shared zygote."""
    house = House(request.param, houses[request.param].directory)
    yield house
    await house.provider.close()


@pytest.fixture
async def box(house: House) -> AsyncIterator[Box]:
    """A sandbox of each kind of provider."""
    limits = {"processes": 128, "memory_mb": 512} if house.kind == "namespace" else {}
    async with house.box(**limits) as box:
        yield box


@pytest.fixture
def supervisor(box: Box) -> Supervisor:
    """The supervisor of a sandbox of each kind."""
    return box.supervisor
