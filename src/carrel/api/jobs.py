"""Jobs: submit, list, show, wait, cancel, retry; their output and artifacts."""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.commands import EVENTS
from carrel.api.guard import GuardedRouter, require
from carrel.api.parameters import Path, Query
from carrel.api.parts import Plane, Who, as_json, caller_of, event_stream, json_of, plane_of
from carrel.errors import InvalidRequest
from carrel.models import JobArtifacts, JobInfo, JobPage, JobRequest, JobState
from carrel.models.operations import (
    CANCEL_JOB,
    GET_JOB,
    GET_JOB_LOGS,
    LIST_JOB_ARTIFACTS,
    LIST_JOBS,
    RETRY_JOB,
    SUBMIT_JOB,
    WAIT_JOB,
)

router = GuardedRouter(tags=["jobs"])

LONGEST_WAIT_S = 600.0
_MOST = 2**63 - 1
Id = Annotated[str, Path(alias="job_id", max_length=64, description="id of a job")]
_IDEMPOTENCY_KEY = {
    "name": "idempotency-key",
    "in": "header",
    "required": False,
    "description": "the same key gives the same job",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}


@router.operation(
    SUBMIT_JOB,
    "Submit a job",
    {"model": JobInfo, "description": "It is stored, and will run"},
    409,
    413,
    429,
    status=202,
    parses=JobRequest,
    openapi_extra={"parameters": [_IDEMPOTENCY_KEY]},
)
async def submit_job(request: Request) -> Response:
    """Answers when the job is stored: from then on it reaches an end that can be seen, whatever dies meanwhile."""
    wanted, caller = await json_of(request, JobRequest), caller_of(request)
    if wanted.context_id is not None:
        require(caller, SUBMIT_JOB, wanted.context_id)
    elif (refused := caller.identity.lacks(SUBMIT_JOB.id)) is not None:
        raise refused
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= 255:
        raise InvalidRequest(
            "'idempotency-key' is not valid: it has 1 to 255 characters", field="idempotency-key", hint="see /docs"
        )
    return as_json(await plane_of(request).jobs.submit(caller, wanted, key), 202)


@router.operation(LIST_JOBS, "List jobs", JobPage)
async def list_jobs(
    plane: Plane,
    caller: Who,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=512, description="`next` of the page before")] = None,
    state: Annotated[JobState | None, Query(description="only in this state")] = None,
    context_id: Annotated[str | None, Query(max_length=128)] = None,
) -> Response:
    """Newest first, within the reach of the token."""
    states = None if state is None else [state]
    return as_json(await plane.jobs.page(caller, limit=limit, cursor=cursor, states=states, context_id=context_id))


@router.operation(GET_JOB, "One job", JobInfo, 404)
async def get_job(id: Id, plane: Plane, caller: Who) -> Response:
    """With what became of it."""
    return as_json(await plane.jobs.get(caller, id))


@router.operation(WAIT_JOB, "Wait for the end of a job", JobInfo, 404)
async def wait_job(
    id: Id,
    plane: Plane,
    caller: Who,
    timeout: Annotated[
        float, Query(ge=0, le=LONGEST_WAIT_S, description="seconds; then the job comes as it is by then")
    ] = 60.0,
) -> Response:
    """Answers when the job has ended, or the time is over."""
    return as_json(await plane.jobs.wait(caller, id, timeout))


@router.operation(GET_JOB_LOGS, "The output of a job", EVENTS, 404)
async def get_job_logs(
    request: Request,
    id: Id,
    plane: Plane,
    caller: Who,
    offset: Annotated[int, Query(ge=0, le=_MOST, description="the offset of an earlier line, to go on from there")] = 0,
    attempt: Annotated[int | None, Query(ge=1, le=10_000, description="by default the newest")] = None,
    follow: Annotated[bool, Query(description="go on until the attempt has ended")] = False,
) -> Response:
    """As the output of a command. It is kept with the record of the job, also when the sandbox is gone."""
    chunks = plane.jobs.logs(caller, id, offset=offset, attempt=attempt, follow=follow)
    return await event_stream(request, chunks, offset=offset)


@router.operation(LIST_JOB_ARTIFACTS, "The files that a job produced", JobArtifacts, 404)
async def list_job_artifacts(id: Id, plane: Plane, caller: Who) -> Response:
    """As they were at its end. They are read from the workspace of its context."""
    return as_json(await plane.jobs.artifacts(caller, id))


@router.operation(CANCEL_JOB, "Cancel a job", JobInfo, 404)
async def cancel_job(id: Id, plane: Plane, caller: Who) -> Response:
    """TERM to all its processes, a grace, KILL. The event `job.ended` confirms that it has ended."""
    return as_json(await plane.jobs.cancel(caller, id))


@router.operation(RETRY_JOB, "Submit an ended job again", JobInfo, 404, 409, 413, 429, status=202)
async def retry_job(id: Id, plane: Plane, caller: Who) -> Response:
    """As a new job with `retry_of`; the old one stays as it ended."""
    return as_json(await plane.jobs.retry(caller, id), 202)
