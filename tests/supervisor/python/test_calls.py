"""Calls of Python through the supervisor's socket, in sandboxes of every kind."""

from __future__ import annotations

import asyncio
import base64
import json
import textwrap
from typing import Any

import pytest
from tests.support.sandboxes import Box, Supervisor, until

from carrel.supervisor.python.calls import MOST_SHOWN


async def run(supervisor: Supervisor, code: str, **more: object) -> dict[str, Any]:
    body = {"code": textwrap.dedent(code), "timeout": 20, **more}
    return dict(await supervisor.ask("POST", "/python", body, wait=1))


async def test_runs_a_code(supervisor: Supervisor) -> None:
    result = await run(supervisor, "print(1)")
    assert result.pop("duration_ms") > 0
    assert result == {
        "id": "c1",
        "stdout": "1\n",
        "stderr": "",
        "exit_code": 0,
        "signal": None,
        "timed_out": False,
        "truncated": False,
        "dropped_bytes": 0,
        "files_produced": [],
        "files_truncated": False,
    }


async def test_is_like_a_new_interpreter(box: Box) -> None:
    code = """
    import json, os, sys
    print(json.dumps({
        "name": __name__, "argv": sys.argv, "first": sys.path[0], "cwd": os.getcwd(), "rest": sys.stdin.read(),
        "main": sys.modules["__main__"].__dict__ is globals(), "names": sorted(n for n in globals() if n[:2] != "__"),
        "fds": sorted(map(int, os.listdir("/proc/self/fd")))[:-1], "leader": os.getsid(0) == os.getpid(),
        "a": os.environ.get("A"), "pid": os.getpid(),
    }))
    """
    result = await run(box.supervisor, code, args=["x", "y"], variables={"A": "é"}, stdin="given")
    told = json.loads(result["stdout"])
    place = "/workspace" if box.isolated() else str(box.workspace)
    pid = told.pop("pid")
    assert told == {
        "name": "__main__",
        "argv": ["-c", "x", "y"],
        "first": "",
        "cwd": place,
        "rest": "given",
        "main": True,
        "names": ["json", "os", "sys"],
        "fds": [0, 1, 2],
        "leader": True,
        "a": "é",
    }
    assert (await box.supervisor.info(result["id"]))["pid"] == pid
    assert (await run(box.supervisor, "import os; print('A' in os.environ)"))["stdout"] == "False\n"


async def test_modules_of_the_workspace(box: Box) -> None:
    (box.workspace / "mine.py").write_text("value = 6\n")
    assert (await run(box.supervisor, "import mine; print(mine.value)"))["stdout"] == "6\n"
    (box.workspace / "other.py").write_text("value = 7\n")
    assert (await run(box.supervisor, "import other; print(other.value)"))["stdout"] == "7\n"


async def test_tracebacks_show_the_code(supervisor: Supervisor) -> None:
    code = """
    def outer():
        return inner()

    def inner():
        return 1 / 0  # here

    outer()
    """
    result = await run(supervisor, code)
    assert result["exit_code"] == 1
    lines = result["stderr"].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line.strip() for line in lines if line.startswith("  File")] == [
        'File "<code>", line 8, in <module>',
        'File "<code>", line 3, in outer',
        'File "<code>", line 6, in inner',
    ]
    assert "return 1 / 0  # here" in result["stderr"]
    assert lines[-1] == "ZeroDivisionError: division by zero"


async def test_syntax_errors_and_threads(supervisor: Supervisor) -> None:
    result = await run(supervisor, "x = 1\ny = = 2\n")
    assert result["exit_code"] == 1
    assert 'File "<code>", line 2' in result["stderr"] and "y = = 2" in result["stderr"]
    assert "warm.py" not in result["stderr"]
    result = await run(supervisor, "import threading\nthreading.Thread(target=lambda: 1 / 0).start()\n")
    assert "threading.Thread(target=lambda: 1 / 0).start()" in result["stderr"]
    assert result["exit_code"] == 0
    assert (await run(supervisor, "a\0b"))["exit_code"] == 1


