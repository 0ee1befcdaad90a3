"""The server is killed with sandboxes of every provider of this host running, and started again on what it left."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import dockerd, images, microvm
from tests.support.gvisor import find_runsc
from tests.support.kill_server import Server

from carrel.isolation import probe
from carrel.models import State
from carrel.providers import groups
from carrel.workspaces.layout import encode

IMAGE = "debian:small"
WAITS = "echo before; until test -e go; do sleep 0.05; done; echo after; exit 3"


def _here() -> tuple[list[tuple[str, str | None]], dict[str, str]]:
    """The providers of this host, each with the host's root and with an image; and the settings of a server for them."""
    places: list[tuple[str, str | None]] = [("namespace", None), ("namespace", IMAGE)]
    settings = {"CARREL_POOL_SIZE": "1", "CARREL_POOL_MAX": "4", "CARREL_LEASE_S": "60"}
    if dockerd.missing() is None:
        places += [("docker", None), ("docker", IMAGE)]
    if (runsc := find_runsc()) is not None:
        places += [("gvisor", None), ("gvisor", IMAGE)]
        settings["CARREL_GVISOR_RUNSC"] = runsc
    if microvm.find_kernel():
        own = microvm.options()
        places.append(("microvm", None))
        settings |= {
            "CARREL_MICROVM_ENABLED": "true",
            "CARREL_MICROVM_KERNEL": own.kernel,
            "CARREL_MICROVM_ALLOW_EMULATION": "true",
            "CARREL_MICROVM_MEMORY_MB": str(own.memory_mb),
        }
    return places, settings


PLACES, SETTINGS = _here()


def _handles(server: Server) -> dict[str, str]:
    """What sessions know of their sandboxes, by their contexts."""
    with sqlite3.connect(server.data / "carrel.db") as database:
        return dict(database.execute("SELECT context_id, handle FROM sessions WHERE handle IS NOT NULL").fetchall())


@pytest.mark.skipif(
    os.geteuid() != 0 or probe.host().missing is not None, reason="needs root and the namespace provider"
)
@pytest.mark.timeout(300)
async def test_a_killed_server_takes_over_sandboxes_of_every_provider(
    request: pytest.FixtureRequest, debian_root: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    settings = dict(SETTINGS)
    daemon = request.getfixturevalue("docker") if ("docker", None) in PLACES else None
    if daemon is not None:
        settings["CARREL_DOCKER_SOCKET"] = daemon.socket
    images.archive(debian_root, tmp_path / "debian.tar", IMAGE, user="1000")
    server = Server(volumes="directory", settings=settings)
    names = {f"{provider}-{'image' if image else 'host'}": (provider, image) for provider, image in PLACES}
    record_property("taken over", ", ".join(names))
    try:
        await server.start()
        commands = {}
        async with server.client() as client:
            await client.images.import_archive(tmp_path / "debian.tar")
            for name, (provider, image) in names.items():
                box = await client.sandbox(name, provider=provider, image=image)
                await box.files.write("kept", name)
                commands[name] = (await box.commands.start(WAITS, timeout=600)).id
        before = _handles(server)
        assert before.keys() == names.keys()
        server.kill()
        await server.killed()

        await server.start()
        async with server.client() as client:
            for name, command in commands.items():
                assert (await client.find(name)).state is State.RUNNING, name
                box = await client.sandbox(name)
                assert (await box.commands.get(command).info()).running, name
                assert await box.files.read_text("kept") == name
                await box.files.write("go", "")
                result = await box.commands.get(command).wait()
                assert (result.stdout, result.exit_code) == ("before\nafter\n", 3), name
            assert _handles(server) == before, "each session has the sandbox that it had"
            for name in names:
                await (await client.sandbox(name)).terminate()
        await server.stop()

        assert [name for name, handle in before.items() if list(groups.find(json.loads(handle)["id"]))] == []
        assert daemon is None or daemon.objects() == []
        await server.silent({encode(name, ephemeral=False) for name in names})
    except BaseException as error:
        error.add_note(f"the server said\n{server.tail()}")
        raise
    finally:
        server.close()
