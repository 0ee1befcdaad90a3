"""MCP servers that do not behave: what they print, hold on to or leave behind harms nobody else."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from tests.support.leaks import below
from tests.support.mcp_ground import ECHO, READS, WAITING, connected, declare, ends, log, python, state
from tests.support.sandboxes import KINDS, Box, House, Supervisor, status, until

from carrel.supervisor.mcp_lines import MOST_OTHER_LINES, NO_MESSAGE, NO_TEXT, TOO_LONG
from carrel.supervisor.mcp_process import CLOSED_OUTPUT

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{}')
while True: time.sleep(60)
"""
FAMILY = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "4321"])
    os._exit(0)
os.spawnvp(os.P_NOWAIT, "sleep", ["sleep", "4321"])
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os\nos.write(1, b'{\"a\":\"')\nwhile True: os.write(1, b'x' * 65536)", TOO_LONG),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", NO_MESSAGE),
        ("import os\nwhile True: os.write(1, b'\\n ' * 32768)", NO_MESSAGE),
        ("while True: print('INFO starting')", NO_MESSAGE),
        ('import os, time\nos.write(1, b\'{}\\n{"a": "\\xff"}\\n\')\nwhile True: time.sleep(60)', NO_TEXT),
        ("import os, time\nos.close(1)\nwhile True: time.sleep(60)", CLOSED_OUTPUT),
    ],
    ids=["endless line", "endless garbage", "endless blanks", "a log", "no UTF-8", "closed output"],
)
async def test_what_is_no_protocol_ends_the_server(box: Box, code: str, reason: str) -> None:
    before = _memory(box)
    end = await ends(box.supervisor, code)
    assert (end["reason"], end["signal"], end["exit_code"]) == (reason, "SIGKILL", None)
    told = await state(box.supervisor)
    assert told["state"] in WAITING
    assert told["reason"] == reason
    assert _memory(box) - before < 48 * 1024  # not what was printed, and not for long
    assert _servers(box) == 0
    assert (await box.supervisor.run("echo on"))["stdout"] == "on\n"


def _servers(box: Box) -> int:
    """How many processes were started by `python`."""
    return sum(" -u -c " in line for line in below(box.pid).values())


def _memory(box: Box) -> int:
    """What the supervisor holds, in KB."""
    return int(status(box.pid)["VmRSS"].split()[0])


async def test_a_flood_nobody_reads_is_not_read(box: Box) -> None:
    code = """
    import os
    line, count = b'{"a": "' + b"x" * 1000 + b'"}\\n', os.open("count", os.O_CREAT | os.O_WRONLY)
    for number in range(100_000):
        os.write(1, line)
        os.pwrite(count, b"%6d" % number, 0)
    """
    await declare(box.supervisor, python(code))
    before = _memory(box)
    async with connected(box.supervisor) as link:
        counts = [-1]

        def blocked() -> bool:
            if (box.workspace / "count").exists():
                counts.append(int((box.workspace / "count").read_text() or 0))
            return len(counts) > 20 and counts[-20] == counts[-1]

        await until(blocked, what="a server that cannot write")
        assert counts[-1] < 5000
        assert _memory(box) - before < 8 * 1024
        assert (await box.supervisor.run("echo on"))["stdout"] == "on\n"
        for _ in range(10_000):
            assert len((await link.message())["a"]) == 1000
    assert (await state(box.supervisor))["state"] == "running"


async def test_some_words_are_no_harm(supervisor: Supervisor) -> None:
    code = f"print('welcome')\nfor n in range({MOST_OTHER_LINES - 1}): print(n)\nprint('{{\"a\": 1}}'); print(); print('{{not closed'); print('  {{\"b\": 2}}  ')"
    await declare(supervisor, python(code))
    async with connected(supervisor) as link:
        assert [await link.message(), await link.message()] == [{"a": 1}, {"b": 2}]
        assert (await link.end())["exit_code"] == 0
    words = await log(supervisor)
    assert "stdout: welcome\nstdout: 0\nstdout: 1\n" in words
    assert "stdout: {not closed\n" in words


async def test_half_a_line_is_no_message(supervisor: Supervisor) -> None:
    end = await ends(supervisor, "import os\nos.write(1, b'{}\\n{\"half\": ')\nos.kill(os.getpid(), 11)")
    assert (end["signal"], end["reason"]) == ("SIGSEGV", "was ended by SIGSEGV")
    assert 'stdout: {"half":' in await log(supervisor)


async def test_what_was_said_before_a_breach_arrives(supervisor: Supervisor) -> None:
    await declare(supervisor, python('import os\nos.write(1, b\'{"a": 1}\\n{"b": 2}\\n{"\\xff"}\\n\')\ninput()'))
    async with connected(supervisor) as link:
        assert [await link.message(), await link.message()] == [{"a": 1}, {"b": 2}]
        assert (await link.end())["reason"] == NO_TEXT


async def test_a_server_that_never_answers_can_be_stopped(supervisor: Supervisor) -> None:
    await declare(supervisor, python(f"import sys\n{READS}"))
    async with connected(supervisor) as link:
        await link.send({})
        told = await supervisor.ask("POST", "/mcp/s/stop")
        assert told["state"] == "stopped"
        assert told["last_exit"] in ({"exit_code": 0, "signal": None}, {"exit_code": None, "signal": "SIGTERM"})
        assert (await link.end())["reason"] == "was stopped"
    async with connected(supervisor) as link:
        assert (await state(supervisor))["restarts"] == 0


