"""When an MCP server starts, why it cannot, and how long one that keeps ending has to wait."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.mcp_ground import ECHO, WAITING, connected, declare, log, opened, python, state
from tests.support.sandboxes import KINDS, Box, Supervisor, provider, until

from carrel.providers import open_providers
from carrel.supervisor.python.calls import ENVIRONMENTS


async def test_one_that_exits_at_once_has_to_wait(supervisor: Supervisor) -> None:
    await declare(supervisor, ["sh", "-c", "echo no config >&2; exit 7"])
    starts = 0
    while True:  # each wait is twice as long: one is longer than the time until we ask again
        async with supervisor.http.stream("POST", "/mcp/s/connect") as answer:
            if answer.is_error:
                problem = json.loads(await answer.aread())
                break
            link = await opened(supervisor, "s", answer)
            end = await link.end()
            assert (end["exit_code"], end["reason"]) == (7, "ended by itself with exit code 7")
            starts += 1
    assert starts >= 1
    assert problem["code"] == "mcp_server_failed"
    assert 0 < problem["retry_in_s"] <= 60
    assert "exit code 7" in problem["detail"]
    told = await state(supervisor)
    assert told["state"] in WAITING
    assert (told["started"], told["restarts"]) == (starts, starts - 1)
    assert told["last_exit"] == {"exit_code": 7, "signal": None}
    assert (await log(supervisor)).count("no config") == starts
    assert (await until(lambda: _waited(supervisor), 70, "the wait to end"))["state"] == "failed"
    async with connected(supervisor) as link:
        await link.end()
    told = await supervisor.ask("POST", "/mcp/s/stop")
    assert (told["state"], told["retry_in_s"], told["reason"]) == ("stopped", None, None)
    async with connected(supervisor) as link:
        await link.end()
    assert (await state(supervisor))["restarts"] == starts


async def _waited(supervisor: Supervisor) -> dict[str, Any] | None:
    told = await state(supervisor)
    return None if told["retry_in_s"] else told


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["no-such-program"], 127, "command not found"),
        (["./none"], 127, "command not found"),
        (["/etc/passwd"], 126, ""),
    ],
)
async def test_what_cannot_be_started(supervisor: Supervisor, command: list[str], code: int, words: str) -> None:
    await declare(supervisor, command)
    problem = await supervisor.refused("POST", "/mcp/s/connect")
    assert (problem["code"], problem["field"]) == ("mcp_server_failed", "command")
    assert f"cannot be started: {command[0]}: {words}" in problem["detail"]
    told = await state(supervisor)
    assert told["state"] in WAITING
    assert (told["last_exit"]["exit_code"], told["started"]) == (code, 1)
    assert told["reason"] in await log(supervisor)
    await declare(supervisor, ["\udcff"], "odd")
    problem = await supervisor.refused("POST", "/mcp/odd/connect")
    assert problem["detail"] == "MCP server 'odd' cannot be started: ?: command not found"


async def test_a_directory_or_environment_that_is_not_there_yet(box: Box) -> None:
    supervisor = box.supervisor
    await declare(supervisor, python(ECHO), cwd="later")
    assert (await supervisor.refused("POST", "/mcp/s/connect"))["code"] == "file_not_found"
    told = await state(supervisor)
    assert (told["state"], told["retry_in_s"]) == ("failed", None)
    (box.workspace / "later").mkdir(mode=0o777)
    async with connected(supervisor) as link:
        await link.ask({})
    await declare(supervisor, python(ECHO), "e", environment="/envs/none")
    assert (await supervisor.refused("POST", "/mcp/e/connect"))["field"] == "environment"
    await declare(supervisor, python(ECHO), "e", generation="2", cwd="../..")
    assert (await supervisor.refused("POST", "/mcp/e/connect"))["code"] == "invalid_path"


@pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")
async def test_an_environment_comes_first() -> None:
    async with provider("namespace") as house:
        programs = house.directory / "envs" / "tools" / "bin"
        programs.mkdir(parents=True)
        (programs / "python").symlink_to("/usr/bin/python3")
        (programs / "greeter").write_text("#!/envs/tools/bin/python\nprint('{\"hello\": 1}')\n")
        (programs / "greeter").chmod(0o755)
        shared = {ENVIRONMENTS: str(house.directory / "envs")}
        run, workspaces = str(house.directory / "run"), str(house.directory / "ws")
        house.provider = open_providers(run, workspaces, allow_process=True, shared=shared)["namespace"]
        async with house.box() as box:
            await declare(box.supervisor, ["greeter"], "one", environment="/envs/tools")
            async with connected(box.supervisor, "one") as link:
                assert await link.message() == {"hello": 1}
            path = (await box.supervisor.run("printf %s $PATH"))["stdout"]
            show = "import json, os; print(json.dumps(dict(os.environ)))"
            await declare(box.supervisor, ["python", "-u", "-c", show], "two", environment="tools")
            async with connected(box.supervisor, "two") as link:
                shown = await link.message()
            assert (shown["PATH"], shown["VIRTUAL_ENV"]) == (f"/envs/tools/bin:{path}", "/envs/tools")
            await declare(box.supervisor, ["greeter"], "three", environment="tools", variables={"PATH": ""})
            assert (await box.supervisor.refused("POST", "/mcp/three/connect"))["field"] == "command"
