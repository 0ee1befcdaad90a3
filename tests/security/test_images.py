"""Images that try to break out: their files are in the hands of whoever made them, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import images
from tests.support.servers import ROOT

from carrel.primitives.trees import remove_tree

RUN = """
import asyncio, json, os, sys
import httpx
from carrel.errors import CarrelError
from carrel.models import Network
from carrel.providers import Launch, open_providers
from carrel.providers.base import RootImage

async def commands(handle, wanted):
    transport = httpx.AsyncHTTPTransport(uds=handle["socket"])
    async with httpx.AsyncClient(transport=transport, base_url="http://sandbox", timeout=30) as http:
        for command in wanted:
            answer = await http.post("/commands?wait=1", json={"command": command, "timeout": 20})
            yield answer.json()

async def main():
    place, wanted = sys.argv[1], json.loads(sys.stdin.readline())
    provider = open_providers(place + "/run", place + "/ws", allow_process=False, images=place + "/images")["namespace"]
    for name, image in wanted.items():
        root = place + "/images/" + image["root"]
        found, told = os.stat(root), []
        root_image = RootImage(root, (found.st_dev, found.st_ino), user=image.get("user", ""))
        launch = Launch(name, place + "/ws/w", Network.NONE, image=root_image, trust=True)
        try:
            handle = await provider.start(launch)
            try:
                told = [each async for each in commands(handle, image["commands"])]
            finally:
                await provider.remove(handle)
        except CarrelError as error:
            told = [error.detail]
        print(json.dumps(told), flush=True)
    await provider.close()

asyncio.run(main())
"""
PLACES = ("dev", "envs", "etc", "home", "proc", "run", "sys", "tmp", "var", "workspace")


@pytest.fixture
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="i"))
    directory.chmod(0o755)
    for name in ("run", "ws/w", "images"):
        (directory / name).mkdir(parents=True)
    yield directory
    remove_tree(str(directory))


def run(spawn: Any, place: Path, **wanted: dict[str, object]) -> Iterator[list[Any]]:
    """The answers of the commands in each image, one image after the other; or its error."""
    if ROOT:
        os.chown(place / "ws/w", 1000, 1000)
    with spawn(RUN, place) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(wanted) + "\n")
        process.stdin.close()
        lines = process.stdout.read().splitlines()
        assert process.wait(60) == 0
    return (json.loads(line) for line in lines)


def test_hostile_images(spawn: Any, place: Path) -> None:
    """Links out, programs with a set-user-ID bit, devices, and files that never end, where carrel reads or mounts."""
    (place / "secret").write_text("canary")
    roots = place / "images"
    images.debian(roots / "links", python=False, programs=("cat", "id", "ls", "readlink", "sh", "stat", "touch"))
    for name in PLACES:
        found = roots / "links" / name
        if found.is_dir() and not found.is_symlink():
            remove_tree(str(found))
        found.symlink_to({"etc": "/proc/1/root/etc", "run": "../../../..", "tmp": str(place)}.get(name, "/"))
    (roots / "links/out").symlink_to(place)
    (roots / "links/usr/bin/id").chmod(0o4755)
    if ROOT:
        os.mknod(roots / "links/disk", stat.S_IFBLK | 0o666, os.makedev(254, 0))
        (roots / "links/disk").chmod(0o666)
    for name in ("pipe", "loop", "long"):
        (roots / name / "etc").mkdir(parents=True)
    os.mkfifo(roots / "pipe/etc/passwd")
    (roots / "loop/etc/passwd").symlink_to("passwd")
    (roots / "long/etc/passwd").write_text("x:" * 4_000_000 + f"\na:x:{'9' * 5000}:0:\n")
    look = [
        *(["stat", "-c", "%F", f"/{name}"] for name in PLACES),
        "cat /out/secret /tmp/secret /run/secret; touch /out/x /tmp/secret.x; ls -A /workspace",
        "id -u; id -ru; cat /disk | head -c1; readlink /etc/ssl/cert.pem",
    ]
    answers = run(
        spawn,
        place,
        links={"root": "links", "user": "5:5", "commands": look},
        pipe={"root": "pipe", "user": "a", "commands": []},
        loop={"root": "loop", "user": "a", "commands": []},
        long={"root": "long", "user": "a", "commands": []},
        number={"root": "pipe", "user": "70000", "commands": [["x"]]},
    )
    links = next(answers)
    assert [each["stdout"] for each in links[: len(PLACES)]] == ["directory\n"] * len(PLACES)
    assert "canary" not in links[-2]["stdout"] and not (place / "x").exists()
    assert links[-1]["stdout"].split() == ["5", "5", "/run/secrets/carrel-ca.pem"]
    for told in (next(answers), next(answers), next(answers)):
        assert told == ["the image wants to run as user 'a', which its /etc/passwd does not have"]
    assert next(answers)[0]["exit_code"] == 127
    assert (place / "secret").read_text() == "canary"


def test_every_kind_of_image(spawn: Any, place: Path) -> None:
    """An empty image, one with a single program, one with another C library and a small Debian."""
    for name in ("empty", "static", "musl", "debian"):
        getattr(images, name)(place / "images" / name)
    root = "id -u; head -n1 /proc/self/uid_map; touch /usr/x; python3 -c 'import ssl, ctypes; print(int(ssl.PROTOCOL_TLS))'"
    answers = run(
        spawn,
        place,
        empty={"root": "empty", "commands": ["true"]},
        static={"root": "static", "commands": [[images.HELLO]]},
        musl={"root": "musl", "user": "7", "commands": [["who"], "who"]},
        debian={"root": "debian", "commands": [root]},
    )
    assert "this sandbox has no shell" in next(answers)[0]["stderr"]
    assert next(answers)[0]["stderr"] == "hello\n"
    musl = next(answers)
    assert musl[0]["stdout"] == "musl 7\n" and "no shell" in musl[1]["stderr"]
    debian = next(answers)[0]
    assert debian["stdout"].split() == ["0", "0", "1000", "1", "2"]
    assert "Read-only" in debian["stderr"]
