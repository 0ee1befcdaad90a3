"""Hosts and interpreters that end at a bad moment, and where none can be started: who is told, and who is left alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.support.sandboxes import KINDS, Box, House, until

# A supervisor in a process of its own, so that a test can say when it hears of what.
PREPARE = """
import asyncio, ctypes, os, signal, sys, time
from carrel.supervisor.app import Supervisor
from carrel.supervisor.command import exit_of
from carrel.supervisor.reaper import kill_below, processes

class SandboxFacts:
    isolated, memory_mb, proxy_port, refusing, trust, secrets_fd, listener = False, 256, None, None, False, -1, None
    workspace = home = sys.argv[1]
    env, own_path, image = {}, "", None
    oom_score_fd = os.open("/dev/null", os.O_WRONLY)

async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)

async def cell(context, code):
    asked = context.ask(code, ["png"], 20.0, 100_000)
    async with asyncio.timeout(30):
        await asyncio.shield(asked.finished)
    return asked

def retire():
    interpreters = supervisor.python.interpreters
    (interpreter,) = interpreters._by_python.values()
    interpreters.retire(interpreter.python)
    return interpreter

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
loop = asyncio.SelectorEventLoop()
supervisor = Supervisor()
supervisor.commands.watch(loop)
supervisor.configure(loop, SandboxFacts())
"""

FINISH = """
try:
    loop.run_until_complete(main())
finally:
    until = time.monotonic() + 20
    while kill_below(os.getpid()) and time.monotonic() < until:
        time.sleep(0.005)
"""


def alone(workspace: Path, body: str) -> None:
    """Run `main` beside a supervisor."""
    script = PREPARE + textwrap.dedent(body) + FINISH
    done = subprocess.run(
        [sys.executable, "-c", script, str(workspace)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_gets_ready_when_its_interpreter_was_retired_is_ended(tmp_path: Path) -> None:
    alone(
        tmp_path,
        """
        async def main():
            for _ in range(5):
                call = await supervisor.python.start({"code": "1"})
                await call.finished
                (interpreter,) = supervisor.python.interpreters._by_python.values()
                while not any(each.pid and not each.spare for each in interpreter.hosts):  # too quick, the last time
                    others = set(interpreter.hosts)
                    interpreter.request_host()
                    await until(lambda: any(each.pid for each in interpreter.hosts - others))
                assert retire() is interpreter
                await until(lambda: not interpreter.hosts)
        """,
    )


def test_a_context_hears_of_the_end_of_its_host_whoever_waited_for_it(tmp_path: Path) -> None:
    alone(
        tmp_path,
        """
        async def main():
            context = supervisor.contexts._of("a", {})
            await cell(context, "x = 1")
            host = context._host
            retire()
            await until(lambda: processes().get(host.pid) == os.getpid())
            os.kill(host.pid, signal.SIGKILL)
            while host.pid in processes():
                pass
            supervisor.commands._reap()  # as when another process has ended too
            assert context.info()["state"] == "dead"
            lost = await cell(context, "x")
            assert lost.error["name"] == "NameError" and lost.fresh
            died = await cell(context, "import os; os._exit(3)")
            assert exit_of(died.wait_status) == (3, None)
            async with asyncio.timeout(30):
                await context.close()
        """,
    )


def test_the_end_of_the_host_before_is_not_that_of_the_next(tmp_path: Path) -> None:
    alone(
        tmp_path,
        """
        # Leaves what needs a moment to be gone, so that the host has something to wait for.
        DIE = '''
        import os
        if os.fork() == 0:
            held = bytearray(os.urandom(1 << 20)) * 128
            open('ready', 'w').close()
            signal.pause()
        while not os.path.exists('ready'): pass
        os._exit(1)
        '''

        async def main():
            context = supervisor.contexts._of("a", {})
            for _ in range(20):
                await (await supervisor.python.start({"code": "1"})).finished
                (interpreter,) = supervisor.python.interpreters._by_python.values()
                await cell(context, "import signal")
                await until(lambda: interpreter._ready)
                before = context._host
                assert (await cell(context, DIE)).status == "died"
                asked = context.ask("x = 5; x", ["png"], 20.0, 100_000)
                await until(lambda: context._host is not None)
                if before in context._ending:  # else it was too quick
                    break
                await asked.finished
                os.unlink(SandboxFacts.workspace + "/ready")
            os.kill(before.pid, signal.SIGKILL)
            await until(lambda: before not in context._ending)
            async with asyncio.timeout(30):
                await asyncio.shield(asked.finished)
            assert asked.status == "ok", asked.result("a")
            assert (await cell(context, "x")).status == "ok"
        """,
    )


async def run(box: Box, code: str) -> dict[str, Any]:
    return dict(await box.supervisor.ask("POST", "/python", {"code": code, "timeout": 20}, wait=1))


async def test_a_command_goes_on_when_a_call_kills_what_is_above_itself(box: Box) -> None:
    supervisor = box.supervisor
    other = await supervisor.start("sleep 8888 & setsid sleep 8888 & exec sleep 8888")
    await until(lambda: box.count("sleep 8888") == 3)
    leave = "import os, subprocess, time; subprocess.Popen(['setsid', 'sleep', '7777'])"
    ended = await run(box, f"{leave}; os.kill(os.getppid(), 9); time.sleep(60)")
    assert ended["signal"] == "SIGKILL"
    await until(lambda: box.count("sleep 7777") == 0)
    assert (await run(box, "print('next')"))["stdout"] == "next\n"
    assert (await supervisor.info(other))["running"] and box.count("sleep 8888") == 3


FULL = """
import os, time
children = []
while not os.path.exists('enough'):
    try:
        if (pid := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        children.append(pid)
    except OSError:
        open('full', 'w').close()
for pid in children: os.kill(pid, 9)
"""


@pytest.mark.skipif("namespace" not in KINDS, reason="needs a limit on processes")
async def test_the_first_call_waits_for_a_process_too(houses: dict[str, House]) -> None:
    house = House("namespace", houses["namespace"].directory)
    try:
        async with house.box(processes=24, memory_mb=512) as box:
            supervisor = box.supervisor
            await supervisor.start(["/usr/bin/python3", "-c", FULL])
            await until((box.workspace / "full").exists)
            calls = [asyncio.create_task(run(box, f"print({number})")) for number in range(3)]
            for _ in range(5):
                await supervisor.ask("GET", "/health")
            assert not any(call.done() for call in calls)
            (box.workspace / "enough").touch()
            assert [each["stdout"] for each in await asyncio.gather(*calls)] == ["0\n", "1\n", "2\n"]
    finally:
        await house.provider.close()