async def test_a_server_that_ignores_sigterm(box: Box) -> None:
    await declare(box.supervisor, python(STUBBORN))
    async with connected(box.supervisor) as link:
        await link.message()
        told = await box.supervisor.ask("POST", "/mcp/s/stop")
        assert (told["state"], told["last_exit"]) == ("stopped", {"exit_code": None, "signal": "SIGKILL"})
        assert (await link.end())["signal"] == "SIGKILL"
    assert _servers(box) == 0


@pytest.mark.parametrize("way", ["stop", "delete", "declare", "exit", "kill", "breach"])
async def test_descendants_end_with_it(box: Box, way: str) -> None:
    supervisor = box.supervisor
    other = await supervisor.start(["sleep", "1234"])
    await declare(supervisor, python(FAMILY + ECHO))
    async with connected(supervisor) as link:
        await until(lambda: box.count("sleep 4321") == 2, what="two descendants")
        if way == "stop":
            await supervisor.ask("POST", "/mcp/s/stop")
        elif way == "delete":
            await supervisor.ask("DELETE", "/mcp/s")
        elif way == "declare":
            await declare(supervisor, ["true"], generation="2")
        elif way == "exit":
            await link.send({"exit": 3})
        elif way == "kill":
            await supervisor.run(f"kill -9 {link.pid}")
        else:
            await link.send({"say": "x" * 2_000_000})
        await link.end()
        assert box.count("sleep 4321") == 0
    assert (await supervisor.info(other))["running"]


async def test_others_are_unaffected(box: Box) -> None:
    """One that behaves answers as ever beside those that do not; so do commands."""
    flood = "import os\nwhile True: os.write({}, b'{{}}' * 10000 + b'\\n')"
    hostile = {
        "flood": flood.format(1),
        "log": flood.format(2),
        "stubborn": STUBBORN,
        "family": FAMILY + STUBBORN,
        "deaf": "print('{}')\nwhile True: __import__('time').sleep(60)",
    }
    await declare(box.supervisor, python(ECHO))
    async with AsyncExitStack() as links, connected(box.supervisor) as good:
        for name, code in hostile.items():
            await declare(box.supervisor, python(code), name)
            await links.enter_async_context(connected(box.supervisor, name))
        await until(lambda: box.count("sleep 4321") == 2, what="two descendants")
        for number in range(50):
            assert await good.ask({"n": number}) == {"echo": {"n": number}, "pid": good.pid}
            assert (await box.supervisor.run(f"echo {number}"))["stdout"] == f"{number}\n"
        states = {each["name"]: each["state"] for each in (await box.supervisor.ask("GET", "/mcp"))["items"]}
        assert states == dict.fromkeys(["s", *hostile], "running")
        assert (await box.supervisor.ask("GET", "/mcp/log/log", limit=1000))["dropped"] > 0
    await asyncio.gather(*(box.supervisor.ask("DELETE", f"/mcp/{name}") for name in hostile))
    assert _servers(box) == 1
    async with connected(box.supervisor) as good:
        assert (await good.ask({}))["pid"] == good.pid


@pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")
async def test_one_that_forks_without_end(houses: dict[str, House]) -> None:
    house = House("namespace", houses["namespace"].directory)
    async with house.box(processes=64) as box:
        bomb = "import os\nprint('{}')\nwhile True:\n    try: os.fork()\n    except OSError: pass"
        await declare(box.supervisor, python(bomb))
        async with connected(box.supervisor) as link:
            await link.message()
            await until(lambda: _servers(box) > 40, what="many processes")
            assert (await box.supervisor.ask("POST", "/mcp/s/stop"))["state"] == "stopped"
            assert (await link.end())["reason"] == "was stopped"
        assert _servers(box) == 0
        assert (await box.supervisor.run("echo on"))["stdout"] == "on\n"
    await house.provider.close()


async def test_all_end_with_the_sandbox(box: Box) -> None:
    await declare(box.supervisor, python(FAMILY + STUBBORN))
    async with connected(box.supervisor) as link:
        await link.message()
        await until(lambda: box.count("sleep 4321") == 2, what="two descendants")
    # The sandbox is removed now, and the leak watch looks for what is left.


async def test_a_stopped_reaper_does_not_hold_it_up(box: Box) -> None:
    """An agent's process may stop or kill the reaper that its own user has."""
    await declare(box.supervisor, python(ECHO))
    async with connected(box.supervisor) as link:
        await box.supervisor.run(f"kill -STOP $(awk '/PPid/ {{print $2}}' /proc/{link.pid}/status)")
        await box.supervisor.ask("POST", "/mcp/s/stop")
        await link.end()
    async with connected(box.supervisor) as link:
        await box.supervisor.run(f"kill -KILL $(awk '/PPid/ {{print $2}}' /proc/{link.pid}/status)")
        assert (await link.end())["signal"] == "SIGKILL"
    await until(lambda: _servers(box) == 0, what="no server")
    assert (await box.supervisor.run("echo on"))["stdout"] == "on\n"
