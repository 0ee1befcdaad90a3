from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.refusals import refused

from carrel.server import RunningServer

Sent = dict[str, Any]


async def test_commands(http: httpx.AsyncClient, box: str) -> None:
    result = (await http.post(f"{box}/commands", json={"command": "echo é; exit 4"})).json()
    assert (result["stdout"], result["exit_code"]) == ("é\n", 4)
    started = await http.post(f"{box}/commands/start", json={"command": "cat", "interactive": True})
    assert started.status_code == 201
    command = f"{box}/commands/{started.json()['id']}"
    assert (await http.post(f"{command}/stdin", params={"close": "true"}, content=b"\xff\n")).status_code == 204
    result = (await http.get(f"{command}/result")).json()
    assert result["stdout_base64"] == "/wo="
    assert (await http.get(command)).json()["running"] is False
    refused(await http.post(f"{command}/stdin", content=b"late"), 409, None, "not_running")
    assert (await http.delete(command)).status_code == 204
    refused(await http.get(command), 404, None, "not_found")
    sleeper = (await http.post(f"{box}/commands/start", json={"command": "sleep 999"})).json()["id"]
    assert (await http.post(f"{box}/commands/{sleeper}/signal", json={"signal": "KILL"})).status_code == 204
    assert (await http.get(f"{box}/commands/{sleeper}/result")).json()["signal"] == "SIGKILL"


