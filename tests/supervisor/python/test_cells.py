"""Code contexts through the supervisor's socket."""

from __future__ import annotations

import asyncio
import textwrap
from typing import Any

import pytest
from tests.support.sandboxes import Box, Supervisor, until


async def cell(supervisor: Supervisor, code: str, name: str = "a", **more: object) -> dict[str, Any]:
    body = {"code": textwrap.dedent(code), "timeout": 20, **more}
    return dict(await supervisor.ask("POST", f"/contexts/{name}/cells", body, wait=1))


async def test_variables_stay(supervisor: Supervisor) -> None:
    first = await cell(supervisor, "x = 40\nprint('hello')")
    assert first.pop("duration_ms") > 0
    assert first == {
        "id": "1",
        "context": "a",
        "number": 1,
        "status": "ok",
        "stdout": "hello\n",
        "stderr": "",
        "results": [],
        "error": None,
        "exit_code": None,
        "signal": None,
        "timed_out": False,
        "fresh": True,
        "truncated": False,
        "dropped_bytes": 0,
    }
    second = await cell(supervisor, "x += 2; x")
    assert second["results"] == [{"kind": "result", "data": {"text/plain": "42"}}]
    assert (second["number"], second["fresh"]) == (2, False)
    assert (await cell(supervisor, "_ + 1;"))["results"] == []
    assert (await cell(supervisor, "'x' in globals()", "b"))["results"][0]["data"]["text/plain"] == "False"


async def test_errors_keep_the_state(supervisor: Supervisor) -> None:
    await cell(supervisor, "def f(n):\n    return 1 / n\n")
    failed = await cell(supervisor, "y = 5\nf(0)\ny = 6")
    assert failed["status"] == "error" and failed["stderr"] == ""
    assert (failed["error"]["name"], failed["error"]["value"]) == ("ZeroDivisionError", "division by zero")
    trace = failed["error"]["traceback"]
    assert 'File "<cell 2>", line 2, in <module>' in trace and "f(0)" in trace
    assert 'File "<cell 1>", line 2, in f' in trace and "return 1 / n" in trace
    assert "kernel.py" not in trace
    assert (await cell(supervisor, "y"))["results"][0]["data"]["text/plain"] == "5"
    assert (await cell(supervisor, "a = = 1"))["error"]["name"] == "SyntaxError"
    assert (await cell(supervisor, "import sys; sys.exit(3)"))["error"]["name"] == "SystemExit"
    assert (await cell(supervisor, "y"))["status"] == "ok"


async def test_rich_results(supervisor: Supervisor) -> None:
    code = """
    class Rich:
        def _repr_html_(self): return "<b>x</b>"
        def _repr_png_(self): return b"png"
        def _repr_json_(self): return {"a": [1]}
        def _repr_svg_(self): raise ValueError
        def __repr__(self): return "rich"
    class Broken:
        def __repr__(self): raise ValueError
    display(Rich(), 7)
    Broken()
    """
    results = (await cell(supervisor, code))["results"]
    assert results == [
        {
            "kind": "display",
            "data": {
                "text/html": "<b>x</b>",
                "image/png": "cG5n",
                "application/json": '{"a": [1]}',
                "text/plain": "rich",
            },
        },
        {"kind": "display", "data": {"text/plain": "7"}},
        {"kind": "result", "data": {"text/plain": "<Broken, whose repr raised ValueError>"}},
    ]


async def test_await_at_the_top(supervisor: Supervisor) -> None:
    assert (await cell(supervisor, "import asyncio\nawait asyncio.sleep(0, 'slept')"))["results"][0]["data"] == {
        "text/plain": "'slept'"
    }


async def test_cells_run_in_order(supervisor: Supervisor) -> None:
    await cell(supervisor, "seen = []")
    asked = [cell(supervisor, f"import time; time.sleep(0.01); seen.append({n}); len(seen)") for n in range(8)]
    answers = await asyncio.gather(*asked)
    assert sorted(int(each["results"][0]["data"]["text/plain"]) for each in answers) == list(range(1, 9))
    assert [each["number"] for each in sorted(answers, key=lambda each: int(each["id"]))] == list(range(2, 10))


