from __future__ import annotations

import asyncio
import json

import httpx

from carrel.server import Running


async def test_a_life(http: httpx.AsyncClient) -> None:
    made = await http.post("/v1/sandboxes", json={"context_id": "a:b"}, headers={"idempotency-key": "k"})
    assert made.status_code == 201
    again = await http.post("/v1/sandboxes", json={"context_id": "a:b"})
    assert again.status_code == 200 and again.json()["id"] == made.json()["id"]
    for name in (made.json()["id"], "a:b"):
        assert (await http.get(f"/v1/sandboxes/{name}")).json()["state"] == "running"
    assert (await http.get("/v1/sandboxes/a:b/health")).json()["status"] == "ok"
    ended = await http.post("/v1/sandboxes/a:b/terminate", json={"reason": "done"})
    assert ended.json()["state"] == "terminated"
    assert (await http.get("/v1/sandboxes", params={"state": "terminated"})).json()["items"]
    deleted = await http.post("/v1/sandboxes/a:b/terminate", json={"delete_files": True})
    assert deleted.status_code == 404, "an ended context has no session any more"
    named = f"/v1/sandboxes/{made.json()['id']}/terminate"
    assert (await http.post(named, json={"delete_files": True})).status_code == 200


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
    assert (await http.delete(command)).status_code == 204
    assert (await http.get(command)).status_code == 404
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


async def test_a_caller_who_goes_away_leaves_no_stream(http: httpx.AsyncClient, server: Running, box: str) -> None:
    async with http.stream("POST", f"{box}/commands/stream", json={"command": "echo x; sleep 999"}) as answer:
        async for _ in answer.aiter_lines():
            break
    live = server.plane.sessions.live()[0]
    async with asyncio.timeout(10):
        while live.in_flight:
            await asyncio.sleep(0.01)
    assert [each["running"] for each in (await http.get(f"{box}/commands")).json()["items"]] == [True]


async def test_files(http: httpx.AsyncClient, box: str) -> None:
    data = bytes(range(256)) * 20_000
    put = await http.put(f"{box}/files/content", params={"path": "deep/er/x", "mode": "640"}, content=data)
    assert put.json()["size"] == len(data) and put.json()["mode"] == "640"
    got = await http.get(f"{box}/files/content", params={"path": "deep/er/x"})
    assert got.content == data and got.headers["content-length"] == str(len(data))
    again = await http.put(f"{box}/files/content", params={"path": "deep/er/x", "exclusive": "true"}, content=b"")
    assert again.status_code == 409
    await http.put(f"{box}/files/content", params={"path": "t"}, content=b"one one")
    edit = await http.post(f"{box}/files/edit", json={"path": "t", "old": "one", "new": "two"})
    assert (edit.status_code, edit.json()["code"]) == (409, "edit_mismatch")
    assert (await http.post(f"{box}/files/mkdir", json={"path": "new/dir"})).json()["kind"] == "directory"
    moved = await http.post(f"{box}/files/move", json={"source": "t", "destination": "new/t"})
    assert moved.json()["path"] == "new/t"
    listed = await http.get(f"{box}/files", params={"path": "new", "recursive": "true"})
    assert {each["path"] for each in listed.json()["items"]} == {"new/dir", "new/t"}
    assert (await http.delete(f"{box}/files", params={"path": "new", "recursive": "true"})).status_code == 204
    assert (await http.get(f"{box}/files/stat", params={"path": "new"})).status_code == 404


async def test_names_that_are_not_utf8(http: httpx.AsyncClient, box: str) -> None:
    await http.put(f"{box}/files/content?path=data/%FF", content=b"x")
    assert [each["path"] for each in (await http.get(f"{box}/files?path=data")).json()["items"]] == ["data/\udcff"]
    assert (await http.get(f"{box}/files/content?path=data/%FF")).content == b"x"


async def test_execute_tools_host(http: httpx.AsyncClient, box: str) -> None:
    answer = await http.post(f"{box}/execute", json={"code": "echo hi > output/o; cat output/o"})
    assert answer.json()["output"] == "hi\n"
    answer = await http.post(f"{box}/tools", json={"tool_name": "create_file", "params": {"path": "t", "content": "é"}})
    assert answer.json()["result"]["size"] == 2
    report = (await http.get("/v1/host")).json()
    assert report["providers"] and report["checks"]


async def test_openapi_is_complete_and_true(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    text = json.dumps(document)
    operations = {}
    for methods in document["paths"].values():
        for operation in methods.values():
            operations[operation["operationId"]] = operation
    assert {"deploy_or_resume", "run_command", "tool_request", "terminate", "write_file", "send_input"} <= set(
        operations
    )
    assert len(operations) == sum(len(methods) for methods in document["paths"].values())
    for name, operation in operations.items():
        if name not in {"healthz", "readyz"}:
            problem = operation["responses"]["400"]["content"]["application/problem+json"]["schema"]
            assert problem == {"$ref": "#/components/schemas/Problem"}, name
            assert "422" not in operation["responses"] or "HTTPValidation" not in text
        success = [status for status in operation["responses"] if status.startswith("2")]
        assert success, name
        if "/{id}" in text and name == "run_command":
            assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("CommandRequest")
            assert [each["name"] for each in operation["parameters"]] == ["id"]
    for name in ("write_file", "send_input"):
        assert "application/octet-stream" in operations[name]["requestBody"]["content"]
    assert document["security"] == [{"token": []}] and operations["healthz"]["security"] == []
    schemas = document["components"]["schemas"]
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.split('"')[0] in schemas
    answers = operations["deploy_or_resume"]["responses"]
    assert {"200", "201", "400", "401", "409", "422", "429", "503"} <= set(answers)
    assert operations["delete_file"]["responses"].keys() & {"200"} == set()
