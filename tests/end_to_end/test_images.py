"""`carrel run --image` from a real registry, on a machine without a server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fork_server import run as run_command
from tests.support.registry import RegistryServer
from tests.support.stored_images import layer, small, store

from carrel.images.layer_reading import LayerLimits
from carrel.images.pulling import push_image
from carrel.images.reference import ImageReference
from carrel.images.registry import RegistryAccess, RegistryClient
from carrel.images.storage import ImageStorage


@pytest.fixture(scope="module", params=["plain", "password and TLS"])
def registry(request: pytest.FixtureRequest) -> Iterator[RegistryServer]:
    secured = request.param != "plain"
    server = RegistryServer(password=secured, tls=secured)
    yield server
    server.close()


def settings(registry: RegistryServer) -> dict[str, str]:
    if not registry.certificate.exists():
        return {"CARREL_IMAGES_PLAIN_HTTP": registry.host}
    given = {"CA_FILE": registry.certificate, "DOCKER_CONFIG": registry.docker_config}
    return {f"CARREL_IMAGES_{name}": str(path) for name, path in given.items()}


async def publish(registry: RegistryServer, place: Path) -> None:
    storage = ImageStorage(str(place), LayerLimits(1 << 30, 100_000, 200))
    storage.prepare()
    image = await store(storage, f"{registry.host}/small:1", layer(small), environment={"PATH": "/usr/bin:/bin"})
    secured = registry.certificate.exists()
    access = RegistryAccess(
        plain_http=frozenset() if secured else frozenset({registry.host}),
        ca_file=str(registry.certificate) if secured else None,
        docker_config=str(registry.docker_config),
    )
    client = RegistryClient(access)
    await push_image(client, storage, image, ImageReference.parse(f"{registry.host}/small:1"), lambda _each: None)
    await client.close()


def test_run_from_a_registry_without_a_server(registry: RegistryServer, tmp_path: Path) -> None:
    asyncio.run(publish(registry, tmp_path / "published"))
    env = {name: value for name, value in os.environ.items() if not name.startswith("CARREL_")}
    env |= {"CARREL_DATA_DIR": str(tmp_path / "data"), **settings(registry)}

    def run(*words: str, **more: str) -> tuple[int, str, str]:
        return run_command([sys.executable, "-m", "carrel", "run", *words], env=env | more, timeout=120)

    name = f"{registry.host}/small:1"
    code, said, errors = run("--image", name, "--", "cat", "/etc/os-release")
    assert (code, said) == (0, "ID=copied\n"), errors
    if registry.certificate.exists():
        return
    _, said, _ = run("--image", name, "--", "cat", "/etc/os-release", CARREL_IMAGES_REGISTRIES="elsewhere.example")
    assert said == "ID=copied\n", "the image is kept, and needs no registry any more"
    code, _, errors = run("--image", f"{registry.host}/small:2", "--", "true")
    assert code != 0 and "small:2" in errors and "hint" in errors
    _, _, errors = run(
        "--image", f"{registry.host}/small:2", "--", "true", CARREL_IMAGES_REGISTRIES="elsewhere.example"
    )
    assert "CARREL_IMAGES_REGISTRIES" in errors