async def test_streams(supervisor: Supervisor) -> None:
    info = await supervisor.ask("POST", "/contexts/a/cells", {"code": "print('one')\nprint(input())"})
    text = b""
    async with supervisor.http.stream("GET", f"/contexts/a/cells/{info['id']}/output", params={"follow": 1}) as answer:
        text = await answer.aread()
    assert b"one\n" in text and b'"exit_code": 1' in text
    result = await supervisor.ask("GET", f"/contexts/a/cells/{info['id']}")
    assert result["error"]["name"] == "EOFError"


async def test_interrupt_keeps_the_state(box: Box) -> None:
    supervisor = box.supervisor
    await cell(supervisor, "x = 1")
    running = asyncio.create_task(
        cell(supervisor, "import subprocess\nx = 2\nopen('up', 'w')\nsubprocess.run(['sleep', '1236'])")
    )
    await until(lambda: (box.workspace / "up").exists() and box.count("sleep 1236") == 1)
    info = await supervisor.ask("GET", "/contexts/a")
    assert info["state"] == "busy"
    assert (await supervisor.ask("GET", "/health"))["state"] == "busy"
    await supervisor.ask("POST", "/contexts/a/interrupt")
    result = await running
    assert result["status"] == "interrupted" and result["error"]["name"] == "KeyboardInterrupt"
    assert (await cell(supervisor, "x"))["results"][0]["data"]["text/plain"] == "2"
    assert box.count("sleep 1236") == 0
    await supervisor.ask("POST", "/contexts/a/interrupt")  # nothing runs
    assert (await cell(supervisor, "x"))["results"][0]["data"]["text/plain"] == "2"
    assert (await supervisor.ask("GET", "/health"))["state"] == "idle"


async def test_deadline_interrupts_then_kills(supervisor: Supervisor) -> None:
    await cell(supervisor, "x = 1")
    slow = await cell(supervisor, "import time; time.sleep(60)", timeout=0.2)
    assert (slow["status"], slow["timed_out"]) == ("interrupted", True)
    assert (await cell(supervisor, "x"))["status"] == "ok"
    stubborn = "import time\nwhile True:\n  try: time.sleep(60)\n  except KeyboardInterrupt: pass"
    for deadline in (0.2, 10):  # on a machine that stood still, the short one may come before it is stubborn
        result = await cell(supervisor, stubborn, timeout=deadline)
        assert result["timed_out"]
        if result["status"] == "died":
            break
    assert (result["status"], result["signal"]) == ("died", "SIGKILL")
    lost = await cell(supervisor, "x")
    assert lost["error"]["name"] == "NameError" and lost["fresh"]


@pytest.mark.parametrize(
    ("code", "exit_code", "signal"),
    [
        ("import os; os._exit(4)", 4, None),
        ("import ctypes; ctypes.string_at(0)", None, "SIGSEGV"),
        ("import os; os.kill(os.getppid(), 9); import time; time.sleep(60)", None, "SIGKILL"),
    ],
)
async def test_death(box: Box, code: str, exit_code: int | None, signal: str | None) -> None:
    supervisor = box.supervisor
    await cell(supervisor, "import subprocess; subprocess.Popen(['sleep', '1237'])")
    dying = asyncio.create_task(cell(supervisor, f"print('last words', flush=True)\n{code}"))
    result = await dying
    assert (result["status"], result["exit_code"], result["signal"]) == ("died", exit_code, signal)
    assert result["stdout"] == "last words\n"
    await until(lambda: box.count("sleep 1237") == 0)
    assert (await cell(supervisor, "print('next')"))["stdout"] == "next\n"


async def test_fork_in_a_cell(supervisor: Supervisor) -> None:
    result = await cell(
        supervisor, "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('p' if pid else 'c')"
    )
    assert sorted(result["stdout"].split()) == ["c", "p"]
    assert (await cell(supervisor, "1"))["number"] == 2


