"""Sandboxes that wear masks, for the tests that attack them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.support.attacks import answer, words
from tests.support.nesting import give

from carrel.primitives.trees import remove_tree

# Starts a sandbox for each line that has a new name and masks, and removes it when its name comes again.
HOLD = """
import asyncio, json, os, sys
from carrel.models import Network
from carrel.providers import Launch, Masks, open_providers
from carrel.providers.base import RootImage

async def main():
    place, root, image = sys.argv[1], sys.stdin.readline().strip(), None
    docker = sys.stdin.readline().strip()
    if root:
        image = RootImage(root, (os.stat(root).st_dev, os.stat(root).st_ino), user="agent")
    images = os.path.dirname(root)
    more = {"images": images, "docker": docker, "bundles": place + "/bundles"}
    opened = open_providers(place + "/run", place + "/ws", allow_process=False, **more)
    provider = opened["docker" if docker else "namespace"]
    held = {}
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, masks = json.loads(line)
        if name in held:
            await provider.remove(held.pop(name))
            print("removed", flush=True)
            continue
        masks = Masks(**{key: tuple(value) if isinstance(value, list) else value for key, value in masks.items()})
        launch = Launch("s" + name, f"{place}/ws/{name}", Network.NONE, masks=masks, image=image)
        held[name] = await provider.start(launch)
        print(json.dumps(held[name]), flush=True)
    await provider.close()

asyncio.run(main())
"""


@dataclass
class Masked:
    """A sandbox that wears masks."""

    http: httpx.Client
    workspace: Path

    def run(self, command: str | list[str]) -> dict[str, Any]:
        """A command to its end."""
        answer = self.http.post("/commands", params={"wait": 1}, json={"command": command, "timeout": 20})
        assert answer.is_success, answer.text
        return dict(answer.json())

    def attack(self, attack: Callable[..., object], *arguments: object) -> Any:
        """What an attack brings back when it runs inside; None when the kernel refused it."""
        done = self.run(words(attack, *arguments))
        told = answer(done["stdout"])
        assert told is not None, done
        return told.get("evidence")


Hold = Callable[..., contextlib.AbstractContextManager[Masked]]


@contextlib.contextmanager
def holding(spawn: Any, image: Path | None = None, docker: str = "") -> Iterator[Hold]:
    """Makes masked sandboxes, on one zygote, or as containers if the socket of a daemon is given; from an image if its
    root is given.
    """
    place = Path(tempfile.mkdtemp(prefix="mask"))
    place.chmod(0o755)
    for name in ("run", "ws"):
        (place / name).mkdir()
    process = spawn(HOLD, place)
    process.stdin.write(f"{image or ''}\n{docker}\n")
    count = itertools.count()

    def ask(name: str, masks: dict[str, Any]) -> str:
        process.stdin.write(json.dumps([name, masks]) + "\n")
        process.stdin.flush()
        return str(process.stdout.readline())

    @contextlib.contextmanager
    def start(fill: Callable[[Path], object] = lambda _workspace: None, **masks: Any) -> Iterator[Masked]:
        name = f"w{next(count)}"
        workspace = place / "ws" / name
        workspace.mkdir()
        fill(workspace)
        if os.geteuid() == 0:
            give(workspace, place.stat().st_uid or 1000)
        line = ask(name, masks)
        assert line, "the sandbox did not start"
        once = httpx.Limits(max_keepalive_connections=0)
        transport = httpx.HTTPTransport(uds=json.loads(line)["socket"], limits=once)
        try:
            with httpx.Client(transport=transport, base_url="http://sandbox", timeout=30) as client:
                yield Masked(client, workspace)
        finally:
            assert ask(name, {}) == "removed\n"

    try:
        yield start
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()
        remove_tree(str(place))
