"""Warm interpreters: what they import ahead, how many wait, what becomes of them."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from tests.support.sandboxes import SANDBOX_UID, Box, until

from carrel.supervisor.python.hosts import MOST_READY, imports_of


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


ABOVE = """
import os, resource, signal
above = [os.getppid(), int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])]
"""


async def test_what_stops_its_host_has_a_deadline_all_the_same(box: Box) -> None:
    for deadline in (1, 20):  # on a machine that stood still, the short one may come before the first word
        code = f"{ABOVE}print('said', flush=True); os.kill(above[0], signal.SIGSTOP)"
        stopped = await run(box, code, timeout=deadline)
        assert stopped["timed_out"]
        if stopped["stdout"]:
            break
    assert stopped["stdout"] == "said\n"
    await run(box, f"{ABOVE}os.kill(above[1], signal.SIGSTOP)")
    answers = await asyncio.gather(*[run(box, f"import time; time.sleep(0.1); print({n})") for n in range(4)])
    assert [each["stdout"] for each in answers] == [f"{n}\n" for n in range(4)]


async def test_those_that_wait_go_on_when_they_were_stopped(box: Box) -> None:
    if not box.isolated():
        return  # here it would stop what is not its own
    await run(box, "1")
    others = "for pid in filter(str.isdigit, os.listdir('/proc')):\n    if int(pid) not in (1, os.getpid(), os.getppid()): os.kill(int(pid), signal.SIGSTOP)"
    await run(box, f"{ABOVE}{others}")
    for number in range(3):
        assert (await run(box, f"print({number})"))["stdout"] == f"{number}\n"


CHANGES = (
    "resource.prlimit(each, resource.RLIMIT_NOFILE, (3, 3))",
    "resource.prlimit(each, resource.RLIMIT_FSIZE, (1000, 1000))",
    "os.setpriority(os.PRIO_PROCESS, each, 15)",
    "os.sched_setscheduler(each, os.SCHED_BATCH, os.sched_param(0))",
)


async def test_no_call_has_the_limits_that_another_gave_its_interpreter(box: Box) -> None:
    look = "import os, resource; print([resource.getrlimit(each) for each in range(10)], os.nice(0), os.sched_getscheduler(0))"
    before = await run(box, look)
    for change in CHANGES:
        for whom in ("above", "above[:1]"):
            done = await run(box, f"{ABOVE}for each in {whom}: {change}")
            assert done["exit_code"] == 0, done
            for _ in range(3):  # some were forked before, some after
                assert (await run(box, look))["stdout"] == before["stdout"], (change, whom)


async def test_who_waits_for_a_host_does_not_get_one_that_was_starved_meanwhile(box: Box) -> None:
    starve = "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3))"
    for _ in range(3):
        codes = [starve if number % 3 == 0 else "print(1)" for number in range(24)]
        found = await asyncio.gather(*(run(box, code) for code in codes))
        assert [each["stdout"] for each in found] == ["" if code == starve else "1\n" for code in codes]


async def test_what_an_import_changes_is_no_reason_to_start_anew(box: Box) -> None:
    if not box.isolated():
        return  # only a sandbox has its workspace at a fixed place
    made = await box.supervisor.run("/usr/bin/python3 -m venv --without-pip .venv && ls -d .venv/lib/*/site-packages")
    place = box.workspace / made["stdout"].strip()
    (place / "greedy.py").write_text("import os; os.nice(3)")
    (box.workspace / ".venv/carrel-env.json").write_text('{"imports": ["greedy"]}')
    look = f"{ABOVE}print(above[1], os.nice(0))"
    first = (await run(box, look))["stdout"]
    assert (
        first.endswith(f" {os.nice(0) + 3}\n") and [(await run(box, look))["stdout"] for _ in range(4)] == [first] * 4
    )
