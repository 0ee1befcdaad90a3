"""Commands through the supervisor's socket, in sandboxes of every kind."""

from __future__ import annotations

import asyncio
import base64

import pytest
from tests.support.sandboxes import Box, Supervisor, until


async def test_runs_to_completion(supervisor: Supervisor) -> None:
    result = await supervisor.run("echo out; echo err >&2; exit 3")
    assert result.pop("duration_ms") > 0
    assert result == {
        "id": "c1",
        "stdout": "out\n",
        "stderr": "err\n",
        "exit_code": 3,
        "signal": None,
        "timed_out": False,
        "truncated": False,
        "dropped_bytes": 0,
    }


async def test_binary_output(supervisor: Supervisor) -> None:
    result = await supervisor.run(r"printf '\377\000x'; printf '\376' >&2")
    assert base64.b64decode(result["stdout_base64"]) == b"\xff\0x"
    assert base64.b64decode(result["stderr_base64"]) == b"\xfe"


async def test_a_command_that_closes_its_output_runs_on_until_it_ends(supervisor: Supervisor) -> None:
    await supervisor.run("mkfifo go")
    started = await supervisor.ask("POST", "/commands", {"command": "exec >&- 2>&-; read line <go; exit 5"})
    assert started["running"]
    ended = await supervisor.run(["true"])  # beside it: the first has closed its output by now, or soon
    assert ended["exit_code"] == 0
    assert (await supervisor.ask("GET", f"/commands/{started['id']}"))["running"]
    await supervisor.run("echo >go")
    result = await supervisor.ask("GET", f"/commands/{started['id']}/result")
    assert result["exit_code"] == 5


async def test_processes_left_behind_do_not_get_lost_between_commands(supervisor: Supervisor) -> None:
    for _ in range(3):  # each ends without children, with one, and kills it
        assert (await supervisor.run("true"))["exit_code"] == 0
        left = await supervisor.ask("POST", "/commands", {"command": "setsid sleep 1000 >/dev/null 2>&1 & true"})
        await supervisor.ask("GET", f"/commands/{left['id']}/result")
        assert (await supervisor.ask("GET", "/health"))["state"] == "busy"
        await supervisor.ask("DELETE", f"/commands/{left['id']}")

        async def idle() -> bool:
            return bool((await supervisor.ask("GET", "/health"))["state"] == "idle")

        await until(idle)


async def test_exit_by_signal(supervisor: Supervisor) -> None:
    result = await supervisor.run("kill -9 $$")
    assert (result["exit_code"], result["signal"]) == (None, "SIGKILL")


async def test_environment_and_directory(box: Box) -> None:
    supervisor = box.supervisor
    (box.workspace / "sub").mkdir(mode=0o777)
    result = await supervisor.run("echo $A:$HOME:$WORKSPACE; pwd", env={"A": "é b"}, cwd="sub")
    place = "/workspace" if box.isolated() else str(box.workspace)
    home = "/home/agent" if box.isolated() else place
    assert result["stdout"] == f"é b:{home}:{place}\n{place}/sub\n"


@pytest.mark.parametrize("cwd", ["..", "/etc", "sub/../..", "link"])
async def test_directory_outside_is_refused(box: Box, cwd: str) -> None:
    (box.workspace / "sub").mkdir()
    (box.workspace / "link").symlink_to("/etc")
    problem = await box.supervisor.refused("POST", "/commands", {"command": "pwd", "cwd": cwd}, wait=1)
    assert problem["code"] == "invalid_path"
    assert (await box.supervisor.ask("GET", "/commands"))["items"] == []


async def test_lists_are_not_interpreted(supervisor: Supervisor) -> None:
    result = await supervisor.run(["printf", "%s|", "$HOME", "a b", "*", ""])
    assert result["stdout"] == "$HOME|a b|*||"


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("command", "code"), [(["no-such-program"], 127), (["./missing"], 127), (["/etc/passwd"], 126), (["/"], 126)]
)
async def test_what_cannot_run_is_a_result(supervisor: Supervisor, command: list[str], code: int, beside: bool) -> None:
    if beside:
        await supervisor.start("sleep 60")
    result = await supervisor.run(command)
    assert result["exit_code"] == code
    assert result["stderr"].startswith(f"carrel: {command[0]}: ")
    assert (await supervisor.run("echo on"))["stdout"] == "on\n"


async def test_stdin_text(supervisor: Supervisor) -> None:
    text = "first\n" + "é" * 200_000
    result = await supervisor.run("cat", stdin=text)
    assert result["stdout"] == text
    assert (await supervisor.run("cat"))["stdout"] == ""