async def test_streams(http: httpx.AsyncClient, box: str) -> None:
    body = {"command": "printf 'a\\303'; sleep 0.1; printf '\\251b'; printf '\\377' >&2; exit 2"}
    async with http.stream("POST", f"{box}/commands/stream", json=body) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        command = answer.headers["carrel-command-id"]
        events = [json.loads(line) async for line in answer.aiter_lines()]
    assert "".join(event.get("text", "") for event in events if event["stream"] == "stdout") == "aéb"
    assert [event["base64"] for event in events if event["stream"] == "stderr"] == ["/w=="]
    assert events[-1]["result"]["exit_code"] == 2
    assert events[-1]["offset"] == 5
    answer = await http.get(
        f"{box}/commands/{command}/output",
        params={"offset": 3, "follow": "false"},
        headers={"accept": "text/event-stream"},
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert json.loads(lines[0].removeprefix("data: "))["text"] == "b"


async def test_a_caller_who_goes_away_leaves_no_stream(
    http: httpx.AsyncClient, server: RunningServer, box: str
) -> None:
    async with http.stream("POST", f"{box}/commands/stream", json={"command": "echo x; sleep 999"}) as answer:
        async for _ in answer.aiter_lines():
            break
    live = server.plane.sessions.live()[0]
    async with asyncio.timeout(10):
        while live.in_flight:
            await asyncio.sleep(0.01)
    assert [each["running"] for each in (await http.get(f"{box}/commands")).json()["items"]] == [True]


async def test_a_stream_that_breaks_with_its_sandbox_is_told_in_a_line(
    http: httpx.AsyncClient, box: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server's log had two tracebacks."""
    with pytest.raises(httpx.RemoteProtocolError):
        async with http.stream("POST", f"{box}/commands/stream", json={"command": "echo a; sleep 999"}) as answer:
            async for _ in answer.aiter_lines():
                await http.post(f"{box}/terminate", json={})
    while "/commands/stream" not in caplog.text:
        await asyncio.sleep(0)
    assert "broke off" in caplog.text and "Traceback" not in caplog.text


async def test_a_terminal_is_resized_and_a_pipe_is_not(http: httpx.AsyncClient, box: str) -> None:
    body = {"command": "stty size; read x; stty size", "terminal": {"rows": 5, "cols": 6}, "interactive": True}
    shell = (await http.post(f"{box}/commands/start", json=body)).json()
    assert shell["terminal"] is True
    command = f"{box}/commands/{shell['id']}"
    async with http.stream("GET", f"{command}/output") as output:
        async for line in output.aiter_lines():
            if "5 6" in json.loads(line).get("text", ""):
                break
    assert (await http.post(f"{command}/resize", json={"rows": 7, "cols": 8})).status_code == 204
    refused(await http.post(f"{command}/resize", json={"rows": 0}), 400, "rows")
    await http.post(f"{command}/stdin", content=b"\n")
    assert "7 8" in (await http.get(f"{command}/result")).json()["stdout"]
    plain = (await http.post(f"{box}/commands/start", json={"command": "sleep 999"})).json()["id"]
    answer = await http.post(f"{box}/commands/{plain}/resize", json={"rows": 7})
    assert answer.status_code in {400, 409} and answer.json()["detail"]


async def test_an_interactive_command_has_a_terminal(http: httpx.AsyncClient, box: str) -> None:
    body = {"command": "test -t 0 && test -t 1 && test -t 2 && stty size", "interactive": True}
    result = (await http.post(f"{box}/commands", json=body)).json()
    assert (result["stdout"], result["exit_code"]) == ("24 80\r\n", 0)
    typed = {"command": "read name; echo hello $name; cat", "interactive": True, "stdin": "you\nmore", "timeout": 30}
    result = (await http.post(f"{box}/commands", json=typed | {"terminal": {"rows": 5, "cols": 40}})).json()
    assert result["exit_code"] == 0 and "hello you" in result["stdout"] and result["stdout"].endswith("more")
    asks = {"command": "cat; sleep 999", "interactive": True, "timeout": 2, "output_limit": 0}
    result = (await http.post(f"{box}/commands", json=asks | {"stdin": "x" * 10})).json()
    assert result["timed_out"] and result["truncated"] and result["stdout"] == ""


async def test_execute(http: httpx.AsyncClient, box: str) -> None:
    code = "cat in >&2; echo hi > output/o; cat output/o"
    answer = (await http.post(f"{box}/execute", json={"code": code, "files": {"in": "dGhlcmU="}})).json()
    assert (answer["output"], answer["stderr"], answer["exit_code"]) == ("hi\n", "there", 0)
    assert answer["files_produced"] == ["output/o"]


BAD: list[tuple[str, str, Sent, int, str]] = [
    ("POST", "/commands", {"json": {}}, 400, "command"),
    ("POST", "/commands", {"json": {"command": ""}}, 400, "command"),
    ("POST", "/commands", {"json": {"command": []}}, 400, "command"),
    ("POST", "/commands", {"json": {"command": "a\0b"}}, 400, "command"),
    ("POST", "/commands", {"json": {"command": "x", "timeout": -1}}, 400, "timeout"),
    ("POST", "/commands/start", {"json": {"command": "x", "timeout": -1}}, 400, "timeout"),
    ("POST", "/execute", {"json": {"code": "1", "language": "python", "timeout": 0}}, 400, "timeout"),
    ("POST", "/commands", {"content": b'{"command": "x", "timeout": NaN}'}, 400, "timeout"),
    ("POST", "/commands", {"json": {"command": "x", "time_out": 1}}, 400, "time_out"),
    ("POST", "/commands", {"json": {"command": "x", "interactive": "maybe"}}, 400, "interactive"),
    ("POST", "/commands", {"json": {"command": "x", "cwd": "../.."}}, 400, "cwd"),
    ("POST", "/commands", {"json": {"command": "x"}, "params": {"wait": "1"}}, 400, "wait"),
    ("POST", "/commands", {"content": b"{"}, 400, "body"),
    ("POST", "/commands", {"content": b"[]"}, 400, "body"),
    ("POST", "/commands", {"content": b"[" * 100_000}, 400, "body"),
    ("POST", "/commands/start", {"json": {"command": 1}}, 400, "command"),
    (
        "POST",
        "/commands/start",
        {"content": b"[" * 100_000, "headers": {"content-type": "application/json"}},
        400,
        "body",
    ),
    ("POST", "/commands/stream", {"json": {"command": "x", "output_limit": -1}}, 400, "output_limit"),
    ("GET", "/commands/..%2f..%2fhealth", {}, 404, "path"),
    ("GET", "/commands/a%3fb", {}, 400, "command_id"),
    ("GET", "/commands/c1/output", {"params": {"offset": "-1"}}, 400, "offset"),
    ("POST", "/commands/c1/signal", {"json": {"signal": "../KILL"}}, 400, "signal"),
    ("POST", "/commands/c1/stdin", {"params": {"close": "perhaps"}}, 400, "close"),
    ("POST", "/execute", {"json": {"code": ""}}, 400, "code"),
    ("POST", "/execute", {"json": {"code": "1", "language": "cobol"}}, 400, "language"),
    ("POST", "/execute", {"json": {"code": "1", "language": "python", "timeout": 121}}, 400, "timeout"),
]


async def test_bad_requests(http: httpx.AsyncClient, box: str) -> None:
    for method, path, sent, status, field in BAD:
        refused(await http.request(method, box + path, **sent), status, field)
    answer = await http.post(f"{box}/execute", json={"code": "1", "files": {"x": "!"}})
    assert (answer.status_code, answer.json()["field"]) == (400, "files")
    for method, path in (("GET", ""), ("GET", "/result"), ("GET", "/output"), ("POST", "/stdin"), ("DELETE", "")):
        answer = await http.request(method, f"{box}/commands/absent{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert (await http.get(f"{box}/commands")).json()["items"] == [], "a refused command never ran"


async def test_chunked_bodies_have_the_same_cap(http: httpx.AsyncClient, box: str) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    refused(await http.post(f"{box}/commands", content=endless()), 413, "body", "too_large")


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
# Never random text for a shell: this also runs where nothing isolates.
words = st.lists(st.text(max_size=6), max_size=3).map(lambda given: ["echo", *given])
bodies = st.fixed_dictionaries(
    {
        "command": words
        | st.sampled_from(["exit 3", "kill -9 $$", "cat", "/absent", "", "\0", [], ["/absent"], 5, None]),
        # Never left out and never long: `cat` on a terminal ends at its deadline only.
        "timeout": st.floats(0.2, 0.5) | st.sampled_from(["soon", -1, 1e9, {}, [1]]),
    },
    optional={
        "cwd": st.sampled_from([".", "absent", "..", "/etc", "\udcff", "a" * 300]) | junk,
        "env": st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2) | junk,
        "stdin": st.text(max_size=20) | junk,
        "output_limit": st.integers(-1, 5) | junk,
        "terminal": st.just({"rows": 5}) | junk,
        "interactive": st.booleans() | junk,
    },
)


async def test_no_body_makes_the_server_fail(http: httpx.AsyncClient, box: str) -> None:
    tried: list[object] = []

    @settings(max_examples=120, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(bodies | junk.filter(lambda body: not isinstance(body, dict)))
    def collect(body: object) -> None:
        tried.append(body)

    collect()
    seen: set[int] = set()
    for body in tried:
        answer = await http.post(f"{box}/commands", content=json.dumps(body).encode())
        seen.add(answer.status_code)
        assert answer.status_code < 500, (body, answer.text)
        if answer.is_error:
            assert answer.json()["detail"] and answer.json()["field"], (body, answer.text)
    assert {200, 400} <= seen, "random bodies should be of both kinds"
    assert (await http.post(f"{box}/commands", json={"command": "echo well"})).json()["stdout"] == "well\n"