@pytest.mark.parametrize(
    ("code", "exit_code", "signal", "stderr"),
    [
        ("import sys; sys.exit()", 0, None, ""),
        ("import sys; sys.exit(7)", 7, None, ""),
        ("import sys; sys.exit(-1)", 255, None, ""),
        ("import sys; sys.exit('words')", 1, None, "words\n"),
        ("import os; print('lost'); os._exit(5)", 5, None, ""),
        ("import os; os.kill(os.getpid(), 15)", None, "SIGTERM", ""),
        ("import os; os.abort()", None, "SIGABRT", ""),
        ("import ctypes; ctypes.string_at(0)", None, "SIGSEGV", ""),
        ("raise KeyboardInterrupt", None, "SIGINT", None),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'bye'); sys.exit(3)", 3, None, "bye"),
    ],
)
async def test_ends(supervisor: Supervisor, code: str, exit_code: int | None, signal: str | None, stderr: str) -> None:
    result = await run(supervisor, code)
    assert (result["exit_code"], result["signal"]) == (exit_code, signal)
    if stderr is not None:
        assert result["stderr"] == stderr
    assert (await run(supervisor, "print('next')"))["stdout"] == "next\n"


async def test_odd_output(supervisor: Supervisor) -> None:
    result = await run(supervisor, r"import sys; sys.stdout.buffer.write(b'\xff\0x')")
    assert base64.b64decode(result["stdout_base64"]) == b"\xff\0x"
    result = await run(supervisor, "import sys; print('kept'); sys.stdout.close()")
    assert (result["stdout"], result["exit_code"]) == ("kept\n", 0)
    result = await run(supervisor, "import os; os.close(1); print('x')")
    assert (result["stdout"], result["exit_code"]) == ("", 120)
    result = await run(supervisor, "import os\nfor fd in range(64):\n  try: os.close(fd)\n  except OSError: pass\n")
    assert result["stdout"] == result["stderr"] == ""
    assert (await run(supervisor, "print('next')"))["stdout"] == "next\n"


async def test_what_is_written_late_is_not_lost(box: Box) -> None:
    code = """
    import threading, time
    file = open("late", "w"); file.write("text")
    class Keeper:
        pass
    Keeper.cycle = Keeper; Keeper.file = open("cyclic", "wb"); Keeper.file.write(b"bytes")
    def later():
        time.sleep(0.05)
        print("thread")
    threading.Thread(target=later).start()
    print("main")
    """
    result = await run(box.supervisor, code)
    assert result["stdout"] == "main\nthread\n"
    assert (box.workspace / "late").read_text() == "text"
    assert (box.workspace / "cyclic").read_text() == "bytes"
    assert sorted(result["files_produced"]) == ["cyclic", "late"]


async def test_too_much_output_is_cut(supervisor: Supervisor) -> None:
    result = await run(supervisor, "print('x' * 100_000_000)")
    assert len(result["stdout"]) == 1024 * 1024
    assert result["truncated"] and result["dropped_bytes"] == 100_000_001 - 1024 * 1024
    for deadline in (2, 20):  # on a machine that stood still, the short one may come before there is too much
        result = await run(supervisor, "while True: print('y' * 1000)", timeout=deadline)
        assert result["timed_out"] and result["signal"] == "SIGKILL"
        if result["truncated"]:
            break
    assert result["truncated"]
    assert (await run(supervisor, "print('next')"))["stdout"] == "next\n"


async def test_deadline_ends_the_tree(box: Box) -> None:
    code = """
    import os, subprocess, time
    subprocess.Popen(["sleep", "1234"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
    print("up", flush=True)
    time.sleep(100)
    """
    for deadline in (2, 20):  # on a machine that stood still, the short one may come before the first word
        result = await run(box.supervisor, code, timeout=deadline)
        assert result["timed_out"] and result["signal"] == "SIGKILL"
        if "up" in result["stdout"]:
            break
    assert "up" in result["stdout"]
    await until(lambda: box.count("sleep 1234") == 0)


async def test_a_fork_bomb(supervisor: Supervisor) -> None:
    code = """
    import os, time
    for _ in range(5):
        try: os.fork()
        except OSError: pass
    time.sleep(100)
    """
    result = await run(supervisor, code, timeout=1)
    assert result["timed_out"]
    assert (await run(supervisor, "print('next')"))["stdout"] == "next\n"


