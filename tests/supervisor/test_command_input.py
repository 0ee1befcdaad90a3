"""What goes into commands while they run, through the supervisor's socket."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.sandboxes import Box, Supervisor


async def test_interactive_stdin(supervisor: Supervisor) -> None:
    name = await supervisor.start("read a; echo got $a; cat; echo end", interactive=True)
    await supervisor.ask("POST", f"/commands/{name}/stdin", b"one\n")
    await supervisor.shows(name, "got one")
    await supervisor.ask("POST", f"/commands/{name}/stdin", b"two\n", close=1)
    assert (await supervisor.result(name))["stdout"] == "got one\ntwo\nend\n"
    assert (await supervisor.refused("POST", f"/commands/{name}/stdin", b"x"))["code"] == "not_running"


async def test_writers_that_wait_all_arrive(box: Box) -> None:
    supervisor = box.supervisor
    name = await supervisor.start("while ! [ -e go ]; do sleep 0.01; done; cat | wc -c", interactive=True)
    writers = [asyncio.create_task(supervisor.ask("POST", f"/commands/{name}/stdin", b"x" * 300_000)) for _ in range(3)]
    await supervisor.ask("GET", "/health")
    (box.workspace / "go").touch()
    await asyncio.gather(*writers)
    await supervisor.ask("POST", f"/commands/{name}/stdin", b"", close=1)
    assert int((await supervisor.result(name))["stdout"]) == 900_000


async def test_a_writer_is_told_when_the_program_ends(supervisor: Supervisor) -> None:
    name = await supervisor.start("sleep 0.2", interactive=True)
    problem = await supervisor.refused("POST", f"/commands/{name}/stdin", b"x" * 1_000_000)
    assert problem["code"] == "not_running"
    results = [await supervisor.run("echo on") for _ in range(3)]
    assert [result["stdout"] for result in results] == ["on\n"] * 3


async def test_input_of_a_terminal_is_typed_and_ended(supervisor: Supervisor) -> None:
    size = {"rows": 24, "cols": 80}
    lines = "".join(f"{number:05}\n" for number in range(20_000))  # more than a terminal holds
    result = await supervisor.run("stty -echo; wc -l", terminal=size, stdin=lines)
    assert result["exit_code"] == 0 and result["stdout"].endswith("20000\r\n")
    assert (await supervisor.run("stty -echo; cat", terminal=size, stdin="no end"))["stdout"].endswith("no end")
    assert (await supervisor.run("cat", terminal=size, stdin=""))["exit_code"] == 0
    unread = await supervisor.run("true", terminal=size, stdin="x\n" * 100_000)
    assert unread["exit_code"] == 0


async def test_stdin_of_a_command_without_one_is_refused(supervisor: Supervisor) -> None:
    name = await supervisor.start("sleep 60")
    assert (await supervisor.refused("POST", f"/commands/{name}/stdin", b"x"))["code"] == "not_running"


@pytest.mark.parametrize("beside", [False, True])
async def test_resizing_tells_the_program(supervisor: Supervisor, beside: bool) -> None:
    if beside:
        await supervisor.start("sleep 60")
    script = "trap 'stty size' WINCH; echo up; while :; do sleep 0.02; done"
    name = await supervisor.start(script, terminal={"rows": 24, "cols": 80})
    await supervisor.shows(name, "up")
    await supervisor.ask("POST", f"/commands/{name}/resize", {"rows": 50, "cols": 132})
    await supervisor.shows(name, "50 132")
    await supervisor.ask("POST", f"/commands/{name}/stdin", b"\x03")
    assert (await supervisor.result(name))["signal"] == "SIGINT"
    assert (await supervisor.refused("POST", f"/commands/{name}/resize", {}))["code"] == "not_running"


async def test_only_terminals_have_a_size(supervisor: Supervisor) -> None:
    name = await supervisor.start("sleep 60")
    problem = await supervisor.refused("POST", f"/commands/{name}/resize", {"rows": 1, "cols": 1})
    assert problem["code"] == "invalid_request"
