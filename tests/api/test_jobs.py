"""Jobs through the API of a real server, in real sandboxes."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any

import httpx
import pytest
from tests.support.governed import Known
from tests.support.mcp_hosted import GOOD

from carrel.server import RunningServer

Json = dict[str, Any]


async def submit(http: httpx.AsyncClient, **body: object) -> Json:
    answer = await http.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    job: Json = answer.json()
    return job


async def end(http: httpx.AsyncClient, job: Json, seconds: float = 30.0) -> Json:
    answer = await http.get(f"/v1/jobs/{job['id']}/wait", params={"timeout": seconds})
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    assert found["state"] not in {"queued", "running"}, found
    return found


async def lines(http: httpx.AsyncClient, job: Json, **query: Any) -> list[Json]:
    answer = await http.get(f"/v1/jobs/{job['id']}/logs", params=query)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def text(http: httpx.AsyncClient, job: Json, **query: Any) -> str:
    return "".join(line.get("text") or "" for line in await lines(http, job, **query))


async def until(http: httpx.AsyncClient, job: Json, state: str) -> Json:
    deadline = time.monotonic() + 30
    while True:
        found: Json = (await http.get(f"/v1/jobs/{job['id']}")).json()
        if found["state"] == state:
            return found
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.02)


async def test_a_job_runs_in_the_workspace_of_its_context(http: httpx.AsyncClient) -> None:
    job = await submit(http, command="cat in/a; echo err >&2; echo $COLOUR", context_id="c", env={"COLOUR": "red"},
                       files={"in/a": base64.b64encode(b"hello\n").decode()}, labels={"a": "b"})  # fmt: skip
    assert job["state"] == "queued" and job["attempt"] == 0 and job["kind"] == "command"
    done = await end(http, job)
    assert (done["state"], done["exit_code"], done["attempt"]) == ("succeeded", 0, 1)
    assert done["labels"] == {"a": "b"} and done["output_bytes"] == len("hello\nerr\nred\n")
    shown = await lines(http, job)
    assert {line["stream"] for line in shown} == {"stdout", "stderr", "end"}
    assert sorted("".join(line.get("text") or "" for line in shown).split()) == ["err", "hello", "red"]
    assert shown[-1]["result"]["exit_code"] == 0
    assert all(done[f"{phase}_ms"] is not None for phase in ("queued", "starting", "running"))
    assert (await http.get("/v1/sandboxes/c/files/content", params={"path": "in/a"})).content == b"hello\n"


async def test_secrets_are_variables_of_a_job(http: httpx.AsyncClient) -> None:
    await http.put("/v1/contexts/c/secrets/key", json={"value": "hidden-value"})
    work = 'test "$KEY" = "$(cat /run/secrets/key)" && echo $KEY'
    done = await submit(http, command=work, context_id="c", secret_variables={"KEY": "key"})
    assert (await end(http, done))["state"] == "succeeded" and "hidden" not in await text(http, done)
    missing = await end(http, await submit(http, command="true", context_id="c", secret_variables={"KEY": "other"}))
    assert (missing["state"], missing["attempt"]) == ("failed", 1)
    assert missing["reason"] == "it could not be started: the secret other cannot be used: it is not there"


async def test_a_failure_is_visible_with_its_reason(http: httpx.AsyncClient) -> None:
    done = await end(http, await submit(http, command="exit 3", context_id="c"))
    assert (done["state"], done["exit_code"], done["reason"]) == ("failed", 3, "exit code 3")
    killed = await end(http, await submit(http, command="kill -9 $$", context_id="c"))
    assert (killed["state"], killed["signal"]) == ("failed", "SIGKILL")


async def test_retries_run_it_again_only_if_they_were_asked_for(http: httpx.AsyncClient) -> None:
    count = "echo x >> runs; test $(wc -l < runs) = 3"
    done = await end(http, await submit(http, command=count, context_id="c", retries=4, backoff_s=0.05))
    assert (done["state"], done["attempt"]) == ("succeeded", 3)
    once = await end(http, await submit(http, command="echo y >> other; false", context_id="c"))
    assert (once["state"], once["attempt"]) == ("failed", 1)
    assert (await http.get("/v1/sandboxes/c/files/content", params={"path": "other"})).text == "y\n"


async def test_a_job_without_a_context_has_a_workspace_of_its_own(http: httpx.AsyncClient) -> None:
    job = await submit(http, command="mkdir -p out/deep; echo 1 > out/a.txt; echo 2 > out/deep/b.txt; echo 3 > c.txt",
                       artifacts=["out/**/*.txt"], snapshot=True)  # fmt: skip
    done = await end(http, job)
    assert done["state"] == "succeeded" and done["own_workspace"] and done["context_id"] == job["id"]
    assert done["memory_peak_bytes"] != 0 and done["cpu_seconds"] != 0
    assert done["artifacts"] == 2 and done["snapshot"] and done["reason"] is None
    found = (await http.get(f"/v1/jobs/{job['id']}/artifacts")).json()
    assert [item["path"] for item in found["items"]] == ["out/a.txt", "out/deep/b.txt"]
    box = (await http.get(f"/v1/sandboxes/{job['context_id']}")).json()
    assert box["state"] == "stopped"
    removed = await end(http, await submit(http, command="echo > x", workspace="remove"))
    assert removed["state"] == "succeeded"
    assert (await http.get(f"/v1/sandboxes/{removed['context_id']}")).status_code == 404 or (
        await http.get(f"/v1/sandboxes/{removed['context_id']}")
    ).json()["state"] == "terminated"


async def test_cancel_ends_the_whole_tree(http: httpx.AsyncClient) -> None:
    stubborn = "trap '' TERM; (trap '' TERM; sleep 7654) & echo ready; sleep 7654"
    job = await submit(http, command=stubborn, context_id="c")
    while "ready" not in await text(http, job):
        await asyncio.sleep(0.02)
    answer = (await http.post(f"/v1/jobs/{job['id']}/cancel")).json()
    assert answer["cancel_requested"] and answer["state"] == "running"
    assert (await http.post(f"/v1/jobs/{job['id']}/cancel")).status_code == 200
    done = await end(http, job)
    assert (done["state"], done["reason"]) == ("cancelled", "it was cancelled")
    left = await http.post("/v1/sandboxes/c/commands", json={"command": "pgrep -f 'sleep 765[4]' || true"})
    assert left.json()["stdout"] == ""
    events = await http.get("/v1/events", params={"job": job["id"], "after": 0, "follow": "false"})
    kinds = [line[7:] for line in events.text.splitlines() if line.startswith("event: ")]
    assert kinds == ["job.queued", "job.started", "job.cancelling", "job.ended"]
    assert (await http.post(f"/v1/jobs/{job['id']}/cancel")).json()["state"] == "cancelled"


async def test_timeouts_end_it(http: httpx.AsyncClient) -> None:
    slow = await submit(http, command="sleep 99", context_id="c", timeouts={"run_s": 0.5})
    stuck = await submit(http, command="echo a; sleep 99", context_id="c", timeouts={"heartbeat_s": 1})
    whole = await submit(http, command="sleep 99", context_id="c", timeouts={"whole_s": 1}, retries=3)
    assert "run_s" in (await end(http, slow))["reason"]
    assert (await end(http, stuck))["reason"] == "it is stuck: no output and no heartbeat for 1 s"
    done = await end(http, whole)
    assert (done["state"], done["attempt"]) == ("timed_out", 1) and "whole_s" in done["reason"]


async def test_a_job_says_how_far_it_is(http: httpx.AsyncClient) -> None:
    work = 'for n in 1 2 3 4 5; do carrel-heartbeat "step $n of 5"; sleep 0.7; done; carrel-heartbeat last'
    job = await submit(http, command=work, context_id="c", timeouts={"heartbeat_s": 2.5})
    deadline = time.monotonic() + 20
    while not (found := (await http.get(f"/v1/jobs/{job['id']}")).json())["progress"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert found["progress"].startswith("step ") and found["progress_at"]
    assert (await end(http, job))["state"] == "succeeded", "it was silent for 3.5 s, but its heart beat"
    events = await http.get(
        "/v1/events", params={"job": job["id"], "after": 0, "follow": "false", "kind": "job.progress"}
    )
    assert '"progress":"step ' in events.text


HOSTILE = {
    "a pipe": "mkfifo $CARREL_HEARTBEAT",
    "a link": "ln -s /etc/passwd $CARREL_HEARTBEAT",
    "a directory": "mkdir $CARREL_HEARTBEAT",
    "a device": "ln -s /dev/zero $CARREL_HEARTBEAT",
    "much": "head -c 50000000 /dev/zero | tr '\\0' x > $CARREL_HEARTBEAT",
    "control characters": "printf '\\033[31m\\000\\377red\\n\\nnext' > $CARREL_HEARTBEAT",
    "another time": "echo x > $CARREL_HEARTBEAT; touch -d 1800-01-01 $CARREL_HEARTBEAT; sleep 1.2; touch -d 2400-01-01 $CARREL_HEARTBEAT",
}


@pytest.mark.parametrize("how", HOSTILE)
async def test_a_heartbeat_is_hostile_input(http: httpx.AsyncClient, how: str) -> None:
    job = await submit(http, command=f"{HOSTILE[how]}; sleep 2.2; echo fine", context_id="c")
    seen = set()
    while (found := (await http.get(f"/v1/jobs/{job['id']}")).json())["state"] in {"queued", "running"}:
        seen.add(found["progress"])
        await asyncio.sleep(0.1)
    assert found["state"] == "succeeded", found
    for text in seen - {None}:
        assert len(text) <= 200 and text.isprintable() and "root:" not in text
    assert (seen - {None} != set()) == (how in {"much", "control characters", "another time"})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "exactly one of"),
        ({"command": "x", "python": {"code": "y"}}, "exactly one of"),
        ({"command": "x", "comand": "y"}, "comand"),
        ({"command": "x", "a2a": {}}, "a2a"),
        ({"command": "x", "timeouts": {"run_s": 0}}, "run_s"),
        ({"command": "x", "timeouts": {"run_s": 5, "heartbeat_s": 6}}, "heartbeat_s is longer than run_s"),
        ({"command": "x", "timeouts": {"run_s": 60, "whole_s": 30}}, "run_s is longer than whole_s"),
        ({"command": "x", "timeouts": {"queue_s": float(10**9)}}, "queue_s"),
        ({"command": "x", "artifacts": ["../*"]}, "leaves the workspace"),
        ({"command": "x", "artifacts": ["/etc/*"]}, "leaves the workspace"),
        ({"command": "x", "artifacts": ["a/../../b"]}, "leaves the workspace"),
        ({"command": "x", "artifacts": ["a"], "workspace": "remove"}, "would be removed"),
        ({"command": "x", "files": {"a": "not base64!"}}, "not base64"),
        ({"command": "x", "retries": 1000}, "retries"),
        ({"command": "x", "webhook": "http://127.0.0.1:1/"}, "does not allow webhooks"),
        ({"command": "x", "webhook": "ftp://a/"}, "not an http or https URL"),
        ({"mcp": {"server": "s", "tool": "t"}}, "needs context_id"),
    ],
)
async def test_a_job_that_cannot_be_is_refused(http: httpx.AsyncClient, body: Json, words: str) -> None:
    answer = await http.post("/v1/jobs", json=body)
    assert answer.status_code == 400 and words in answer.text, answer.text
    assert (await http.get("/v1/jobs")).json()["items"] == []
    assert (await http.get("/v1/sandboxes")).json()["items"] == []


async def test_the_same_key_submits_one_job(http: httpx.AsyncClient) -> None:
    headers = {"idempotency-key": "k"}
    made = [await http.post("/v1/jobs", json={"command": "echo x >> f", "context_id": "c"}, headers=headers)
            for _ in range(3)]  # fmt: skip
    assert len({answer.json()["id"] for answer in made}) == 1
    other = await http.post("/v1/jobs", json={"command": "true", "context_id": "c"}, headers=headers)
    assert other.status_code == 409
    await end(http, made[0].json())
    assert (await http.get("/v1/sandboxes/c/files/content", params={"path": "f"})).text == "x\n"


async def test_retry_makes_a_new_job(http: httpx.AsyncClient) -> None:
    job = await submit(http, command="sleep 5", context_id="c")
    early = await http.post(f"/v1/jobs/{job['id']}/retry")
    assert early.status_code == 409
    await http.post(f"/v1/jobs/{job['id']}/cancel")
    done = await end(http, job)
    again = await http.post(f"/v1/jobs/{job['id']}/retry")
    assert again.status_code == 202 and again.json()["retry_of"] == job["id"] and again.json()["id"] != job["id"]
    assert (await http.get(f"/v1/jobs/{job['id']}")).json() == done
    await http.post(f"/v1/jobs/{again.json()['id']}/cancel")
    await end(http, again.json())


async def test_python_runs_as_a_job(http: httpx.AsyncClient) -> None:
    work = {"code": "import sys; print(sum(map(int, sys.argv[1:])))", "args": ["2", "3"]}
    job = await submit(http, python=work, context_id="c")
    assert (await end(http, job))["state"] == "succeeded"
    assert await text(http, job) == "5\n"


async def test_the_output_can_be_followed_and_read_from_an_offset(http: httpx.AsyncClient) -> None:
    job = await submit(http, command="for i in 1 2 3; do echo line $i; sleep 0.3; done", context_id="c")
    followed = await lines(http, job, follow="true")
    assert "".join(line.get("text") or "" for line in followed) == "line 1\nline 2\nline 3\n"
    assert await text(http, job, offset=7) == "line 2\nline 3\n"
    assert followed[-1]["result"]["running"] is False


async def test_a_job_keeps_its_output_when_the_sandbox_is_gone(http: httpx.AsyncClient) -> None:
    job = await submit(http, command="seq 20000", context_id="c")
    done = await end(http, job)
    await http.post("/v1/sandboxes/c/terminate", json={"delete_files": True})
    assert await text(http, job) == "".join(f"{n}\n" for n in range(1, 20001))
    assert done["output_bytes"] == len(await text(http, job))


async def test_a_sandbox_that_dies_loses_its_job(http: httpx.AsyncClient) -> None:
    job = await submit(http, command="echo a; sleep 99", context_id="c")
    again = await submit(http, command="echo b >> f; test -s g || sleep 99", context_id="c", retries=1, backoff_s=0.05)
    for each in (job, again):
        await until(http, each, "running")
    while "a" not in await text(http, job):
        await asyncio.sleep(0.02)
    while (await http.get("/v1/sandboxes/c/files/content", params={"path": "f"})).status_code != 200:
        await asyncio.sleep(0.02)
    await http.put("/v1/sandboxes/c/files/content", params={"path": "g"}, content=b"x")
    await http.post("/v1/sandboxes/c/stop")
    lost = await end(http, job)
    assert lost["state"] == "lost" and "sandbox" in lost["reason"]
    done = await end(http, again)
    assert (done["state"], done["attempt"]) == ("succeeded", 2)
    assert (await http.get("/v1/sandboxes/c/files/content", params={"path": "f"})).text == "b\nb\n"


async def test_jobs_are_within_the_reach_of_a_token(http: httpx.AsyncClient, known: Known) -> None:
    mine = await known("a", "agent", "operate", namespace="team")
    reader = await known("r", "person", "read", namespace="team")
    few = await known("f", "agent", "operate", contexts=["team:x"])
    job = (await mine.post("/v1/jobs", json={"command": "sleep 30"})).json()
    assert job["context_id"] == f"team:{job['id']}"
    assert (await mine.post("/v1/jobs", json={"command": "true", "context_id": "other:c"})).status_code == 403
    assert (await reader.post("/v1/jobs", json={"command": "true"})).status_code == 403
    assert (await few.post("/v1/jobs", json={"command": "true"})).status_code == 400
    assert (await reader.get(f"/v1/jobs/{job['id']}")).status_code == 200
    for path in ("", "/logs", "/wait", "/artifacts"):
        assert (await few.get(f"/v1/jobs/{job['id']}{path}")).status_code == 403
        assert (await few.get(f"/v1/jobs/job-{'0' * 20}{path}")).status_code == 403
    assert (await few.post(f"/v1/jobs/{job['id']}/cancel")).status_code == 403
    assert (await few.get("/v1/jobs")).json()["items"] == []
    assert len((await reader.get("/v1/jobs")).json()["items"]) == 1
    await mine.post(f"/v1/jobs/{job['id']}/cancel")
    assert (await end(mine, job))["state"] == "cancelled"


async def test_a_revoked_token_ends_its_jobs(http: httpx.AsyncClient, known: Known) -> None:
    mine = await known("a", "agent", "operate")
    job = (await mine.post("/v1/jobs", json={"command": "sleep 99", "context_id": "c"})).json()
    await until(http, job, "running")
    (token,) = [t for t in (await http.get("/v1/tokens")).json()["items"] if t["name"] == "a"]
    await http.delete(f"/v1/tokens/{token['id']}")
    done = await end(http, job)
    assert done["state"] == "failed" and "revoked" in done["reason"]


async def test_a_job_that_waits_for_a_person_holds_no_place(
    http: httpx.AsyncClient, known: Known, governed: str, server: RunningServer
) -> None:
    agent = await known("coder", "agent", "operate")
    person = await known("boss", "person", "approve")
    job = (await agent.post("/v1/jobs", json={"command": "touch made", "context_id": "team:a"})).json()
    waiting = await until(http, job, "waiting_approval")
    assert waiting["approval"] and waiting["node"] is None
    decided = await person.post(f"/v1/approvals/{waiting['approval']}/decide", json={"approve": True})
    assert decided.status_code == 200, decided.text
    deadline = time.monotonic() + 30
    while not (done := (await http.get(f"/v1/jobs/{job['id']}/wait", params={"timeout": 30})).json())["ended_at"]:
        assert time.monotonic() < deadline
    assert (done["state"], done["attempt"]) == ("succeeded", 1)
    refused = (await agent.post("/v1/jobs", json={"command": "curl x", "context_id": "team:a"})).json()
    done = await end(http, refused)
    assert done["state"] == "failed" and done["reason"].startswith("it was refused")
    second = (await agent.post("/v1/jobs", json={"command": "touch more", "context_id": "team:a"})).json()
    waiting = await until(http, second, "waiting_approval")
    await person.post(f"/v1/approvals/{waiting['approval']}/decide", json={"approve": False})
    while (done := (await http.get(f"/v1/jobs/{second['id']}")).json())["state"] in {"waiting_approval", "queued"}:
        assert time.monotonic() < deadline + 30
        await asyncio.sleep(0.02)
    assert (await end(http, second))["state"] == "failed"


async def test_lists_are_paged_and_filtered(http: httpx.AsyncClient) -> None:
    made = [await submit(http, command="true", context_id=f"c{n % 2}") for n in range(5)]
    for job in made:
        await end(http, job)
    page = (await http.get("/v1/jobs", params={"limit": 3})).json()
    rest = (await http.get("/v1/jobs", params={"limit": 3, "cursor": page["next"]})).json()
    assert [j["id"] for j in (*page["items"], *rest["items"])] == [j["id"] for j in reversed(made)]
    assert len((await http.get("/v1/jobs", params={"context_id": "c1"})).json()["items"]) == 2
    assert (await http.get("/v1/jobs", params={"state": "failed"})).json()["items"] == []
    assert (await http.get(f"/v1/jobs/job-{'0' * 20}")).status_code == 404


async def test_a_call_of_a_tool_is_a_job(http: httpx.AsyncClient) -> None:
    await http.post("/v1/sandboxes", json={"context_id": "c"})
    await http.put("/v1/sandboxes/c/files/content", params={"path": "good.py"}, content=GOOD.encode())
    added = await http.put("/v1/sandboxes/c/mcp-servers/good", json={"command": ["python3", "good.py"]})
    assert added.status_code in {200, 201}, added.text
    job = await submit(http, context_id="c", mcp={"server": "good", "tool": "echo", "arguments": {"text": "again"}})
    assert (await end(http, job))["state"] == "succeeded"
    assert json.loads(await text(http, job))["structured_content"] == {"text": "again"}
    failed = await end(http, await submit(http, context_id="c", mcp={"server": "good", "tool": "fail"}))
    assert (failed["state"], failed["exit_code"]) == ("failed", 1)
    missing = await end(http, await submit(http, context_id="c", mcp={"server": "none", "tool": "echo"}))
    assert missing["state"] == "failed" and "none" in missing["reason"]
    hangs = await submit(http, context_id="c", mcp={"server": "good", "tool": "hang"})
    await until(http, hangs, "running")
    await http.post(f"/v1/jobs/{hangs['id']}/cancel")
    assert (await end(http, hangs))["state"] == "cancelled"


async def test_a_deleted_context_has_no_jobs(http: httpx.AsyncClient) -> None:
    done = await submit(http, command="echo secret of c", context_id="c")
    await end(http, done)
    runs = await submit(http, command="sleep 99", context_id="c")
    other = await submit(http, command="true", context_id="d")
    await until(http, runs, "running")
    await end(http, other)
    assert (await http.delete("/v1/contexts/c")).status_code == 204
    for job in (done, runs):
        assert (await http.get(f"/v1/jobs/{job['id']}")).status_code == 404
        assert (await http.get(f"/v1/jobs/{job['id']}/logs")).status_code == 404
    assert [job["id"] for job in (await http.get("/v1/jobs")).json()["items"]] == [other["id"]]


async def test_the_stream_of_a_job(http: httpx.AsyncClient, known: Known) -> None:
    job = await submit(http, command="echo a", context_id="team:c")
    await end(http, job)
    answer = await http.get(f"/api/stream/{job['id']}", params={"after": 0, "follow": "false"})
    kinds = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
    assert kinds == ["job.queued", "job.started", "job.ended"]
    mine = await known("a", "agent", "operate", namespace="team")
    assert (await mine.get(f"/api/stream/{job['id']}", params={"after": 0, "follow": "false"})).status_code == 200
    other = await known("b", "agent", "operate", namespace="other")
    assert (await other.get(f"/api/stream/{job['id']}", params={"after": 0, "follow": "false"})).status_code == 403
    assert (await http.get(f"/api/stream/job-{'0' * 20}", params={"follow": "false"})).status_code == 404