async def test_background_with_reattachment(box: Box) -> None:
    supervisor = box.supervisor
    name = await supervisor.start("printf 0123; while ! [ -e go ]; do sleep 0.01; done; printf 456789")
    await supervisor.shows(name, "0123")
    first = [frame async for frame in supervisor.frames(name, offset=2, follow=0)]
    assert first[0] == (1, b"23")
    assert first[-1][0] == 0
    assert b'"running": true' in first[-1][1].replace(b'":t', b'": t')

    async def follow(offset: int) -> bytes:
        return b"".join([data async for kind, data in supervisor.frames(name, offset=offset) if kind])

    followers = [asyncio.create_task(follow(2)), asyncio.create_task(follow(4)), asyncio.create_task(follow(0))]
    await supervisor.ask("GET", "/health")
    (box.workspace / "go").touch()
    assert await asyncio.gather(*followers) == [b"23456789", b"456789", b"0123456789"]
    assert (await supervisor.result(name))["stdout"] == "0123456789"
    assert await follow(100) == b""


async def test_a_follower_that_goes_away_does_no_harm(supervisor: Supervisor) -> None:
    name = await supervisor.start("while :; do echo x; sleep 0.01; done")
    async with supervisor.http.stream("GET", f"/commands/{name}/output", params={"follow": 1}) as answer:
        async for _ in answer.aiter_raw():
            break
    assert (await supervisor.info(name))["running"]
    assert (await supervisor.run("echo on"))["stdout"] == "on\n"


async def test_output_cap(supervisor: Supervisor) -> None:
    result = await supervisor.run("head -c 100000 /dev/zero | tr '\\0' a", output_limit=1000)
    assert (result["stdout"], result["truncated"], result["dropped_bytes"]) == ("a" * 1000, True, 99000)
    nothing = await supervisor.run("echo hello", output_limit=0)
    assert (nothing["stdout"], nothing["dropped_bytes"]) == ("", 6)


async def test_endless_output_is_bounded_and_the_sandbox_answers(supervisor: Supervisor) -> None:
    name = await supervisor.start("cat /dev/zero | tr '\\0' x", output_limit=100_000)

    async def flooded() -> bool:
        return bool((await supervisor.info(name))["dropped_bytes"] > 50_000_000)

    await until(flooded, 20, "a flood")
    assert (await supervisor.run("echo on"))["stdout"] == "on\n"
    info = await supervisor.info(name)
    assert (info["output_bytes"], info["running"]) == (100_000, True)


async def test_small_memory_still_remembers_commands(box: Box) -> None:
    for number in range(3):
        await box.supervisor.run(f"echo {number}")
    items = (await box.supervisor.ask("GET", "/commands"))["items"]
    assert [item["command"] for item in items] == ["echo 0", "echo 1", "echo 2"]


async def test_concurrency_has_a_limit(supervisor: Supervisor) -> None:
    names = await asyncio.gather(*(supervisor.start("read x; echo $x", interactive=True) for _ in range(64)))
    assert (await supervisor.ask("GET", "/health"))["commands_running"] == 64
    assert (await supervisor.refused("POST", "/commands", {"command": "true"}))["code"] == "limit_exceeded"
    await asyncio.gather(*(supervisor.ask("POST", f"/commands/{name}/stdin", f"{name}\n".encode()) for name in names))
    results = await asyncio.gather(*(supervisor.result(name) for name in names))
    assert [result["stdout"] for result in results] == [f"{name}\n" for name in names]
    assert (await supervisor.ask("GET", "/health"))["state"] == "idle"


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", ["INT", "SIGTERM", "kill", "9"])
async def test_signals(supervisor: Supervisor, name: str, beside: bool) -> None:
    other = await supervisor.start("sleep 60") if beside else None
    victim = await supervisor.start(["sleep", "60"])
    await supervisor.ask("POST", f"/commands/{victim}/signal", {"signal": name})
    expected = {"INT": "SIGINT", "SIGTERM": "SIGTERM"}.get(name, "SIGKILL")
    assert (await supervisor.result(victim))["signal"] == expected
    assert (await supervisor.refused("POST", f"/commands/{victim}/signal", {}))["code"] == "not_running"
    if other:
        assert (await supervisor.info(other))["running"]


@pytest.mark.parametrize("name", ["NOPE", "", "0", "65", "-9", "²"])
async def test_unknown_signals_are_refused(supervisor: Supervisor, name: str) -> None:
    victim = await supervisor.start("sleep 60")
    problem = await supervisor.refused("POST", f"/commands/{victim}/signal", {"signal": name})
    assert (problem["code"], problem["field"]) == ("invalid_request", "signal")


