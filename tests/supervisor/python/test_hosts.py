"""Warm interpreters: what they import ahead, how many wait, what becomes of them."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from carrel.supervisor.python.hosts import MOST_READY, imports_of
from sandboxes import SANDBOX_UID, Box, until


async def run(box: Box, code: str, **more: object) -> dict[str, Any]:
    return dict(await box.supervisor.ask("POST", "/python", {"code": code, "timeout": 20, **more}, wait=1))


def test_imports_are_read_with_care(tmp_path: Path) -> None:
    python = str(tmp_path / "bin" / "python")
    assert imports_of(python) == []
    listed = tmp_path / "carrel-env.json"
    for text, found in (
        ('{"imports": ["pandas", "a.b", 5, "x y", "os;"]}', ["pandas", "a.b"]),
        ("[]", []),
        ("not json", []),
        (json.dumps({"imports": ["m"] * 1000}), ["m"] * 64),
    ):
        listed.write_text(text)
        assert imports_of(python) == found


async def test_the_workspaces_own_environment_is_warm(box: Box) -> None:
    if not box.isolated():
        return  # only a sandbox has its workspace at a fixed place
    made = await box.supervisor.run("/usr/bin/python3 -m venv --without-pip .venv && ls -d .venv/lib/*/site-packages")
    assert made["exit_code"] == 0, made
    place = box.workspace / made["stdout"].strip()
    for name, text in (("slow.py", "import os\nloaded_by = os.getpid()\n"),):
        (place / name).write_text(text)
    (box.workspace / ".venv/carrel-env.json").write_text('{"imports": ["slow"]}')
    for path in (place / "slow.py", box.workspace / ".venv/carrel-env.json"):
        os.chown(path, SANDBOX_UID, SANDBOX_UID)
    code = "import os, sys, slow; print(sys.prefix, slow.loaded_by != os.getpid())"
    assert (await run(box, code))["stdout"] == "/workspace/.venv True\n"
    (place / "later.py").write_text("")
    assert (await run(box, "import later; print('found')"))["stdout"] == "found\n"


async def test_a_crowd_is_served_and_leaves_few_waiting(box: Box) -> None:
    answers = await asyncio.gather(*[run(box, f"import time; time.sleep(0.05); print({n})") for n in range(20)])
    assert [each["stdout"] for each in answers] == [f"{n}\n" for n in range(20)]
    # The interpreter, and a host with its spare for each that is kept ready.
    await until(lambda: box.count("/usr/bin/python3 -c exec") <= 1 + 2 * MOST_READY)
    assert (await run(box, "print('next')"))["stdout"] == "next\n"


async def test_spares_that_are_killed_are_replaced(box: Box) -> None:
    for _ in range(3):
        await run(box, "1")
    if box.isolated():
        for word in ("kill", "kill -9"):
            await box.supervisor.run(
                f"for p in /proc/[0-9]*; do grep -qs warm.py $p/cmdline && {word} ${{p#/proc/}}; done; true"
            )
            assert (await run(box, "print('next')"))["stdout"] == "next\n"
