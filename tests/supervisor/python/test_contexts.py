"""Contexts beside each other: whatever is asked of them in whatever order, each has only its own."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.leaks import below
from tests.support.sandboxes import Box, Supervisor, until

from carrel.supervisor.python.cells import MOST_CONTEXTS
from carrel.supervisor.python.contexts import REMEMBERED

steps = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["set", "get", "die", "restart", "raise"]), st.integers(0, 9)),
    max_size=8,
)


async def cell(supervisor: Supervisor, name: str, code: str, timeout: float = 20) -> dict[str, Any]:
    return dict(await supervisor.ask("POST", f"/contexts/{name}/cells", {"code": code, "timeout": timeout}, wait=1))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps)
async def test_states(supervisor: Supervisor, steps: list[tuple[str, str, int]]) -> None:
    values: dict[str, int | None] = {}
    for name, step, number in steps:
        if step == "set":
            assert (await cell(supervisor, name, f"x = {number}"))["status"] == "ok"
            values[name] = number
        elif step == "get":
            result = await cell(supervisor, name, "globals().get('x')")
            shown = [each["data"]["text/plain"] for each in result["results"]]
            assert shown == ([] if values.get(name) is None else [str(values[name])])
            values.setdefault(name, None)
        elif step == "raise":
            assert (await cell(supervisor, name, "1 / 0"))["status"] == "error"
            values.setdefault(name, None)
        elif step == "die":
            result = await cell(supervisor, name, f"import os; os._exit({number})")
            assert (result["status"], result["exit_code"]) == ("died", number)
            values[name] = None
        elif name in values:
            assert (await supervisor.ask("POST", f"/contexts/{name}/restart"))["state"] == "idle"
            values[name] = None
    listed = [each["name"] for each in (await supervisor.ask("GET", "/contexts"))["items"]]
    assert sorted(listed) == sorted(values)
    for name in listed:
        await supervisor.ask("DELETE", f"/contexts/{name}")


async def test_limits(supervisor: Supervisor) -> None:
    await asyncio.gather(*[cell(supervisor, f"c{number}", "1") for number in range(MOST_CONTEXTS)])
    problem = await supervisor.refused("POST", "/contexts/more/cells", {"code": "1"}, wait=1)
    assert problem["code"] == "limit_exceeded"
    for _ in range(REMEMBERED + 2):
        await cell(supervisor, "c0", "1")
    assert (await supervisor.refused("GET", "/contexts/c0/cells/1"))["status"] == 404
    running = asyncio.create_task(
        supervisor.call("POST", "/contexts/c0/cells", {"code": "import time; time.sleep(60)"}, wait=1)
    )
    while (await supervisor.ask("GET", "/contexts/c0"))["state"] != "busy":
        await asyncio.sleep(0.01)
    waiting = [await supervisor.ask("POST", "/contexts/c0/cells", {"code": "1"}) for _ in range(64)]
    assert (await supervisor.refused("POST", "/contexts/c0/cells", {"code": "1"}))["code"] == "limit_exceeded"
    assert len(waiting) == 64
    await supervisor.ask("DELETE", "/contexts/c0")
    assert (await running).json()["status"] == "died"


async def test_restarts_and_cells_at_once_start_one_process(box: Box) -> None:
    supervisor = box.supervisor
    await cell(supervisor, "a", "1")
    for _ in range(5):
        await cell(supervisor, "a", "1")
        restarts = [supervisor.call("POST", "/contexts/a/restart") for _ in range(3)]
        assert all(each.is_success for each in await asyncio.gather(*restarts))
        await cell(supervisor, "a", "1")
        await asyncio.gather(supervisor.call("POST", "/contexts/a/restart"), supervisor.ask("DELETE", "/contexts/a"))
    assert (await supervisor.ask("GET", "/contexts"))["items"] == []
    await until(lambda: not any(_writes_somewhere(pid) for pid, _started in below(box.pid)))


def _writes_somewhere(pid: int) -> bool:
    """Whether a process has become a context: one that only waits has nowhere to write to."""
    try:
        return os.readlink(f"/proc/{pid}/fd/1").startswith("pipe:")
    except OSError:
        return False


async def test_a_cell_that_stops_its_host_can_be_ended(supervisor: Supervisor) -> None:
    stop = "import os, signal; os.kill(os.getppid(), signal.SIGSTOP)"
    assert (await cell(supervisor, "a", stop))["status"] == "ok"
    died = await cell(supervisor, "a", f"{stop}; os._exit(3)", timeout=1)
    assert died["status"] == "died"
    assert (await cell(supervisor, "a", "2"))["fresh"]
    await cell(supervisor, "a", stop)
    await supervisor.ask("DELETE", "/contexts/a")
