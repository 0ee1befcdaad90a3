"""Python calls without a sandbox of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from carrel.api.files import BUNDLE
from carrel.api.guard import GuardedRouter
from carrel.api.parts import ClosingStream, Plane, Who, as_json, body_of, caller_of, plane_of, streamed_body
from carrel.api.problems import answer, invalid
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.control.workspaces.bundles import Incoming
from carrel.errors import InvalidRequest, LimitExceeded
from carrel.models import StatelessRequest, StatelessResult
from carrel.models.bundles import END, MEDIA_TYPE, BundlePart
from carrel.models.operations import EXECUTE_BUNDLE, EXECUTE_STATELESS

router = GuardedRouter(tags=["python"])
RETRY_AFTER_S = 1
CALL_MODEL = StatelessRequest
"""The model of a body that the framework does not see, for the OpenAPI document."""


@router.operation(
    EXECUTE_STATELESS,
    "Run Python code without a context",
    StatelessResult,
    404,
    409,
    413,
    422,
    429,
    502,
    503,
    parses=StatelessRequest,
)
async def execute_stateless(request: Request) -> Response:
    """In a sandbox of the template that only this caller uses, emptied after each call. When all are busy for too long,
    the answer is 429 with `Retry-After`.
    """
    wanted = await body_of(request, StatelessRequest)
    try:
        return as_json(await plane_of(request).router.run(caller_of(request), wanted))
    except LimitExceeded as error:
        return _later(error)


@router.operation(
    EXECUTE_BUNDLE,
    "Run Python code without a context, with files of any size",
    {"description": "A bundle: the result, then what was produced", "content": BUNDLE},
    404,
    409,
    413,
    422,
    429,
    502,
    503,
    openapi_extra={"requestBody": {"required": True, "content": BUNDLE}},
)
async def execute_bundle(plane: Plane, caller: Who, request: Request) -> Response:
    """A bundle: the request as its first part, then the files for it, which are taken in once there is a sandbox. It is
    kept until the answer was sent.
    """
    incoming = Incoming(streamed_body(request))
    first = await incoming.part()
    if first is None or first.kind != "request":
        raise InvalidRequest(
            "the first part of the bundle must be the request", field="body", hint="the SDK writes and reads bundles"
        )
    try:
        wanted = StatelessRequest.model_validate_json(await incoming.whole(first))
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False), StatelessRequest) from None
    parts = _parts(plane, caller, wanted, incoming)
    try:
        result = await anext(parts)  # what fails until now has a status of its own
    except LimitExceeded as error:
        return _later(error)
    return ClosingStream(_from(result, parts), media_type=MEDIA_TYPE)


async def _parts(
    plane: ControlPlane, caller: Caller, wanted: StatelessRequest, incoming: Incoming
) -> AsyncIterator[bytes]:
    async def put(sandbox: str) -> None:
        await plane.bundles.write(caller, sandbox, incoming)

    async with plane.router.running(caller, wanted, put) as (sandbox, result):
        text = as_json(result).body
        yield BundlePart("result", len(text)).head() + bytes(text)
        async with aclosing(plane.bundles.read(caller, sandbox, result.files_produced)) as produced:  # type: ignore[type-var]
            async for piece in produced:
                yield piece
        yield END


async def _from(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(others):  # type: ignore[type-var]
        yield first
        async for piece in others:
            yield piece


def _later(error: LimitExceeded) -> Response:
    return answer(error, headers={"retry-after": str(RETRY_AFTER_S)})
