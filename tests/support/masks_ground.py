"""Sandboxes that wear masks, for the tests that attack them."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.support.nesting import give

from carrel.primitives.trees import remove_tree

HERE = Path(__file__).parents[1] / "support"

# Holds one sandbox for as long as its standard input is open.
HOLD = """
import asyncio, json, os, sys
from carrel.models import Network
from carrel.providers import Launch, Masks, open_providers

async def main():
    place, given = sys.argv[1], json.loads(sys.stdin.readline())
    provider = open_providers(place + "/run", place + "/ws", allow_process=False)["namespace"]
    masks = Masks(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
    handle = await provider.start(Launch("s1", place + "/ws/w", Network.NONE, masks=masks))
    print(json.dumps(handle), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await provider.remove(handle)
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
        shipped = (HERE / "inside.py").read_text()
        code = f"""
import sys, types
inside = types.ModuleType("inside"); exec({shipped!r}, inside.__dict__); sys.modules["inside"] = inside
exec({textwrap.dedent(inspect.getsource(attack))!r})
inside.perform(lambda: {attack.__name__}(*{arguments!r}), {{}})
"""
        done = self.run(["/usr/bin/python3", "-I", "-c", code])
        marked = [line[2:] for line in done["stdout"].splitlines() if line.startswith("@@")]
        assert marked, done
        answer = json.loads(marked[-1])
        assert "broken" not in answer, answer["broken"]
        return answer.get("evidence")


Hold = Callable[..., contextlib.AbstractContextManager[Masked]]


def holding(spawn: Any) -> Hold:
    """Makes masked sandboxes, each with a zygote of its own."""

    @contextlib.contextmanager
    def start(fill: Callable[[Path], object] = lambda _workspace: None, **masks: Any) -> Iterator[Masked]:
        place = Path(tempfile.mkdtemp(prefix="mask"))
        place.chmod(0o755)
        workspace = place / "ws" / "w"
        workspace.mkdir(parents=True)
        (place / "run").mkdir()
        fill(workspace)
        if os.geteuid() == 0:
            give(workspace, 1000)
        process = spawn(HOLD, place)
        try:
            process.stdin.write(json.dumps(masks) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, "the sandbox did not start"
            once = httpx.Limits(max_keepalive_connections=0)
            transport = httpx.HTTPTransport(uds=json.loads(line)["socket"], limits=once)
            with httpx.Client(transport=transport, base_url="http://sandbox", timeout=30) as client:
                yield Masked(client, workspace)
        finally:
            process.stdin.close()
            process.wait(30)
            process.stdout.close()
            remove_tree(str(place))

    return start
