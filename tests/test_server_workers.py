"""A server with several workers, end to end: one port, one data directory, one SQLite file."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from tests.support.fleet import Fleet
from tests.support.governed import POLICY
from tests.support.postgres import Postgres
from tests.support.sandboxes import until
from tests.support.worker_servers import ServerWithWorkers, server_with_workers
from websockets.asyncio.client import connect

from carrel.audit import verify
from carrel.config import Settings, load
from carrel.errors import InvalidRequest
from carrel.server import serve

ADOPTED_S = 5.0
"""A dead worker is replaced within a second on an idle machine; the machine of the tests may be busy."""


@pytest.fixture(scope="module")
def settings() -> Iterator[Settings]:
    path = tempfile.mkdtemp(prefix="carrel-w-")
    flags = {"data_dir": path, "port": 0, "sandbox.allow_process": True, "volumes": "directory"}
    yield load(flags, environ={})
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def server(settings: Settings, carrel_forks: None) -> Iterator[ServerWithWorkers]:
    with server_with_workers(settings, 2) as server:
        yield server


@pytest.fixture
async def workers(server: ServerWithWorkers) -> AsyncIterator[list[httpx.AsyncClient]]:
    """A client of each worker."""
    clients = [server.worker(index) for index in range(2)]
    yield clients
    for client in clients:
        await client.aclose()


async def started(client: httpx.AsyncClient, context: str, **more: object) -> str:
    """A new sandbox; its path."""
    answer = await client.post("/v1/sandboxes", json={"context_id": context, "trust": "high", **more})
    assert answer.status_code == 201, answer.text
    return f"/v1/sandboxes/{context}"


async def owner_of(workers: list[httpx.AsyncClient], box: str) -> int:
    """The number of the worker that has a sandbox: the other one counts the request as forwarded."""
    before = await forwarded(workers[0])
    answer = await workers[0].post(f"{box}/commands", json={"command": "true"})
    assert answer.status_code == 200, answer.text
    return 0 if await forwarded(workers[0]) == before else 1


async def forwarded(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    counts = [line for line in lines if line.startswith('carrel_forwarded_requests_total{outcome="answered"}')]
    return sum(float(line.split()[-1]) for line in counts)


async def until_answered(client: httpx.AsyncClient, method: str, path: str, **given: object) -> httpx.Response:
    """Ask until the answer is no retryable error."""
    async with asyncio.timeout(30):
        while True:
            with suppress(httpx.TransportError):
                answer = await client.request(method, path, **given)  # type: ignore[arg-type]
                if answer.status_code != 503:
                    return answer
                assert answer.json()["retry"] is True, answer.text
            await asyncio.sleep(0.01)


def test_each_worker_takes_its_share_of_connections(server: ServerWithWorkers) -> None:
    clients = [httpx.Client(base_url=server.url) for _ in range(8)]
    try:
        for client in clients:
            assert client.get("/healthz").status_code == 200
        port = int(server.url.rpartition(":")[2])

        def connections(pid: int) -> int:
            found = psutil.Process(pid).net_connections("tcp")
            return sum(each.laddr[1] == port and each.status == "ESTABLISHED" for each in found)

        counts = [connections(pid) for pid in server.pids().values()]
        assert len(counts) == 2 and sum(counts) >= 8 and min(counts) >= 2, counts
    finally:
        for client in clients:
            client.close()


async def test_a_sandbox_answers_whichever_worker_is_asked(workers: list[httpx.AsyncClient]) -> None:
    box = await started(workers[0], "either")
    for number, client in enumerate(workers):
        answer = await client.post(f"{box}/commands", json={"command": f"echo {number} | tee -a said"})
        assert answer.status_code == 200 and answer.json()["stdout"] == f"{number}\n"
    assert (await workers[1].get(f"{box}/files/content", params={"path": "said"})).text == "0\n1\n"
    listed = (await workers[1].get("/v1/sandboxes")).json()["items"]
    assert "either" in {each["context_id"] for each in listed}
    assert (await workers[1].delete("/v1/contexts/either")).status_code == 204
    assert (await workers[0].get(box)).status_code == 404


async def test_files_stay_when_another_worker_resumes_a_context(workers: list[httpx.AsyncClient]) -> None:
    box = await started(workers[0], "moves")
    await workers[0].post(f"{box}/commands", json={"command": "echo kept > file"})
    assert (await workers[0].post(f"{box}/stop", json={})).status_code == 200
    answer = await workers[1].post("/v1/sandboxes", json={"context_id": "moves"})
    assert answer.status_code == 201, answer.text
    assert answer.json()["notice"] is None
    assert (await workers[0].post(f"{box}/commands", json={"command": "cat file"})).json()["stdout"] == "kept\n"


async def test_equal_starts_at_both_workers_make_one_sandbox(workers: list[httpx.AsyncClient]) -> None:
    for turn in range(5):
        context = f"once-{turn}"
        answers = await asyncio.gather(
            *(each.post("/v1/sandboxes", json={"context_id": context}) for each in (*workers, *workers))
        )
        assert {answer.status_code for answer in answers} <= {200, 201}, [answer.text for answer in answers]
        assert sum(answer.status_code == 201 for answer in answers) == 1
        assert len({answer.json()["id"] for answer in answers}) == 1
        wrote = await workers[0].post(f"/v1/sandboxes/{context}/commands", json={"command": "ls -d scripts"})
        assert wrote.json()["stdout"] == "scripts\n", "nobody removed the files of the other"


async def test_a_change_is_known_to_the_other_worker_at_once(
    server: ServerWithWorkers, workers: list[httpx.AsyncClient]
) -> None:
    for turn in range(10):
        grant = {"name": f"p{turn}", "kind": "person", "scopes": ["read"]}
        made = (await workers[turn % 2].post("/v1/tokens", json=grant)).json()
        headers = {"authorization": f"Bearer {made['token']}"}
        for each in workers:
            assert (await each.get("/v1/sandboxes", headers=headers)).status_code == 200
        assert (await workers[turn % 2].delete(f"/v1/tokens/{made['id']}")).status_code in {200, 204}
        for each in workers:
            assert (await each.get("/v1/sandboxes", headers=headers)).status_code == 401


async def test_a_revoked_token_ends_streams_of_both_workers(
    server: ServerWithWorkers, workers: list[httpx.AsyncClient]
) -> None:
    made = (await workers[0].post("/v1/tokens", json={"name": "watcher", "kind": "person", "scopes": ["read"]})).json()
    headers = {"authorization": f"Bearer {made['token']}"}

    async def watch(client: httpx.AsyncClient, open_: asyncio.Event) -> None:
        async with client.stream("GET", "/v1/events?after=0", headers=headers) as answer:
            assert answer.status_code == 200
            open_.set()
            with suppress(httpx.RemoteProtocolError):
                async for _ in answer.aiter_lines():
                    pass

    opened = [asyncio.Event() for _ in workers]
    watching = [asyncio.create_task(watch(*pair)) for pair in zip(workers, opened, strict=True)]
    for each in opened:
        await each.wait()
    await workers[0].delete(f"/v1/tokens/{made['id']}")
    async with asyncio.timeout(10):
        await asyncio.gather(*watching)


async def test_an_approval_is_decided_at_the_other_worker(
    server: ServerWithWorkers, workers: list[httpx.AsyncClient]
) -> None:
    context = "asks"
    assert (await workers[0].put(f"/v1/contexts/{context}/policy", json={"settings": POLICY})).status_code == 200
    box = await started(workers[1], context)
    grant = {"name": "bot", "kind": "agent", "scopes": ["operate"], "contexts": [context]}
    made = await workers[0].post("/v1/tokens", json=grant)
    headers = {"authorization": f"Bearer {made.json()['token']}", "carrel-wait": "30"}
    asking = asyncio.create_task(workers[0].post(f"{box}/commands", json={"command": "uname"}, headers=headers))

    async def pending() -> list[dict[str, object]]:
        found = (await workers[1].get("/v1/approvals", params={"state": "pending"})).json()["items"]
        return [each for each in found if each["context_id"] == context]

    [approval] = await until(pending, what="the question")
    owner = await owner_of_any(workers, box)
    decided_at = time.monotonic()
    decision = await workers[1 - owner].post(f"/v1/approvals/{approval['id']}/decide", json={"approve": True})
    assert decision.status_code == 200, decision.text
    answer = await asking
    assert answer.status_code == 200 and answer.json()["stdout"] == "Linux\n", answer.text
    assert time.monotonic() - decided_at < ADOPTED_S


async def owner_of_any(workers: list[httpx.AsyncClient], box: str) -> int:
    """The number of the worker that has a sandbox, without a command in it."""
    before = await forwarded(workers[0])
    assert (await workers[0].get(f"{box}/usage")).status_code == 200
    return 0 if await forwarded(workers[0]) == before else 1


async def test_events_of_both_workers_come_in_order_and_without_a_gap(workers: list[httpx.AsyncClient]) -> None:
    first = int((await workers[0].post("/v1/events", json=record("begin"))).json()["stored"])
    assert first == 1
    seen: list[list[tuple[int, str]]] = [[], []]

    async def read(client: httpx.AsyncClient, into: list[tuple[int, str]], ready: asyncio.Event) -> None:
        async with client.stream("GET", "/v1/events?after=0&context_id=both") as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    if event.get("kind") == "log":
                        ready.set()
                        into.append((event["id"], event["body"]["message"]))
                        if event["body"]["message"] == "end":
                            return

    ready = [asyncio.Event() for _ in workers]
    reading = [asyncio.create_task(read(*each)) for each in zip(workers, seen, ready, strict=True)]
    for each in ready:
        await each.wait()

    async def write(number: int) -> None:
        for count in range(50):
            answer = await workers[number].post("/v1/events", json=record(f"{number}-{count}"))
            assert answer.status_code < 300, answer.text

    await asyncio.gather(write(0), write(1))
    await workers[0].post("/v1/events", json=record("end"))
    async with asyncio.timeout(30):
        await asyncio.gather(*reading)
    assert seen[0] == seen[1], "both workers show the same"
    ids, texts = zip(*seen[0], strict=True)
    assert list(ids) == sorted(set(ids))
    assert sorted(texts) == sorted(["begin", "end", *(f"{w}-{c}" for w in (0, 1) for c in range(50))])


def record(message: str) -> dict[str, object]:
    return {"context_id": "both", "records": [{"message": message}]}


async def test_a_secret_put_at_one_worker_is_delivered_to_a_sandbox_of_the_other(
    workers: list[httpx.AsyncClient],
) -> None:
    box = await started(workers[0], "secretive")
    for number in range(4):
        name, value = f"KEY_{number}", f"value-of-{number}-very-long"
        answer = await workers[number % 2].put(f"/v1/contexts/secretive/secrets/{name}", json={"value": value})
        assert answer.status_code < 300, answer.text
        said = await workers[1 - number % 2].post(f"{box}/commands", json={"command": f"cat /run/secrets/{name}"})
        assert "very-long" not in said.text and said.json()["exit_code"] == 0, "delivered, and hidden in the answer"


async def test_metrics_are_those_of_the_whole_server(workers: list[httpx.AsyncClient]) -> None:
    name = 'carrel_operation_seconds_count{kind="shell",name="run_command",outcome="ok"}'

    async def count(client: httpx.AsyncClient) -> float:
        text = (await client.get("/metrics")).text
        [line] = [line for line in text.splitlines() if line.startswith(name)] or [f"{name} 0"]
        return float(line.split()[-1])

    box = await started(workers[0], "counted")
    before = await count(workers[0])
    for each in workers:
        assert (await each.post(f"{box}/commands", json={"command": "true"})).status_code == 200
    assert [await count(each) for each in workers] == [before + 2, before + 2]
    openmetrics = await workers[1].get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert openmetrics.text.endswith("# EOF\n") and name in openmetrics.text


async def test_every_worker_knows_what_all_sandboxes_use(workers: list[httpx.AsyncClient]) -> None:
    owned: dict[int, str] = {}
    for number in range(20):  # a worker with more sandboxes than the other gives new ones away
        box = await started(workers[number % 2], f"used-{number}")
        owned.setdefault(await owner_of(workers, box), box)
        if len(owned) == 2:
            break
    boxes = list(owned.values())
    assert len(boxes) == 2
    ids = {(await workers[0].get(box)).json()["id"] for box in boxes}

    async def memory(client: httpx.AsyncClient) -> tuple[dict[str, float], dict[str, float]]:
        """What the list and the metrics say of these sandboxes."""
        items = (await client.get("/v1/sandboxes?limit=1000")).json()["items"]
        listed = {info["id"]: (info["resources"] or {}).get("memory_bytes") for info in items if info["id"] in ids}
        lines = re.findall(
            r'^carrel_sandbox_memory_bytes{sandbox="([^"]+)".*} (.+)$',
            (await client.get("/metrics")).text,
            re.MULTILINE,
        )
        return listed, {id: float(value) for id, value in lines if id in ids}

    for each in workers:
        async with asyncio.timeout(30):
            while True:  # a measurement is shared for a while
                listed, shown = await memory(each)
                if all(listed.values()) and set(shown) == ids:
                    break
                await asyncio.sleep(0.05)
        assert all(0 < value < 1 << 28 for value in (*listed.values(), *shown.values())), "each is counted once"
    for box in boxes:
        assert (await workers[0].post(f"{box}/terminate")).status_code == 200
    assert (await memory(workers[1]))[1] == {}


async def test_a_killed_writer_is_replaced_and_no_record_is_lost_or_written_twice(
    server: ServerWithWorkers, workers: list[httpx.AsyncClient]
) -> None:
    boxes = [await started(workers[number], f"written-{number}") for number in range(2)]
    answered = dict.fromkeys(boxes, 0)
    killed = 0

    async def work(box: str, client: httpx.AsyncClient) -> None:
        while killed < 3 or answered[box] < 60:
            answer = await client.post(f"{box}/commands", json={"command": "true"})
            if answer.status_code == 200:
                answered[box] += 1
            else:  # it was not dispatched
                assert answer.status_code == 503 and answer.json()["retry"] is True, answer.text

    working = [asyncio.create_task(work(*pair)) for pair in zip(boxes, workers, strict=True)]
    for count in range(3):
        former, before = server.writer(), sum(answered.values())
        await until(lambda before=before: sum(answered.values()) > before + 5, what="commands")
        assert former is not None
        os.kill(former, signal.SIGKILL)
        await until(lambda former=former: server.writer() not in {None, former}, what="the next writer")
        killed = count + 1
    await asyncio.gather(*working)
    key = (await workers[0].get("/v1/audit/key")).json()["key"]

    async def whole() -> str | None:  # the ends of the last commands follow soon
        exported = (await workers[0].get("/v1/audit/export")).content
        verdict = verify(io.BytesIO(exported), keys=[key])
        assert verdict.ok, verdict
        return None if verdict.open else exported.decode()

    exported = await until(whole, what="the ends of all commands")
    for box in boxes:
        chain = f'"chain":"context:{box.rpartition("/")[2]}"'
        lines = [line for line in exported.splitlines() if chain in line and '"name":"run_command"' in line]
        ends = [json.loads(line)["record"] for line in lines if '"type":"end"' in line]
        assert sum(each["result"] == "ok" for each in ends) == answered[box]
        assert len({each["ref"] for each in ends}) == len(ends), "no record is there twice"


async def test_a_killed_worker_is_replaced_and_its_sandboxes_run_on(
    server: ServerWithWorkers, workers: list[httpx.AsyncClient]
) -> None:
    boxes = [await started(workers[0], f"lives-{number}") for number in range(4)]
    box = boxes[0]
    index = await owner_of(workers, box)
    running = (await workers[0].post(f"{box}/commands/start", json={"command": "sleep 3600"})).json()["id"]
    before = await workers[0].post(f"{box}/commands", json={"command": "readlink /proc/1/ns/pid"})
    survivor, dead = workers[1 - index], server.pids()[index]
    stream = survivor.stream("POST", f"{box}/commands/stream", json={"command": "echo begun; sleep 3600"})
    terminal = await connect(
        f"{server.url.replace('http', 'ws')}/v1/sandboxes/{boxes[0].rpartition('/')[2]}/terminals?rows=24&cols=80",
        additional_headers={"authorization": f"Bearer {server.token}"},
        proxy=None,
    )
    async with stream as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        os.kill(dead, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises((httpx.RemoteProtocolError, StopAsyncIteration)):
            while True:
                await anext(lines)
    with suppress(Exception):  # it ends, by an error or with the exit of its process, and does not hang
        async with asyncio.timeout(10):
            async for _ in terminal:
                pass
    await terminal.close()
    answered = await until_answered(survivor, "POST", f"{box}/commands", json={"command": "readlink /proc/1/ns/pid"})
    took = time.monotonic() - began
    assert answered.status_code == 200, answered.text
    assert answered.json()["stdout"] == before.json()["stdout"], "it is the same sandbox"
    assert took < ADOPTED_S, took
    assert (await survivor.get(f"{box}/commands/{running}")).json()["running"] is True
    assert server.pids()[index] != dead
    for each in boxes:
        said = await until_answered(survivor, "POST", f"{each}/commands", json={"command": "echo on"})
        assert said.json()["stdout"] == "on\n"
    assert f"worker {index} has died; another takes its place" in server.log.read_text()


async def test_no_operation_is_lost_silently_when_a_worker_is_killed_under_load(
    server: ServerWithWorkers, workers: list[httpx.AsyncClient]
) -> None:
    boxes = [await started(workers[number % 2], f"load-{number}") for number in range(4)]
    done: dict[str, list[int]] = {box: [] for box in boxes}
    unsure: dict[str, list[int]] = {box: [] for box in boxes}
    stop = asyncio.Event()

    async def work(box: str, client: httpx.AsyncClient) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                answer = await client.post(f"{box}/commands", json={"command": f"echo {number} >> log"})
            except httpx.TransportError:
                unsure[box].append(number)
                continue
            if answer.status_code == 200:
                done[box].append(number)
            else:
                assert answer.status_code == 503 and answer.json()["retry"] is True, answer.text
                unsure[box].append(number)

    clients = [server.http() for _ in boxes]
    working = [asyncio.create_task(work(*pair)) for pair in zip(boxes, clients, strict=True)]
    await until(lambda: all(len(each) > 5 for each in done.values()), what="load")
    for index in (0, 1):
        dead = server.pids()[index]
        os.kill(dead, signal.SIGKILL)
        await until(lambda index=index, dead=dead: server.pids().get(index) not in {None, dead}, what="the next one")
        counts = {box: len(each) for box, each in done.items()}
        await until(lambda counts=counts: all(len(done[box]) > counts[box] + 5 for box in boxes), what="work")
    stop.set()
    await asyncio.gather(*working)
    for box in boxes:
        text = (await until_answered(workers[0], "GET", f"{box}/files/content", params={"path": "log"})).text
        written = [int(line) for line in text.splitlines()]
        assert set(done[box]) <= set(written), "what was answered was done"
        assert len(written) == len(set(written)), "and nothing twice"
        assert set(written) <= {*done[box], *unsure[box]}
    for client in clients:
        await client.aclose()


async def test_a_worker_that_dies_again_and_again_waits(server: ServerWithWorkers) -> None:
    for _ in range(3):
        pids = server.pids()
        os.kill(pids[1], signal.SIGKILL)
        await until(lambda pids=pids: server.pids().get(1) not in {None, pids[1]}, what="the next one")
    assert "times soon after its start; the next one starts in" in server.log.read_text()
    async with server.http() as client:
        assert (await client.get("/readyz")).status_code == 200


async def test_the_limit_on_sandboxes_is_that_of_the_server(carrel_forks: None) -> None:
    path = tempfile.mkdtemp(prefix="carrel-w-")
    flags = {"data_dir": path, "port": 0, "volumes": "directory", "max_sandboxes": 3}
    try:
        with server_with_workers(load(flags, environ={}), 2) as server:
            async with server.http() as client:
                for number in range(3):
                    await started(client, f"c{number}")
                refused = await client.post("/v1/sandboxes", json={"context_id": "more"})
                assert refused.status_code == 429 and "3 sandboxes run already" in refused.text
                assert (await client.post("/v1/sandboxes/c0/terminate", json={})).status_code == 200
                asked = (client.post("/v1/sandboxes", json={"context_id": f"d{number}"}) for number in range(8))
                states = [answer.status_code for answer in await asyncio.gather(*asked)]
                assert states.count(201) <= 1 and set(states) <= {201, 429}, states
                if 201 not in states:  # each saw the other take the last place
                    await started(client, "last")
                nodes = (await client.get("/v1/nodes")).json()["items"]
                assert [each["capacity"] for each in nodes] == [2, 1]
                assert all(each["state"] == "running" for each in nodes)
    finally:
        shutil.rmtree(path)


async def test_a_killed_server_is_taken_over_with_another_number_of_workers(carrel_forks: None) -> None:
    path = tempfile.mkdtemp(prefix="carrel-w-")
    settings = load({"data_dir": path, "port": 0, "volumes": "directory"}, environ={})
    said = {}
    try:
        for count in (3, 2, 1):
            with server_with_workers(settings, count) as server:
                async with server.http() as client:
                    if not said:
                        for number in range(4):
                            box = await started(client, f"c{number}")
                            answer = await client.post(f"{box}/commands", json={"command": "readlink /proc/1/ns/pid"})
                            said[box] = answer.json()["stdout"]
                    for box, before in said.items():
                        answer = await client.post(f"{box}/commands", json={"command": "readlink /proc/1/ns/pid"})
                        assert answer.json().get("stdout") == before, answer.text
                if count > 1:
                    pids = psutil.Process(server.process.pid).children()
                    os.kill(server.process.pid, signal.SIGKILL)
                    server.process.wait(30)
                    await until(lambda pids=pids: not any(is_running(each) for each in pids), what="the workers' end")
                    os.unlink(os.path.join(path, "server.json"))
    finally:
        shutil.rmtree(path)


def is_running(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def test_workers_beside_another_server_on_one_database(postgres: Postgres, carrel_forks: None) -> None:
    schema = f"workers_{secrets.token_hex(4)}"
    await postgres.execute(f"CREATE SCHEMA {schema}")
    fleet = Fleet(postgres.url(search_path=schema))
    try:
        for name, count in (("several", "2"), ("one", "1")):
            fleet.start(name, CARREL_WORKERS=count)
            fleet.ready(name)  # one after the other: the first makes the tables
        async with fleet.http("several") as several, fleet.http("one") as one:
            nodes = (await one.get("/v1/nodes")).json()["items"]
            assert {each["name"]: each["state"] for each in nodes} == dict.fromkeys(
                ("one", "several:0", "several:1"), "running"
            )
            for number in range(8):  # wherever it starts, everybody reaches it
                box = await started(one if number % 2 else several, f"spread-{number}")
                for client in (several, one):
                    answer = await client.post(f"{box}/commands", json={"command": "echo on"})
                    assert answer.json().get("stdout") == "on\n", answer.text
            assert (await one.post("/v1/sandboxes/spread-0/stop", json={})).status_code == 200
            assert (await one.post("/v1/sandboxes", json={"context_id": "spread-0"})).status_code in {200, 201}
            answer = await several.post("/v1/sandboxes/spread-0/commands", json={"command": "ls -d scripts"})
            assert answer.json().get("stdout") == "scripts\n", answer.text
    finally:
        fleet.close()


def test_nothing_is_left_behind(carrel_forks: None) -> None:
    path = tempfile.mkdtemp(prefix="carrel-w-")
    try:
        with server_with_workers(load({"data_dir": path, "port": 0, "volumes": "directory"}, environ={}), 2) as server:
            headers = {"authorization": f"Bearer {server.token}"}
            for number in range(4):
                httpx.post(f"{server.url}/v1/sandboxes", json={"context_id": f"c{number}"}, headers=headers, timeout=60)
            children = psutil.Process(server.process.pid).children(recursive=True)
        assert not any(is_running(each) for each in children)
        assert not (Path(path) / "server.json").exists()
        assert os.listdir(os.path.join(path, "run")) == []
    finally:
        shutil.rmtree(path)


def test_a_worker_that_cannot_start_ends_the_server_with_its_reason(carrel_forks: None) -> None:
    path = tempfile.mkdtemp(prefix="carrel-w-")
    Path(path, "carrel.db").write_bytes(b"this is not a database, however long it is" * 100)
    try:
        with (
            pytest.raises(pytest.fail.Exception, match="cannot be used"),
            server_with_workers(load({"data_dir": path, "port": 0}, environ={}), 2),
        ):
            pass
    finally:
        shutil.rmtree(path)


@pytest.mark.parametrize(
    ("more", "field"), [({"node_url": "http://127.0.0.1:1"}, "node_url"), ({"kubernetes.enabled": True}, "workers")]
)
def test_what_several_workers_cannot_have_is_refused(tmp_path: Path, more: dict[str, object], field: str) -> None:
    flags = {"data_dir": str(tmp_path / "data"), "port": 0, "workers": 2, "spiffe.source": "carrel", **more}
    with pytest.raises(InvalidRequest) as caught:
        serve(load(flags, environ={}))
    assert caught.value.field == field and not (tmp_path / "data").exists()
