"""Limits of jobs, their removal, and webhooks, on a server with settings of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from tests.support.governed import Known

from carrel.config import Settings, load
from carrel.control.governance.webhooks import genuine

Json = dict[str, Any]
SECRET = "a secret of the operator"


class Receiver:
    """Takes webhooks. `mode`: `take`, `refuse` or `hang`."""

    def __init__(self) -> None:
        self.mode = "take"
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.open = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
            body = await reader.readexactly(int(headers["content-length"]))
            self.got.append((headers, body))
            if self.mode == "hang":
                while not reader.at_eof():
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(0.1)
            status = b"200 OK" if self.mode == "take" else b"500 No"
            writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield made
    server.close()


@pytest.fixture
def settings(receiver: Receiver) -> Iterator[Settings]:
    path = tempfile.mkdtemp(prefix="carrel-t-")
    flags = {
        "data_dir": path,
        "port": 0,
        "max_body_mb": 4,
        "sandbox.allow_process": True,
        "volumes": "directory",
        "jobs.at_once": 4,
        "jobs.per_namespace": 2,
        "jobs.most_queued": 6,
        "jobs.webhook_hosts": f"ci.example, {receiver.url.removeprefix('http://')}",
        "jobs.webhook_secret": SECRET,
    }
    yield load(flags, environ={})
    shutil.rmtree(path)


async def submit(http: httpx.AsyncClient, **body: object) -> Json:
    answer = await http.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    job: Json = answer.json()
    return job


async def end(http: httpx.AsyncClient, job: Json) -> Json:
    found: Json = (await http.get(f"/v1/jobs/{job['id']}/wait", params={"timeout": 30})).json()
    assert found["ended_at"], found
    return found


async def got(receiver: Receiver, count: int) -> None:
    async with asyncio.timeout(30):
        while len(receiver.got) < count:
            await asyncio.sleep(0.02)


async def test_the_end_is_told_and_signed(http: httpx.AsyncClient, receiver: Receiver) -> None:
    job = await submit(http, command="exit 4", context_id="c", webhook=f"{receiver.url}/done")
    await end(http, job)
    await got(receiver, 1)
    headers, body = receiver.got[0]
    said = json.loads(body)
    assert said["event"] == "job.ended"
    assert (said["job"]["id"], said["job"]["state"], said["job"]["exit_code"]) == (job["id"], "failed", 4)
    assert genuine(SECRET.encode(), body, headers["carrel-signature"], time.time())
    assert not genuine(b"another", body, headers["carrel-signature"], time.time())
    await asyncio.sleep(2.5)  # longer than the next look for what is due
    assert len(receiver.got) == 1


async def test_a_webhook_that_fails_is_told_again(http: httpx.AsyncClient, receiver: Receiver) -> None:
    receiver.mode = "refuse"
    job = await submit(http, command="true", context_id="c", webhook=receiver.url)
    assert (await end(http, job))["state"] == "succeeded"
    await got(receiver, 1)
    receiver.mode = "take"
    await got(receiver, 2)
    assert receiver.got[0][1] == receiver.got[1][1]


async def test_a_webhook_that_hangs_delays_nobody(http: httpx.AsyncClient, receiver: Receiver) -> None:
    receiver.mode = "hang"
    stuck = await submit(http, command="true", context_id="c", webhook=f"{receiver.url}/stuck")
    await end(http, stuck)
    await got(receiver, 1)
    other = await submit(http, command="true", context_id="c", webhook=f"{receiver.url}/other")
    began = time.monotonic()
    assert (await end(http, other))["state"] == "succeeded" and time.monotonic() - began < 5
    receiver.mode = "take"
    await got(receiver, 2)
    assert json.loads(receiver.got[1][1])["job"]["id"] == other["id"]
    async with asyncio.timeout(30):
        while receiver.open:  # it is left alone after its time
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "url", ["http://elsewhere.example/", "http://127.0.0.1:1/", "http://user:word@ci.example/", "http://[bad/", "x"]
)
async def test_other_hosts_are_refused(http: httpx.AsyncClient, url: str) -> None:
    answer = await http.post("/v1/jobs", json={"command": "true", "webhook": url})
    assert answer.status_code == 400 and answer.json()["field"] == "webhook"


async def test_no_namespace_takes_everything(http: httpx.AsyncClient, known: Known) -> None:
    one = await known("one", "agent", "operate", namespace="one")
    two = await known("two", "agent", "operate", namespace="two")
    many = [(await one.post("/v1/jobs", json={"command": "sleep 1", "context_id": "one:c"})).json() for _ in range(5)]
    few = (await two.post("/v1/jobs", json={"command": "true", "context_id": "two:c"})).json()
    first = await end(two, few)
    states = [(await one.get(f"/v1/jobs/{job['id']}")).json()["state"] for job in many]
    assert first["state"] == "succeeded" and "queued" in states, "it did not wait for those before it"
    most = 0
    while (now := [job["state"] for job in (await one.get("/v1/jobs")).json()["items"]]) != ["succeeded"] * 5:
        most = max(most, now.count("running"))
        assert set(now) <= {"queued", "running", "succeeded"}, now
    assert most == 2, "no more than jobs.per_namespace at once"


async def test_too_many_that_wait_are_refused(http: httpx.AsyncClient) -> None:
    made = [await http.post("/v1/jobs", json={"command": "sleep 20", "context_id": "c"}) for _ in range(12)]
    assert {answer.status_code for answer in made} == {202, 429}
    accepted = [answer.json() for answer in made if answer.status_code == 202]
    for job in accepted:
        await http.post(f"/v1/jobs/{job['id']}/cancel")
    for job in accepted:
        assert (await end(http, job))["state"] == "cancelled"


async def test_an_ended_job_is_removed_with_its_own_workspace(http: httpx.AsyncClient, server: Any) -> None:
    job = await submit(http, command="echo a", ttl_s=1)
    kept = await submit(http, command="echo b", context_id="c", ttl_s=1)
    for each in (job, kept):
        await end(http, each)
    async with asyncio.timeout(40):
        while (await http.get(f"/v1/jobs/{job['id']}")).status_code != 404:
            await asyncio.sleep(0.2)
        while (await http.get(f"/v1/jobs/{kept['id']}")).status_code != 404:
            await asyncio.sleep(0.2)
    assert (await http.get(f"/v1/jobs/{job['id']}/logs")).status_code == 404
    box = await http.get(f"/v1/sandboxes/{job['context_id']}")
    assert box.status_code == 404 or box.json()["state"] == "terminated"
    assert (await http.get("/v1/sandboxes/c")).json()["state"] == "running"
    events = await http.get("/v1/events", params={"job": job["id"], "after": 0, "follow": "false"})
    assert "event: job.removed" in events.text


async def test_files_that_are_too_large_are_refused(http: httpx.AsyncClient) -> None:
    import base64

    text = base64.b64encode(b"x" * 1_100_000).decode()
    answer = await http.post("/v1/jobs", json={"command": "true", "files": {"a": text}})
    assert answer.status_code == 400 and answer.json()["field"] == "files"
