"""Health, code execution with files, and requests the supervisor does not know."""

from __future__ import annotations

import base64

import pytest
from tests.support.sandboxes import Box, Supervisor, until


async def test_health(supervisor: Supervisor) -> None:
    answer = await supervisor.ask("GET", "/health")
    assert answer.pop("uptime_s") >= 0 and answer.pop("memory_bytes") > 0
    nothing = {"commands_running": 0, "python_calls": 0, "code_contexts": 0, "processes": 1}
    assert answer == {"status": "ok", "state": "idle", **nothing, "capacity": 64}
    await supervisor.start("exec sleep 60")
    answer = await supervisor.ask("GET", "/health")
    assert (answer["state"], answer["commands_running"], answer["python_calls"]) == ("busy", 1, 0)
    await supervisor.ask("POST", "/python", {"code": "import time; time.sleep(60)"})
    await supervisor.ask("POST", "/contexts/c/cells?wait=1", {"code": "1"})

    async def settled() -> bool:
        answer = await supervisor.ask("GET", "/health")
        assert (answer["python_calls"], answer["code_contexts"]) == (1, 1)
        return answer["commands_running"] == 2 and answer["processes"] > 5

    await until(settled)


async def test_execute_with_files_in_and_out(box: Box) -> None:
    data = bytes(range(256))
    body = {
        "code": "cat in/data.bin > copy; mkdir -p made; echo x > made/deep; echo $A; echo err >&2; exit 4",
        "files": {"in/data.bin": base64.b64encode(data).decode(), "same": ""},
        "env": {"A": "value"},
        "timeout": 10,
    }
    (box.workspace / "old").write_text("before")
    await until(lambda: _now(box) > (box.workspace / "old").stat().st_ctime_ns, what="a tick of the file system")
    answer = await box.supervisor.ask("POST", "/execute", body)
    produced = answer.pop("files_produced")
    assert answer.pop("execution_time_ms") > 0
    assert answer == {
        "output": "value\n",
        "stderr": "err\n",
        "exit_code": 4,
        "signal": None,
        "timed_out": False,
        "truncated": False,
        "files_truncated": False,
    }
    assert sorted(item["path"] if isinstance(item, dict) else item for item in produced) == ["copy", "made/deep"]
    assert (box.workspace / "copy").read_bytes() == data


def _now(box: Box) -> int:
    beside = box.workspace.parent / "tick"
    beside.write_text("")
    try:
        return beside.stat().st_ctime_ns
    finally:
        beside.unlink()


async def test_execute_has_a_deadline(supervisor: Supervisor) -> None:
    answer = await supervisor.ask("POST", "/execute", {"code": "echo a; echo b > f; sleep 60", "timeout": 0.3})
    assert (answer["timed_out"], answer["output"], answer["signal"]) == (True, "a\n", "SIGKILL")
    assert len(answer["files_produced"]) == 1


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"code": "true", "language": "ruby"}, 422, "language"),
        ({"code": "true", "files": []}, 400, "files"),
        ({"code": "true", "files": ["a"]}, 400, "files"),
        ({"code": "true", "files": {"a": "not base64!"}}, 400, "files"),
        ({"code": "true", "files": {"a": "é"}}, 400, "files"),
        ({"code": "true", "files": {"a": 1}}, 400, "files"),
        ({"code": "true", "files": {"../a": ""}}, 400, "path"),
        ({"code": 1}, 400, "command"),
        ({}, 400, "command"),
    ],
)
async def test_execute_refuses(supervisor: Supervisor, body: dict[str, object], status: int, field: str) -> None:
    problem = await supervisor.refused("POST", "/execute", body)
    assert (problem["status"], problem["field"]) == (status, field)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("POST", "/health"), ("GET", "/commands/"), ("PUT", "/commands/c1"), ("GET", "/commands/c1/x/y")],
)
async def test_unknown_routes(supervisor: Supervisor, method: str, path: str) -> None:
    assert (await supervisor.refused(method, path))["code"] == "not_found"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"\xff", b"[" * 100_000])
async def test_bodies_that_are_no_json_object(supervisor: Supervisor, body: bytes) -> None:
    problem = await supervisor.refused("POST", "/commands", body)
    assert (problem["code"], problem["field"]) == ("invalid_request", "body")


@pytest.mark.parametrize("offset", ["-1", "x", "1" * 30, "²"])
async def test_offsets_that_are_no_numbers(supervisor: Supervisor, offset: str) -> None:
    name = await supervisor.start("true")
    assert (await supervisor.refused("GET", f"/commands/{name}/output", offset=offset))["field"] == "offset"
