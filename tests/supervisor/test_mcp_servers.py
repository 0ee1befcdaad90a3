"""MCP servers through the supervisor's socket, in sandboxes of every kind. Those that do not behave are in `test_mcp_misbehaviour`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.mcp_ground import ECHO, READS, WAITING, connected, declare, log, opened, python, state
from tests.support.sandboxes import Box, Supervisor, until

from carrel.supervisor.mcp_lines import MOST_LINE
from carrel.supervisor.mcp_log import KEPT
from carrel.supervisor.mcp_process import CLOSED_INPUT, DEAF
from carrel.supervisor.mcp_servers import MOST_SERVERS


async def test_declared_and_not_started(supervisor: Supervisor) -> None:
    assert (await supervisor.ask("GET", "/mcp"))["items"] == []
    told = await declare(supervisor, python(ECHO))
    assert told == {
        "name": "s",
        "generation": "1",
        "state": "stopped",
        "pid": None,
        "connected": False,
        "incarnation": 0,
        "started": 0,
        "restarts": 0,
        "last_exit": None,
        "reason": None,
        "retry_in_s": None,
        "log_bytes": 0,
    }
    assert await state(supervisor) == told
    assert (await supervisor.ask("GET", "/mcp"))["items"] == [told]


async def test_lines_out_and_in(supervisor: Supervisor) -> None:
    await declare(supervisor, python(ECHO))
    async with connected(supervisor) as link:
        assert await link.ask({"a": "é\n"}) == {"echo": {"a": "é\n"}, "pid": link.pid}
        told = await state(supervisor)
        assert (told["state"], told["pid"], told["connected"], told["started"]) == ("running", link.pid, True, 1)
        assert told["incarnation"] == link.incarnation
        large = {"b": "x" * (MOST_LINE - 1000)}
        assert (await link.ask(large))["echo"] == large
        # It is no command: whoever waits for the sandbox to be idle does not wait for it.
        health = await supervisor.ask("GET", "/health")
        assert (health["state"], health["commands_running"]) == ("idle", 0)
        await link.send({"exit": 3})
        end = await link.end()
    assert end == {
        "incarnation": link.incarnation,
        "exit_code": 3,
        "signal": None,
        "reason": "ended by itself with exit code 3",
        "taken_over": False,
    }
    words = await log(supervisor)
    assert words.startswith(f"carrel: started, process {link.pid}, incarnation {link.incarnation}\nready\n")
    assert words.endswith("carrel: ended with exit code 3\n")


async def test_it_runs_as_a_command_does(box: Box) -> None:
    supervisor = box.supervisor
    (box.workspace / "sub").mkdir(mode=0o777)
    show = "import json, os; print(json.dumps({'env': dict(os.environ), 'ids': [os.getuid(), os.getgid()], 'cwd': os.getcwd(), 'fds': sorted(os.listdir('/proc/self/fd'))}))"
    command = await supervisor.run(["python3", "-u", "-c", show], env={"A": "é"}, cwd="sub")
    await declare(supervisor, ["python3", "-u", "-c", show], variables={"A": "é"}, cwd="sub")
    async with connected(supervisor) as link:
        shown = await link.message()
    assert shown == json.loads(command["stdout"])
    assert shown["env"]["A"] == "é"


async def test_secrets_as_variables(box: Box) -> None:
    supervisor = box.supervisor
    show = "import json, os; print(json.dumps({'key': os.environ['KEY'], 'path': os.environ['PATH']}))"
    await declare(supervisor, ["python3", "-u", "-c", show], secrets={"KEY": "token"})
    if box.kind == "process":
        problem = await supervisor.refused("POST", "/mcp/s/connect")
        assert problem["detail"] == "the secret token cannot be used: it is not there"
        return
    for value, found in (("dmFsdWUK", "value"), ("w6kKCg==", "é"), ("YQBi", None), ("/w==", None), (None, None)):
        await supervisor.ask("PUT", "/secrets", {"secrets": {} if value is None else {"token": value}})
        if found is None:
            problem = await supervisor.refused("POST", "/mcp/s/connect")
            assert "the secret token cannot be used" in problem["detail"] and problem["hint"]
            assert "the secret token cannot be used" in (await state(supervisor))["reason"]
            continue
        async with connected(supervisor) as link:
            shown = await link.message()
            assert shown["key"] == found and "/bin" in shown["path"]
        await supervisor.ask("POST", "/mcp/s/stop")
    problem = await supervisor.refused("PUT", "/mcp/t", {"command": ["x"], "generation": "1", "secrets": {"A=": "b"}})
    assert problem["code"] == "invalid_request"


async def test_the_same_generation_is_left_alone_and_another_ends_it(supervisor: Supervisor) -> None:
    await declare(supervisor, python(ECHO))
    async with connected(supervisor) as link:
        told = await declare(supervisor, ["something", "else"])
        assert (told["state"], told["incarnation"]) == ("running", link.incarnation)
        assert (await link.ask({}))["pid"] == link.pid
        told = await declare(supervisor, python("print('{\"other\": 1}', flush=True)"), generation="2")
        assert (told["state"], told["started"], told["generation"]) == ("stopped", 0, "2")
        assert (await link.end())["reason"] == "was declared again"
    async with connected(supervisor) as other:
        assert await other.message() == {"other": 1}
        assert other.incarnation > link.incarnation


async def test_another_connection_takes_over(supervisor: Supervisor) -> None:
    await declare(supervisor, python(ECHO))
    async with connected(supervisor) as first:
        await first.ask({})
        async with connected(supervisor) as second:
            assert (second.incarnation, second.pid) == (first.incarnation, first.pid)
            end = await first.end()
            assert (end["taken_over"], end["exit_code"], end["signal"]) == (True, None, None)
            assert (await second.ask({"n": 2}))["echo"] == {"n": 2}
    await until(lambda: _disconnected(supervisor), what="a connection that is gone")
    assert (await state(supervisor))["state"] == "running"
    await supervisor.ask("POST", "/mcp/s/send", b'{"n": 3}', incarnation=first.incarnation)
    async with connected(supervisor) as third:
        assert (await third.message())["echo"] == {"n": 3}


async def _disconnected(supervisor: Supervisor) -> bool:
    return not (await state(supervisor))["connected"]


async def test_many_at_once_do_not_mix(supervisor: Supervisor) -> None:
    names = [f"s{number}" for number in range(MOST_SERVERS)]
    for name in names:
        await declare(supervisor, ["sh", "-c", f'while read -r line; do echo "{{\\"{name}\\": $line}}"; done'], name)
    problem = await supervisor.refused("PUT", "/mcp/more", {"command": ["true"], "generation": "1"})
    assert problem["code"] == "limit_exceeded"

    async def talk(name: str) -> None:
        async with connected(supervisor, name) as link:
            for number in range(20):
                assert await link.ask(number) == {name: number}

    await asyncio.gather(*map(talk, names))
    assert [each["name"] for each in (await supervisor.ask("GET", "/mcp"))["items"]] == names
    await asyncio.gather(*(supervisor.ask("DELETE", f"/mcp/{name}") for name in names))
    assert (await supervisor.ask("GET", "/mcp"))["items"] == []


# sending


async def test_lines_for_another_process_are_refused(supervisor: Supervisor) -> None:
    await declare(supervisor, python(ECHO))
    assert (await supervisor.refused("POST", "/mcp/s/send", b"{}", incarnation=1))["code"] == "not_running"
    async with connected(supervisor) as link:
        for wrong in (link.incarnation + 1, 0):
            problem = await supervisor.refused("POST", "/mcp/s/send", b"{}", incarnation=wrong)
            assert (problem["code"], problem["incarnation"]) == ("conflict", link.incarnation)
        for bad in (b"", b"{}\n", b"{}\n{}"):
            problem = await supervisor.refused("POST", "/mcp/s/send", bad, incarnation=link.incarnation)
            assert (problem["code"], problem["field"]) == ("invalid_request", "body")
        problem = await supervisor.refused("POST", "/mcp/s/send", b"x" * (MOST_LINE + 1), incarnation=link.incarnation)
        assert problem["code"] == "too_large"
        assert (await link.ask({"still": "there"}))["echo"] == {"still": "there"}


async def _until_refused(supervisor: Supervisor, line: bytes, incarnation: int) -> tuple[int, dict[str, Any]]:
    """Send a line again and again: how often that worked, and the problem when it did not."""
    for sent in range(100_000):
        answer = await supervisor.call("POST", "/mcp/s/send", line, incarnation=incarnation, deadline_ms=20)
        if answer.is_error:
            return sent, answer.json()
    raise AssertionError("it takes everything")


async def test_a_server_that_never_reads(supervisor: Supervisor) -> None:
    await declare(supervisor, python("print('{}')\nwhile True: __import__('time').sleep(60)"))
    async with connected(supervisor) as link:
        await link.message()
        _, problem = await _until_refused(supervisor, json.dumps({"a": "x" * 1000}).encode(), link.incarnation)
        assert problem["code"] == "mcp_server_failed"
        assert DEAF in problem["detail"]
        assert (await state(supervisor))["state"] == "running"  # it may still come to its senses
        await supervisor.ask("POST", "/mcp/s/stop")
    async with connected(supervisor) as link:
        await link.message()
        _, problem = await _until_refused(supervisor, json.dumps({"a": "x" * 50_000}).encode(), link.incarnation)
        assert DEAF in problem["detail"]
        # A line of which a part was written can be ended by nothing but the end of the process.
        end = await link.end()
    assert (end["reason"], end["signal"]) == (DEAF, "SIGKILL")
    assert (await state(supervisor))["state"] in WAITING


async def test_a_caller_that_goes_away_leaves_no_half_line(box: Box) -> None:
    wait = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    await declare(box.supervisor, python(wait + ECHO))
    async with connected(box.supervisor) as link:
        large = {"b": "x" * 1_000_000}
        sending = asyncio.create_task(link.send(large))
        sent, _ = await _until_refused(box.supervisor, b'{"probe": 1}', link.incarnation)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        (box.workspace / "go").touch()
        echoes = [(await link.message())["echo"] for _ in range(sent + 1)]
        assert echoes.count(large) == 1
        assert echoes.count({"probe": 1}) == sent
        assert (await link.ask({"last": 1}))["echo"] == {"last": 1}


async def test_a_server_that_closes_its_input(supervisor: Supervisor) -> None:
    await declare(supervisor, python("import os, time\nos.close(0)\nprint('{}')\nwhile True: time.sleep(60)"))
    async with connected(supervisor) as link:
        await link.message()
        problem = await supervisor.refused("POST", "/mcp/s/send", b"{}", incarnation=link.incarnation)
        assert problem["code"] == "mcp_server_failed"
        assert CLOSED_INPUT in problem["detail"]
        assert (await link.end())["reason"] == CLOSED_INPUT


# the log


async def test_the_log_keeps_the_newest(supervisor: Supervisor) -> None:
    code = f"import sys\nfor n in range({KEPT // 4}): print(n, 'é', file=sys.stderr)\nprint('{{}}')\n{READS}"
    await declare(supervisor, python(code))
    async with connected(supervisor) as link:
        await link.message()
        last = f"{KEPT // 4 - 1} é\n"
        whole = await until(lambda: _ends_with(supervisor, last), what="all of the log")
    assert whole["dropped"] == whole["offset"] == whole["log_bytes"] - KEPT
    parts, at = "", whole["offset"]
    while at < whole["next"]:
        part = await supervisor.ask("GET", "/mcp/s/log", offset=at, limit=1 + at % 50_000)
        assert part["offset"] == at < part["next"]
        parts, at = parts + part["text"], part["next"]
    assert parts.endswith(last)
    assert parts.lstrip("�").partition("\n")[2] == whole["text"].partition("\n")[2]
    after = await supervisor.ask("GET", "/mcp/s/log", offset=whole["log_bytes"] + 100)
    assert (after["text"], after["offset"]) == ("", after["log_bytes"])


async def _ends_with(supervisor: Supervisor, words: str) -> dict[str, Any] | None:
    told = await supervisor.ask("GET", "/mcp/s/log", limit=KEPT)
    return dict(told) if told["text"].endswith(words) else None


# what is refused


BAD: list[tuple[dict[str, object], str]] = [
    ({"command": None}, "command"),
    ({"command": "text"}, "command"),
    ({"command": []}, "command"),
    ({"command": [""]}, "command"),
    ({"command": ["a", 1]}, "command"),
    ({"command": ["a\0"]}, "command"),
    ({"command": ["\ud800"]}, "command"),
    ({"generation": ""}, "generation"),
    ({"generation": 1}, "generation"),
    ({"generation": "x" * 257}, "generation"),
    ({"variables": []}, "env"),
    ({"variables": {"A": 1}}, "env"),
    ({"variables": {"A=": "x"}}, "env"),
    ({"cwd": 1}, "cwd"),
    ({"environment": 1}, "environment"),
    ({"environment": "../x"}, "environment"),
    ({"environment": "/envs/../x"}, "environment"),
    ({"more": 1}, "more"),
]


async def test_malformed_declarations(supervisor: Supervisor) -> None:
    for bad, field in BAD:
        problem = await supervisor.refused("PUT", "/mcp/s", {"command": ["true"], "generation": "1", **bad})
        assert (problem["code"], problem["field"]) == ("invalid_request", field), bad
    for name in ("", ".x", "a%2Fb", "x" * 65, "é"):
        problem = await supervisor.refused("PUT", f"/mcp/{name}", {"command": ["true"], "generation": "1"})
        assert problem["code"] in {"invalid_request", "not_found"}, name
    assert (await supervisor.ask("GET", "/mcp"))["items"] == []


async def test_unknown_servers(supervisor: Supervisor) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/log")):
        assert (await supervisor.refused(method, f"/mcp/none{path}"))["code"] == "not_found"
    for path in ("stop", "connect", "send"):
        assert (await supervisor.refused("POST", f"/mcp/none/{path}"))["code"] == "not_found"


async def test_numbers_that_cannot_be(supervisor: Supervisor) -> None:
    await declare(supervisor, ["true"])
    for path, name, value in (("log", "limit", 0), ("log", "limit", KEPT + 1), ("log", "offset", -1)):
        assert (await supervisor.refused("GET", f"/mcp/s/{path}", **{name: value}))["field"] == name
    for name, given_ in (("deadline_ms", 0), ("deadline_ms", 60_001), ("incarnation", "x")):
        assert (await supervisor.refused("POST", "/mcp/s/send", b"{}", **{name: given_}))["field"] == name


# whatever comes in whatever order

WORDS = ["declare", "change", "connect", "connect", "send", "stop", "delete", "die"]
steps = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(WORDS)), min_size=4, max_size=16)


@dataclass
class _Model:
    """What is expected of one server."""

    generation: int = 1
    incarnation: int = 0
    running: bool = False
    died: bool = False


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps)
async def test_states(supervisor: Supervisor, steps: list[tuple[str, str]]) -> None:
    models = {name: _Model() for name in "ab"}
    newest = 0
    for name in models:
        await declare(supervisor, python(ECHO), name)
    for name, step in steps:
        model = models.get(name)
        if step in {"declare", "change"}:
            if model is None or step == "change":
                model = models[name] = _Model(1 if model is None else model.generation + 1)
            await declare(supervisor, python(ECHO), name, str(model.generation))
        elif model is None:
            method, path = _route(name, step)
            assert (await supervisor.refused(method, path))["code"] == "not_found"
        elif step == "connect":
            async with supervisor.http.stream("POST", f"/mcp/{name}/connect") as answer:
                if answer.is_error:
                    assert model.died
                    assert 0 < json.loads(await answer.aread())["retry_in_s"] <= 60
                    continue
                link = await opened(supervisor, name, answer)
                assert (await link.ask({"n": name}))["echo"] == {"n": name}
            assert link.incarnation == model.incarnation if model.running else link.incarnation > newest
            models[name] = _Model(model.generation, link.incarnation, running=True)
            newest = max(newest, link.incarnation)
        elif step == "send":
            answer = await supervisor.call("POST", f"/mcp/{name}/send", b"{}", incarnation=model.incarnation)
            assert answer.status_code == (204 if model.running else 409)
            if model.running:
                async with connected(supervisor, name) as link:
                    assert (await link.message())["echo"] == {}
        elif step == "die" and model.running:
            async with connected(supervisor, name) as link:
                await link.send({"exit": 5})
                assert (await link.end())["exit_code"] == 5
            model.running, model.died = False, True
        elif step == "stop":
            await supervisor.ask("POST", f"/mcp/{name}/stop")
            model.running = model.died = False
        elif step == "delete":
            await supervisor.ask("DELETE", f"/mcp/{name}")
            del models[name]
        told = {each["name"]: each for each in (await supervisor.ask("GET", "/mcp"))["items"]}
        assert told.keys() == models.keys()
        for each, model in models.items():
            expected = {"running"} if model.running else WAITING if model.died else {"stopped"}
            assert told[each]["state"] in expected
            assert told[each]["generation"] == str(model.generation)
            assert (told[each]["pid"] is not None) is model.running
    for name in models:
        await supervisor.ask("DELETE", f"/mcp/{name}")


def _route(name: str, step: str) -> tuple[str, str]:
    word = "connect" if step == "die" else step
    return ("DELETE", f"/mcp/{name}") if step == "delete" else ("POST", f"/mcp/{name}/{word}")