async def test_what_is_killed_leaves_nothing(box: Box) -> None:
    code = """
    import os, subprocess
    subprocess.Popen(["sleep", "1236"], start_new_session=True)
    os.kill(os.getpid(), 9)
    """
    assert (await run(box.supervisor, code))["signal"] == "SIGKILL"
    await until(lambda: box.count("sleep 1236") == 0)


async def test_leaves_processes_behind_like_a_command(box: Box) -> None:
    await run(box.supervisor, "import subprocess; subprocess.Popen(['sleep', '1235'])")
    await until(lambda: box.count("sleep 1235") == 1)
    results = await asyncio.gather(*[run(box.supervisor, "print('beside')") for _ in range(3)])
    assert [each["stdout"] for each in results] == ["beside\n"] * 3
    await box.supervisor.ask("POST", "/commands/c1/signal", {"signal": "KILL", "tree": True})
    await until(lambda: box.count("sleep 1235") == 0)


@pytest.mark.parametrize("above", [1, 2])
async def test_killing_its_own_warm_interpreter(supervisor: Supervisor, above: int) -> None:
    code = f"""
    import os, signal
    pid = os.getppid()
    for _ in range({above} - 1):
        with open(f"/proc/{{pid}}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    print("survived", flush=True)
    """
    result = await run(supervisor, code)
    assert result["exit_code"] == 0 or result["signal"] == "SIGKILL"
    for _ in range(3):
        assert (await run(supervisor, "print('next')"))["stdout"] == "next\n"


async def test_killing_everything(box: Box) -> None:
    if not box.isolated():
        return  # it would be everything of this user
    result = await run(box.supervisor, "import os; os.kill(-1, 9); print('survived')")
    assert result["signal"] == "SIGKILL" or result["stdout"] == "survived\n"
    for _ in range(3):
        assert (await run(box.supervisor, "print('next')"))["stdout"] == "next\n"


async def test_the_warm_interpreter_cannot_be_looked_into(box: Box) -> None:
    code = """
    import os
    for name in ("mem", "environ", "fd"):
        try:
            os.listdir(f"/proc/{os.getppid()}/{name}") if name == "fd" else open(f"/proc/{os.getppid()}/{name}", "rb")
            print("open", name)
        except PermissionError:
            print("closed")
        open("/proc/self/mem", "rb").close()
    """
    if box.isolated():
        assert (await run(box.supervisor, code))["stdout"] == "closed\n" * 3


async def test_no_state_passes_from_call_to_call(supervisor: Supervisor) -> None:
    await run(supervisor, "import builtins, sys; builtins.leak = 1; sys.leak = 1; x = 1; sys.path.append('/leak')")
    code = "import builtins, sys; print(hasattr(builtins, 'leak'), hasattr(sys, 'leak'), 'x' in globals(), '/leak' in sys.path)"
    for _ in range(4):
        assert (await run(supervisor, code))["stdout"] == "False False False False\n"
    code = "import random, uuid, secrets, tempfile; print(random.random(), uuid.uuid4(), secrets.token_hex(), tempfile.mktemp())"
    drawn = [(await run(supervisor, code))["stdout"].split() for _ in range(4)]
    assert all(len(set(column)) == 4 for column in zip(*drawn, strict=True))


async def test_what_is_installed_later_is_found(box: Box) -> None:
    if not box.isolated():
        return  # it would be the home of this user
    assert (await run(box.supervisor, "import added"))["exit_code"] == 1
    code = (
        "import site, os; os.makedirs(site.getusersitepackages()); open(site.getusersitepackages() + '/added.py', 'w')"
    )
    assert (await run(box.supervisor, code))["exit_code"] == 0
    assert (await run(box.supervisor, "import added; print('there')"))["stdout"] == "there\n"


