from __future__ import annotations

import asyncio
import uuid

import pytest

from carrel import AsyncClient, Client
from carrel.errors import CommandFailed, InvalidRequest, NotFound
from carrel.models import JobState


def test_a_job_in_a_context(client: Client) -> None:
    name = f"j{uuid.uuid4().hex[:8]}"
    job = client.jobs.submit(
        "cat in > out/report; echo said", context=name, files={"in": "x", "out/other": b"y"}, artifacts=["out/r*"]
    )
    info = job.wait(30, check=True)
    assert info.state is JobState.SUCCEEDED and job.state is JobState.SUCCEEDED
    assert job.output().text == "said\n"
    assert [chunk.text for chunk in job.logs()] == ["said\n"]
    found = job.artifacts()
    assert [each.path for each in found.items] == ["out/report"] and found.context_id == name
    assert client.sandbox(found.context_id).files.read("out/report") == b"x"
    assert [event.kind for event in job.events(follow=False)] == ["job.queued", "job.started", "job.ended"]
    assert [each.id for each in client.jobs.list(context=name)] == [job.id]
    assert client.jobs.get(job.id).state is JobState.SUCCEEDED


def test_failures_and_refusals(client: Client) -> None:
    name = f"j{uuid.uuid4().hex[:8]}"
    job = client.jobs.submit("echo no; exit 2", context=name)
    with pytest.raises(CommandFailed, match="exit code 2"):
        job.wait(30, check=True)
    assert job.retry().wait(30).exit_code == 2
    with pytest.raises(InvalidRequest, match="could never pass"):
        client.jobs.submit("true", timeouts={"run_s": 1, "heartbeat_s": 2})
    with pytest.raises(NotFound):
        client.jobs.get("job-00000000000000000000")


async def test_output_is_followed_through_retries(async_client: AsyncClient) -> None:
    name = f"j{uuid.uuid4().hex[:8]}"
    work = "echo x >> n; for i in 1 2 3; do echo $(wc -l < n) $i; sleep 0.1; done; test $(wc -l < n) = 2"
    job = await async_client.jobs.submit(work, context=name, retries=1, backoff_s=0.1)
    said = "".join([chunk.text async for chunk in job.logs()])
    assert said == "1 1\n1 2\n1 3\n2 1\n2 2\n2 3\n"
    assert (await job.wait()).attempt == 2
    assert (await job.output(attempt=1)).text == "1 1\n1 2\n1 3\n"


async def test_cancel(async_client: AsyncClient) -> None:
    job = await async_client.jobs.submit("sleep 60", context=f"j{uuid.uuid4().hex[:8]}")
    waiting = asyncio.ensure_future(job.wait())
    assert (await job.wait(0.1)).state in {JobState.QUEUED, JobState.RUNNING}
    await job.cancel()
    assert (await waiting).state is JobState.CANCELLED
