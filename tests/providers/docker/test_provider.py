"""The Docker provider: what it refuses, where it cannot be used, and what a server after a restart finds."""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import replace

import pytest

from carrel.errors import CarrelError, PlatformError, Unsupported
from carrel.models import Network
from carrel.providers.base import FolderMounts, HostMount, RootImage
from carrel.providers.docker import DockerProvider
from carrel.providers.docker.engine import Engine
from carrel.testing import Harness, workspaces_in

NOTHING = {"Containers": [], "Volumes": []}


@pytest.fixture
async def harness(docker, bundles, tmp_path):
    for name in ("run", "ws", "images"):
        (tmp_path / name).mkdir()
    images = str(tmp_path / "images")
    harness = Harness(
        lambda: DockerProvider(str(tmp_path / "run"), str(bundles), socket_path=docker.socket, images=images),
        workspaces_in(str(tmp_path / "ws")),
        images,
    )
    yield harness
    await harness.close()


async def objects(path: str) -> dict[str, list[object]]:
    """The containers and volumes of a daemon."""
    engine = Engine(path)
    try:
        containers = await engine.get("/containers/json", all="true")
        return {"Containers": containers, "Volumes": (await engine.get("/volumes"))["Volumes"] or []}
    finally:
        await engine.close()


@pytest.mark.parametrize(
    "more",
    [
        {"folder": FolderMounts(HostMount("/a", "/a", (0, 0)), HostMount("/b", "/b", (0, 0)))},
        {"image": RootImage("/", (0, 0), writable=True)},
        {"image": RootImage("/", (0, 0), user="5:5")},
        {"network": Network.HOST},
        {"network": Network.BRIDGE},
    ],
    ids=["folder", "writable root", "user", "host", "bridge"],
)
async def test_what_is_not_promised_is_refused(harness, docker, more):
    with pytest.raises(Unsupported):
        await harness.provider.start(replace(harness.launch(), **more))
    assert await objects(docker.socket) == NOTHING


async def test_a_container_that_cannot_start_leaves_nothing_and_says_why(harness, docker, tmp_path, monkeypatch):
    made = await harness.provider._provide_bundle()
    monkeypatch.setattr(harness.provider, "_bundle", replace(made, path=str(tmp_path)))  # a bundle without a loader
    (tmp_path / "etc/carrel").mkdir(parents=True)
    for name in ("hosts", "hostname", "resolv.conf"):
        (tmp_path / "etc" / name).touch()
    with pytest.raises(PlatformError, match="could not be started"):
        await harness.provider.start(harness.launch())
    assert await objects(docker.socket) == NOTHING
    assert os.listdir(tmp_path / "run/docker") == []


async def test_a_cancelled_start_leaves_nothing(harness, docker, tmp_path):
    starting = asyncio.ensure_future(harness.provider.start(harness.launch(network=Network.ALLOWLIST)))
    while not (await objects(docker.socket))["Containers"]:
        assert not starting.done()
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await objects(docker.socket) == NOTHING
    assert os.listdir(tmp_path / "run/docker") == []


async def test_a_server_that_did_not_start_it_finds_and_removes_a_container(harness, docker, tmp_path):
    async with harness.sandbox() as box:
        (tmp_path / "run/docker/stray").mkdir()  # a server was killed before it had made the container
        other = harness.make_provider()
        try:
            assert await other.running() == [box.handle["id"]]
            await other.clean()
            assert not (tmp_path / "run/docker/stray").exists()
            assert ((await other.resources([box.handle]))[str(box.handle["id"])].memory_bytes or 0) > 1 << 20
            # As the recovery of a server does it, which has only the id.
            await other.remove({"provider": "docker", "id": box.handle["id"], "socket": ""})
            assert not await other.alive(box.handle)
        finally:
            await other.close()
    assert await objects(docker.socket) == NOTHING


def test_where_there_is_no_daemon_it_says_how_to_get_one(tmp_path):
    path = str(tmp_path / "none.sock")
    missing = DockerProvider(str(tmp_path), str(tmp_path), socket_path=path).missing()
    assert missing is not None
    assert path in missing
    assert "CARREL_DOCKER_SOCKET" in missing


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user is told before that")
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('HTTP/1.0 200 OK\r\n\r\n{"SecurityOptions": ["name=seccomp", "name=userns"]}', "maps users"),
        ('HTTP/1.0 200 OK\r\n\r\n{"SecurityOptions": []}', "does not filter"),
        ('HTTP/1.0 500 Oh\r\n\r\n{"message": "broken"}', "broken"),
        ("nonsense", "does not answer"),
    ],
)
def test_a_daemon_that_cannot_be_used_is_explained(tmp_path, answer, words):
    path = tmp_path / "daemon.sock"
    server = subprocess.Popen(
        ["/usr/bin/python3", "-c", _ANSWERING, str(path), answer], stdout=subprocess.PIPE, cwd=tmp_path
    )
    try:
        assert server.stdout is not None
        server.stdout.readline()
        missing = DockerProvider(str(tmp_path), str(tmp_path), socket_path=str(path)).missing()
        assert missing is not None
        assert words in missing
    finally:
        server.kill()
        server.communicate()


_ANSWERING = """
import socket, sys
listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1]); listener.listen(1); print(flush=True)
while True:
    connection, _ = listener.accept(); connection.recv(1000); connection.sendall(sys.argv[2].encode()); connection.close()
"""


async def test_without_the_daemon_a_start_fails_as_a_platform_failure(tmp_path, bundles):
    provider = DockerProvider(str(tmp_path), str(bundles), socket_path=str(tmp_path / "none.sock"))
    with pytest.raises(CarrelError) as caught:
        await provider.start(Harness(lambda: provider, workspaces_in(str(tmp_path))).launch(network=Network.NONE))
    assert caught.value.status >= 500
    await provider.close()