async def test_files_in_and_out(box: Box) -> None:
    given = {"in/a.txt": base64.b64encode(b"abc").decode()}
    code = "import os; os.makedirs('out'); open('out/b.txt', 'w').write(open('in/a.txt').read().upper())"
    result = await run(box.supervisor, code, files=given)
    assert result["files_produced"] == ["out/b.txt"]
    assert (box.workspace / "out/b.txt").read_text() == "ABC"
    problem = await box.supervisor.refused("POST", "/python", {"code": "1", "files": {"a": "%"}})
    assert problem["field"] == "files"


async def test_streams_and_is_killed(supervisor: Supervisor) -> None:
    info = await supervisor.ask("POST", "/python", {"code": "import time\nprint('up')\ntime.sleep(60)"})
    assert info["running"] and info["command"][:2] == ["python3", "-c"]
    await supervisor.shows(info["id"], "up")
    await supervisor.ask("DELETE", f"/commands/{info['id']}")
    info = await supervisor.ask("POST", "/python", {"code": "print(input())", "interactive": True})
    await supervisor.ask("POST", f"/commands/{info['id']}/stdin", b"fed\n", close=1)
    assert (await supervisor.result(info["id"]))["stdout"] == "fed\n"


async def test_long_code_is_shown_short(supervisor: Supervisor) -> None:
    code = "x = 1\n" * 100_000 + "print(x)"
    result = await run(supervisor, code)
    assert result["stdout"] == "1\n"
    assert len((await supervisor.info(result["id"]))["command"][2]) == MOST_SHOWN + 1


async def test_execute(box: Box) -> None:
    body = {"language": "python", "code": "open('made', 'w'); print(2)", "timeout": 10}
    answer = await box.supervisor.ask("POST", "/execute", body)
    assert answer.pop("execution_time_ms") > 0
    assert (answer["output"], answer["exit_code"], answer["files_produced"]) == ("2\n", 0, ["made"])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "code"),
        ({"code": 1}, "code"),
        ({"code": "1", "env": "../x"}, "env"),
        ({"code": "1", "env": 3}, "env"),
        ({"code": "1", "env": "missing"}, "env"),
        ({"code": "1", "args": "x"}, "args"),
        ({"code": "1", "cwd": ".."}, "cwd"),
        ({"code": "1", "timeout": -1}, "timeout"),
        ({"code": "1", "variables": {"a=": "1"}}, "env"),
        ({"code": "1", "files": []}, "files"),
    ],
)
async def test_refusals(supervisor: Supervisor, body: dict[str, object], field: str) -> None:
    for _ in range(3):
        assert (await supervisor.refused("POST", "/python", body, wait=1))["field"] == field
    assert (await run(supervisor, "print('next')"))["stdout"] == "next\n"


async def test_packages_that_are_not_there(supervisor: Supervisor) -> None:
    for env in (None, 3, "../x", "missing"):
        problem = await supervisor.refused("PUT", "/python/packages", {"env": env, "imports": ["os"]})
        assert problem["field"] == "env"
    assert (await run(supervisor, "import os; print('CARREL_ENV' in os.environ)"))["stdout"] == "False\n"


async def test_nothing_starts_before_the_first_call(box: Box) -> None:
    await box.supervisor.run("true")
    assert box.count("/usr/bin/python3") == 0
    await run(box.supervisor, "1")
    assert box.count("/usr/bin/python3") >= 2
    health = await box.supervisor.ask("GET", "/health")
    while health["state"] == "busy":  # a process of the call may be ending
        health = await box.supervisor.ask("GET", "/health")
    assert (health["state"], health["commands_running"]) == ("idle", 0)
    direct = await box.supervisor.run("echo direct")
    assert direct["stdout"] == "direct\n"


async def test_a_second_call_of_an_id_changes_no_file(supervisor: Supervisor) -> None:
    def given(text: str) -> dict[str, str]:
        return {"data": base64.b64encode(text.encode()).decode()}

    code = "print(open('data').read()); open('data', 'w').write('changed')"
    assert (await run(supervisor, code, id="k1234567", files=given("first")))["stdout"] == "first\n"
    for wait in (0, 1):
        again = {"code": code, "id": "k1234567", "files": given("second")}
        assert (await supervisor.refused("POST", "/python", again, wait=wait))["code"] == "already_exists"
    assert (await run(supervisor, "print(open('data').read())"))["stdout"] == "changed\n"