async def test_closed_streams_are_opened_again(supervisor: Supervisor) -> None:
    await cell(supervisor, "import sys; sys.stdout.close()")
    assert (await cell(supervisor, "print('again')"))["stdout"] == "again\n"
    await cell(supervisor, "import os; os.close(1); print('nowhere')")
    assert (await cell(supervisor, "print('again')"))["stdout"] == "again\n"
    for _ in range(2):
        await cell(supervisor, "os.close(1); os.close(2); print('nowhere', file=sys.stderr)")
        both = await cell(supervisor, "print('out'); print('err', file=sys.stderr); os.system('echo sub')")
        assert (both["stdout"], both["stderr"]) == ("out\nsub\n", "err\n")
    gone = "for fd in (1, 2, *range(64, 80)):\n    try: os.close(fd)\n    except OSError: pass"
    await cell(supervisor, gone)
    assert (await cell(supervisor, "print('nowhere for good')"))["status"] == "ok"


async def test_large_results_are_cut(supervisor: Supervisor) -> None:
    result = await cell(supervisor, "'x' * 100_000_000")
    assert result["truncated"] and len(result["results"][0]["data"]["text/plain"]) == 1024 * 1024 + 1
    code = """
    class Html:
        def _repr_html_(self): return "h" * 20_000_000
        def __repr__(self): return "h"
    Html()
    """
    result = await cell(supervisor, code)
    assert result["truncated"] and list(result["results"][0]["data"]) == ["text/plain"]
    result = await cell(supervisor, "for n in range(40): display('y' * 1_000_000)")
    assert result["truncated"] and sum(len(each["data"]["text/plain"]) for each in result["results"]) < 9_000_000
    result = await cell(supervisor, "print('z' * 50_000_000)")
    assert result["truncated"] and len(result["stdout"]) == 1024 * 1024
    assert (await cell(supervisor, "# " + "x" * 1_000_000 + "\n5"))["results"][0]["data"]["text/plain"] == "5"


async def test_restart_list_delete(box: Box) -> None:
    supervisor = box.supervisor
    await cell(supervisor, "x = 1")
    info = await supervisor.ask("POST", "/contexts/a/restart")
    assert info["state"] == "idle" and info["cells"] == 0
    assert (await cell(supervisor, "x"))["error"]["name"] == "NameError"
    running = asyncio.create_task(cell(supervisor, "open('on', 'w')\nimport time; time.sleep(60)"))
    await until(lambda: (box.workspace / "on").exists())
    waiting = asyncio.create_task(cell(supervisor, "1"))
    await until(lambda: _queued(supervisor))
    await supervisor.ask("POST", "/contexts/a/restart")
    assert (await running)["status"] == (await waiting)["status"] == "died"
    assert [each["name"] for each in (await supervisor.ask("GET", "/contexts"))["items"]] == ["a"]
    await supervisor.ask("DELETE", "/contexts/a")
    assert (await supervisor.ask("GET", "/contexts"))["items"] == []
    assert (await supervisor.refused("GET", "/contexts/a"))["status"] == 404
    assert (await cell(supervisor, "1"))["fresh"]


async def _queued(supervisor: Supervisor) -> bool:
    return bool((await supervisor.ask("GET", "/contexts/a"))["queued"] == 1)


async def test_variables_of_the_environment(supervisor: Supervisor) -> None:
    result = await cell(supervisor, "import os; os.environ['A']", variables={"A": "b"})
    assert result["results"][0]["data"]["text/plain"] == "'b'"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "code"),
        ({"code": "1", "figures": ["gif"]}, "figures"),
        ({"code": "1", "timeout": 0}, "timeout"),
        ({"code": "1", "env": "missing"}, "env"),
        ({"code": "1", "variables": {"a=": "b"}}, "env"),
    ],
)
async def test_refusals(supervisor: Supervisor, body: dict[str, object], field: str) -> None:
    assert (await supervisor.refused("POST", "/contexts/a/cells", body, wait=1))["field"] == field
    assert (await supervisor.refused("POST", "/contexts/a%20b/cells", {"code": "1"}, wait=1))["field"] == "name"
    assert (await supervisor.refused("GET", "/contexts/zz/cells/1"))["status"] == 404


async def test_environment_of_a_context_stays(supervisor: Supervisor) -> None:
    await cell(supervisor, "1")
    problem = await supervisor.refused("POST", "/contexts/a/cells", {"code": "1", "env": "other"}, wait=1)
    assert (problem["status"], problem["field"]) == (409, "env")
