"""Calls of Python that name no sandbox."""

from __future__ import annotations

from fastapi import Depends
from starlette.responses import Response

from carrel.api.guard import Router
from carrel.api.parts import Plane, as_json, known_query
from carrel.api.problems import answer, problems
from carrel.errors import LimitExceeded
from carrel.models import StatelessRequest, StatelessResult

router = Router(tags=["python"], dependencies=[Depends(known_query)])
RETRY_AFTER_S = 1


@router.post(
    "/v1/execute",
    operation_id="execute_stateless",
    summary="Run Python code without a context",
    response_model=None,
    responses={200: {"model": StatelessResult}, **problems(404, 409, 413, 422, 429, 502, 503)},
)
async def execute_stateless(body: StatelessRequest, plane: Plane) -> Response:
    """In a sandbox of the template that only this caller's calls use, emptied after each. When all are busy for too
    long the answer is 429 with `Retry-After`.
    """
    try:
        return as_json(await plane.router.run(body))
    except LimitExceeded as error:
        return answer(error, headers={"retry-after": str(RETRY_AFTER_S)})
