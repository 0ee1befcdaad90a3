from __future__ import annotations

import asyncio
import json
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.support.environments_ground import sources, stocked

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


async def test_attached_listed_removed(carrel: Carrel, tmp_path: Path) -> None:
    context = f"c-{uuid.uuid4().hex}"

    async def said(*words: str, ok: bool = True) -> bytes:
        done = await asyncio.to_thread(carrel, *words)
        assert (done.returncode == 0) is ok, done.stderr
        return done.stdout if ok else done.stderr

    async with stocked() as index:
        (tmp_path / "sources.json").write_text(json.dumps(sources(index)))
        await said("policy", "set", context, "--sources", str(tmp_path / "sources.json"))
        await said("exec", context, "true")
        path = (await said("envs", "attach", context, "-r", "shelf")).decode().strip()
        name = path.removeprefix("/envs/")
        assert (await said("envs", "attach", context, name)).decode().strip() == path
        assert await said("exec", context, f"{path}/bin/python -c 'import plank; print(plank.version)'") == b"1.0\n"
        shown = (await said("envs")).decode()
        assert name in shown and "shelf (+1)" in shown and "in use" in shown and "LABEL" in shown
        [listed] = [each for each in json.loads(await said("envs", "--json")) if each["name"] == name]
        assert [each["name"] for each in listed["packages"]] == ["plank", "shelf"]
        assert b"nonesuch" in await said("envs", "attach", context, "-r", "nonesuch", ok=False)
        assert b"in use" in await said("envs", "rm", name, ok=False)
        attached = json.loads(await said("envs", "attach", context, name, "--venv", "--json"))
        assert attached["name"] == name
        await said("rm", "--yes", "--files", context)
        await said("envs", "rm", name)
        assert name.encode() not in await said("envs", "ls")


def test_what_cannot_be_built(carrel: Carrel) -> None:
    done = carrel("envs", "build", "pandas >", "--name", "x")
    assert done.returncode != 0 and b"not a requirement" in done.stderr
    done = carrel("envs", "build", "pandas", "--python", "3.99")
    assert done.returncode != 0 and b"there is: 3." in done.stderr