async def test_a_tree_signal_reaches_other_sessions(supervisor: Supervisor) -> None:
    script = "trap 'echo outer; exit 0' USR1; setsid sh -c 'trap \"echo inner; exit\" USR1; echo up; while :; do sleep 0.05; done' & echo up; while :; do sleep 0.05; done"
    other = await supervisor.start("trap 'echo hit' USR1; while :; do sleep 0.05; done")
    name = await supervisor.start(script)
    await supervisor.shows(name, "up\nup\n")
    await supervisor.ask("POST", f"/commands/{name}/signal", {"signal": "USR1", "tree": True})
    await supervisor.shows(name, "inner")
    assert "outer" in await supervisor.shows(name, "outer")
    assert await supervisor.text(other) == ""


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"command": ""},
        {"command": []},
        {"command": ["a", 1]},
        {"command": "a\0b"},
        {"command": "\ud800"},
        {"command": ["echo", "\ud800"]},
        {"command": "true", "env": {"A=B": "x"}},
        {"command": "true", "env": {"": "x"}},
        {"command": "true", "env": {"A": 1}},
        {"command": "true", "env": {"A": "\ud800"}},
        {"command": "true", "env": []},
        {"command": "true", "timeout": 0},
        {"command": "true", "timeout": "1"},
        {"command": "true", "timeout": float("nan")},
        {"command": "true", "stdin": 1},
        {"command": "true", "stdin": "\ud800"},
        {"command": "true", "cwd": 1},
        {"command": "true", "cwd": "\ud800"},
        {"command": "true", "output_limit": -1},
        {"command": "true", "output_limit": "1"},
        {"command": "true", "terminal": {"rows": 0}},
        {"command": "true", "terminal": "yes"},
    ],
)
async def test_malformed_orders_are_refused_and_leave_nothing(supervisor: Supervisor, bad: dict[str, object]) -> None:
    for beside in (False, True):
        if beside:
            await supervisor.start("sleep 60")
        problem = await supervisor.refused("POST", "/commands", bad, wait=1)
        assert problem["status"] == 400, problem
        assert problem["field"] in {"command", "env", "timeout", "stdin", "cwd", "path", "output_limit", "terminal"}
        assert (await supervisor.ask("GET", "/health"))["commands_running"] == int(beside)


@pytest.mark.parametrize("path", ["", "/result", "/output"])
async def test_unknown_commands(supervisor: Supervisor, path: str) -> None:
    assert (await supervisor.refused("GET", f"/commands/c9{path}"))["code"] == "not_found"


async def test_many_commands_are_forgotten_oldest_first(supervisor: Supervisor) -> None:
    for _ in range(135):
        await supervisor.run(["true"])
    names = [item["id"] for item in (await supervisor.ask("GET", "/commands"))["items"]]
    assert names[-1] == "c135"
    assert 128 <= len(names) <= 129


# terminals


async def test_a_terminal_is_one(supervisor: Supervisor) -> None:
    result = await supervisor.run("tty && stty size && test -t 2 && echo $TERM", terminal={"rows": 33, "cols": 101})
    lines = result["stdout"].splitlines()
    assert lines[0].startswith("/dev/pts/")
    assert lines[1:] == ["33 101", "xterm-256color"]


async def test_a_full_screen_editor_edits_a_file(box: Box) -> None:
    supervisor = box.supervisor
    name = await supervisor.start("exec vi -u NONE note.txt", terminal={"rows": 24, "cols": 80})
    await supervisor.shows(name, "note.txt")
    await supervisor.ask("POST", f"/commands/{name}/stdin", b"ihello from vi\x1b:wq\r")
    assert (await supervisor.result(name))["exit_code"] == 0
    assert (box.workspace / "note.txt").read_text() == "hello from vi\n"


async def test_closing_a_terminal_ends_its_processes(box: Box) -> None:
    supervisor = box.supervisor
    name = await supervisor.start("trap '' HUP TERM; sleep 1234 & sleep 1234", terminal={"rows": 24, "cols": 80})
    await until(lambda: box.count("sleep 1234") == 2, what="two sleepers")
    await supervisor.ask("DELETE", f"/commands/{name}")
    await until(lambda: box.count("sleep 1234") == 0, what="no sleeper")
    assert (await supervisor.refused("GET", f"/commands/{name}"))["code"] == "not_found"


async def test_an_id_of_the_callers_own_starts_one_command(box: Box) -> None:
    supervisor = box.supervisor
    name = await supervisor.start("echo x >> ran; cat", interactive=True, id="k-only-once")
    assert name == "k-only-once"
    for wait in (0, 1):
        again = await supervisor.refused("POST", "/commands", {"command": "echo y >> ran", "id": name}, wait=wait)
        assert again["code"] == "already_exists"
    await supervisor.ask("POST", f"/commands/{name}/stdin", b"", close=1)
    assert (await supervisor.result(name))["exit_code"] == 0
    assert (box.workspace / "ran").read_text() == "x\n"
    assert (await supervisor.run("true"))["id"].startswith("c"), "nobody can take the id of another command"
    for wrong in ("c1", "k", "k" + "x" * 64, "k/../../x", 7):
        problem = await supervisor.refused("POST", "/commands", {"command": "true", "id": wrong})
        assert (problem["code"], problem["field"]) == ("invalid_request", "id")


async def test_a_command_that_stops_its_reaper_has_a_deadline_all_the_same(supervisor: Supervisor) -> None:
    first = await supervisor.start("sleep 60")  # so that the next has a reaper of its own
    for deadline in (1, 20):  # on a machine that stood still, the short one may come before the last word
        stopped = await supervisor.run("echo said; kill -STOP $PPID; echo more", timeout=deadline)
        assert stopped["timed_out"]
        if "more" in stopped["stdout"]:
            break
    assert stopped["stdout"] == "said\nmore\n"
    assert (await supervisor.run("echo next"))["stdout"] == "next\n"
    await supervisor.ask("DELETE", f"/commands/{first}")
