"""A sandbox that is made as new between two calls: what a call can leave behind, and what is left of it."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.sandboxes import KINDS, Box, House, until

pytestmark = pytest.mark.skipif("namespace" not in KINDS, reason="only what is isolated can be emptied")

SEEN = """
import ctypes, json, os, subprocess
home = os.path.expanduser('~')
seen = {}
for top in ('/workspace', '/tmp', '/var/tmp', '/dev/shm', home):
    for place, dirs, files in os.walk(top):
        for name in ['.', *dirs, *files]:
            path = os.path.join(place, name)
            info = os.lstat(path)
            seen[path] = [info.st_mode, info.st_mtime_ns, os.listxattr(path, follow_symlinks=False)]
for kind in ('shm', 'msg', 'sem'):
    seen[kind] = len(open('/proc/sysvipc/' + kind).readlines())
print(json.dumps(seen))
"""


async def call(box: Box, code: str, **more: object) -> dict[str, Any]:
    return dict(await box.supervisor.ask("POST", "/python", {"code": code, "timeout": 20, **more}, wait=1))


async def empty(box: Box) -> dict[str, Any]:
    return dict(await box.supervisor.ask("POST", "/empty"))


async def seen(box: Box) -> Any:
    done = await call(box, SEEN)
    assert done["exit_code"] == 0, done
    return json.loads(done["stdout"])


@pytest.fixture
async def emptied(houses: dict[str, House]) -> AsyncIterator[Box]:
    """A new sandbox that knows what it has."""
    house = House("namespace", houses["namespace"].directory)
    async with house.box(processes=128, memory_mb=512) as box:
        (box.workspace / "scripts").mkdir()
        (box.workspace / "scripts/known").write_text("1")
        for path in (box.workspace / "scripts", box.workspace / "scripts/known"):
            owner = box.workspace.stat()
            os.chown(path, owner.st_uid, owner.st_gid)
        assert (await empty(box))["clean"]
        yield box
    await house.provider.close()


LEAVE = {
    "files": "\n".join(
        f"os.makedirs('{place}/a/b/c'); open('{place}/a/b/f', 'w').write('x' * 5000); os.symlink('/', '{place}/link')"
        for place in ("/workspace", "/tmp", "/dev/shm", "/home/agent")
    )
    + "\nos.mkdir('/var/tmp/more'); os.mkfifo('/tmp/pipe'); os.chmod('/workspace/a', 0)",
    "packages": "os.makedirs(os.path.expanduser('~/.local/lib/python3.11/site-packages'))\n"
    "open(os.path.expanduser('~/.local/lib/python3.11/site-packages/x.pth'), 'w').write('import os; os._exit(9)')\n"
    "os.makedirs('.venv/bin'); open('.venv/bin/python', 'w').write('#!/bin/false'); os.chmod('.venv/bin/python', 0o755)",
    "a process": "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)",
    "a daemon": "import subprocess; subprocess.Popen('(setsid sleep 1001 &) & exit 0', shell=True).wait()",
    "a sleeper that ignores": "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
    "if os.fork() == 0:\n    os.setsid()\n    while True: time.sleep(1)",
    "attributes": "os.setxattr('/workspace', 'user.a', b'b'); os.chmod('/workspace', 0o700); os.utime('/tmp', (1, 1))",
    "modes": "os.chmod('/workspace', 0); os.chmod('/tmp', 0); os.chmod(os.path.expanduser('~'), 0)",
    "shared memory": "import ctypes\nc = ctypes.CDLL(None)\n"
    "assert c.shmget(7, 4096, 0o1600) >= 0 and c.msgget(7, 0o1600) >= 0 and c.semget(7, 3, 0o1600) >= 0",
    "its interpreter": "import signal\nos.kill(os.getppid(), signal.SIGKILL); time.sleep(9)",
}


@pytest.mark.parametrize("what", LEAVE)
async def test_nothing_stays(emptied: Box, what: str) -> None:
    new = await seen(emptied)
    assert (await empty(emptied))["clean"]
    left = await call(emptied, "import os, time\n" + LEAVE[what])
    assert left["exit_code"] == 0 or what == "its interpreter", left
    answer = await empty(emptied)
    assert answer["clean"], answer
    assert await seen(emptied) == new
    assert emptied.count("sleep") == 0

    async def idle() -> bool:  # the last of a call's processes may still be on its way out
        health = await emptied.supervisor.ask("GET", "/health")
        assert health["python_calls"] == 0
        return bool(health["state"] == "idle")

    await until(idle, what="an idle sandbox")


async def test_commands_and_contexts_are_gone(emptied: Box) -> None:
    started = await emptied.supervisor.start("echo secret; sleep 1002")
    await emptied.supervisor.ask(
        "POST", "/contexts/c/cells?wait=1", {"code": "import subprocess as s; s.Popen(['sleep', '1003'])"}
    )
    await emptied.supervisor.ask("POST", "/contexts/c/cells", {"code": "while True: pass"})
    assert (await empty(emptied))["clean"] and emptied.count("sleep") == 0
    assert (await emptied.supervisor.refused("GET", f"/commands/{started}/output"))["status"] == 404
    assert (await emptied.supervisor.ask("GET", "/commands"))["items"] == []
    assert (await emptied.supervisor.ask("GET", "/contexts"))["items"] == []


async def test_no_message_queue_can_be_left(emptied: Box) -> None:
    code = "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nprint(c.mq_open(b'/q', 0o102, 0o600, None) < 0)"
    assert (await call(emptied, code))["stdout"] == "True\n"


@pytest.mark.parametrize(
    "change",
    [
        "open('scripts/known', 'a').write('2')",
        "open('scripts/known', 'w').write('1')",
        "os.chmod('scripts/known', 0o600)",
        "os.link('scripts/known', 'twin')",
        "os.unlink('scripts/known'); open('scripts/known', 'w').write('1')",
        "import shutil; shutil.rmtree('scripts'); os.mkdir('scripts')",
        "os.rename('scripts', 'other'); os.symlink('other', 'scripts')",
    ],
)
async def test_what_was_changed_is_told(emptied: Box, change: str) -> None:
    assert (await call(emptied, f"import os; {change}"))["exit_code"] == 0
    answer = await empty(emptied)
    assert not answer["clean"] and answer["reason"]


async def test_a_stopped_process_is_told(emptied: Box) -> None:
    await call(emptied, "1")
    await empty(emptied)
    code = "import os, signal\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n    if int(pid) not in (1, os.getpid(), os.getppid()): os.kill(int(pid), signal.SIGSTOP)"
    await call(emptied, code)
    assert not (await empty(emptied))["clean"]


@pytest.mark.parametrize(
    "change",
    ["os.setpriority(os.PRIO_PROCESS, pid, os.nice(0) + 1)", "resource.prlimit(pid, resource.RLIMIT_FSIZE, (9, 9))"],
)
async def test_conditions_of_the_supervisor_that_were_changed_are_told(emptied: Box, change: str) -> None:
    done = await call(emptied, f"import os, resource\npid = 1\n{change}")
    assert (await empty(emptied))["clean"] == (done["exit_code"] != 0)


async def test_too_much_is_told(emptied: Box) -> None:
    code = "import os\nfor n in range(60000):\n    open(f'/tmp/{n}', 'w').close()"
    done = await call(emptied, code)
    answer = await empty(emptied)
    assert answer["clean"] or answer["reason"] == "it took too long", (done, answer)


async def test_the_load(emptied: Box) -> None:
    before = await empty(emptied)
    await call(emptied, "open('/dev/shm/x', 'wb').write(bytes(32 << 20))")
    held = await emptied.supervisor.ask("GET", "/health")
    assert held["memory_bytes"] > before["memory_bytes"] + (16 << 20)
    after = await empty(emptied)
    assert after["clean"] and after["memory_bytes"] < held["memory_bytes"] - (
        16 << 20
    )  # interpreters come and go meanwhile


NAMES = st.sampled_from(["a", "b", "scripts", "é\udcff", ".hidden"])
ACTS = st.lists(
    st.tuples(st.sampled_from(["file", "dir", "link", "mode"]), st.lists(NAMES, min_size=1, max_size=3)), max_size=8
)
MAKE = """
import json, os, sys
for number, (what, names) in enumerate(json.loads(sys.argv[1])):
    path = os.path.join(['/workspace', '/tmp', '/dev/shm', os.path.expanduser('~')][number % 4], *names)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if what == 'file': open(path, 'x').write('x')
        if what == 'dir': os.mkdir(path)
        if what == 'link': os.symlink('/workspace/scripts', path)
        if what == 'mode': os.chmod(os.path.dirname(path), 0o100)
    except OSError:
        pass
"""


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=ACTS)
async def test_whatever_is_left(emptied: Box, acts: list[tuple[str, list[str]]]) -> None:
    """What was there keeps its mode, or the sandbox is said not to be clean; all else is gone."""
    if any(what == "mode" and names[:1] == ["scripts"] for what, names in acts):
        acts = [each for each in acts if each[0] != "mode"]
    await call(emptied, MAKE, args=[json.dumps(acts)])
    answer = await empty(emptied)
    assert answer["clean"], answer
    assert sorted(os.listdir(emptied.workspace)) == ["scripts"]
    assert os.listdir(emptied.workspace / "scripts") == ["known"]
    listed = await call(
        emptied,
        "import os; print([*os.listdir('/tmp'), *os.listdir('/dev/shm'), *os.listdir(os.path.expanduser('~'))])",
    )
    assert listed["stdout"] == "[]\n"


async def test_what_is_not_isolated_cannot_be_emptied(box: Box) -> None:
    if box.isolated():
        return
    assert (await box.supervisor.refused("POST", "/empty"))["code"] == "unsupported"
