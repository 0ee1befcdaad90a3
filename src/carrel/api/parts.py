"""Shared by the resource modules: the control plane of a request, strict query strings, answers and event streams."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import AsyncIterator
from functools import cache
from typing import Annotated, Any, TypeVar, cast
from urllib.parse import parse_qsl

from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from carrel.api.parameters import Depends, Path, Query
from carrel.api.problems import invalid
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.control.supervisor.frames import StreamChunk, TextCutter
from carrel.errors import InvalidRequest
from carrel.models import ContextId
from carrel.models.base import MAX_PATH
from carrel.primitives import tasks

M = TypeVar("M", bound=BaseModel)

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"
CALLER = "carrel.caller"
"""The key of the `Caller` in the ASGI scope of a request, which the gate sets."""


def plane_of(connection: HTTPConnection) -> ControlPlane:
    """Return the control plane of the application."""
    return cast(ControlPlane, connection.app.state.plane)


def caller_of(connection: HTTPConnection) -> Caller:
    """Return the caller of a request."""
    return cast(Caller, connection.scope[CALLER])


# The framework calls a function that is not `async` in a thread, which costs more than the function.
async def _plane(connection: HTTPConnection) -> ControlPlane:
    return plane_of(connection)


async def _caller(connection: HTTPConnection) -> Caller:
    return caller_of(connection)


Plane = Annotated[ControlPlane, Depends(_plane)]
Who = Annotated[Caller, Depends(_caller)]
SandboxId = Annotated[str, Path(alias="id", max_length=128, description="id of a sandbox, or its context id")]
Context = Annotated[ContextId, Path(alias="context_id", description="a context id")]


@cache
def _context_ids() -> TypeAdapter[str]:
    return TypeAdapter(ContextId)


def context_of(request: Request) -> str:
    """Return the context in the path of a route that the framework does not parse."""
    try:
        return _context_ids().validate_python(request.path_params["context_id"])
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise invalid([{**each, "loc": ("path", "context_id")} for each in found], None) from None


def known_query(request: Request) -> None:
    """Refuse an unknown query parameter: a misspelt flag must not be ignored."""
    if not request.scope["query_string"]:
        return
    known = request.scope["route"].query_names
    for name in request.query_params:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known here: {', '.join(sorted(known)) or 'none'}"
            raise InvalidRequest(f"there is no query parameter '{name[:100]}'", field=name[:100], hint=hint)


def _file_path(
    request: Request,
    path: Annotated[str, Query(min_length=1, max_length=MAX_PATH, description="relative to the workspace")],
) -> str:
    return raw_query(request, "path") or path


def raw_query(request: Request, name: str) -> str | None:
    """Return a query parameter; bytes that are not UTF-8 become surrogate escapes."""
    text = request.scope["query_string"].decode("latin-1")
    return dict(parse_qsl(text, keep_blank_values=True, errors="surrogateescape")).get(name)


FilePath = Annotated[str, Depends(_file_path)]


def as_json(value: BaseModel, status: int = 200) -> Response:
    """Return a model as an answer. File names may contain surrogate escapes, which only the `json` module encodes."""
    return Response(json.dumps(value.model_dump(mode="json")), status, media_type="application/json")


async def body_of(request: Request, model: type[M]) -> M:
    """Parse the body of a frequent route, without the framework."""
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False), model) from None


async def json_of(request: Request, model: type[M]) -> M:
    """Parse the body of a route like the framework, but without it: the type must be JSON, and every error names the
    field.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise _no_object("its type is not application/json")
    try:
        value = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise _no_object(str(error)[:200]) from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False), model) from None


def _no_object(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"the body is not a JSON object: {why}", field="body", hint="send a JSON object as application/json"
    )


def query_of(connection: HTTPConnection, model: type[M], *lists: str) -> M:
    """Parse the query of a frequent route, without the framework. `lists` are fields that may be given repeatedly."""
    given = connection.query_params
    try:
        return model.model_validate({**given, **{name: given.getlist(name) for name in lists}})
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False), model) from None


def described(body: type[BaseModel] | None, query: type[BaseModel] | None, *names: str) -> dict[str, Any]:
    """Return the OpenAPI description of a route whose parameters and body the framework does not see."""
    text = {"type": "string", "maxLength": 128}
    about = {"id": "id of a sandbox, or its context id", "cid": "id of a command", "context_id": "a context id"}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "description": about.get(name, name), "schema": text}
        for name in names
    ]
    if query is not None:
        fields = query.model_json_schema()["properties"].items()
        parameters += [{"name": name, "in": "query", "required": False, "schema": field} for name, field in fields]
    found: dict[str, Any] = {"parameters": parameters}
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return found


def wants_sse(request: Request) -> bool:
    return SSE in request.headers.get("accept", "")


async def _lines(chunks: AsyncIterator[StreamChunk], offset: int, sse: bool) -> AsyncIterator[bytes]:
    cutter = TextCutter(offset)
    before, after = (b"data: ", b"\n\n") if sse else (b"", b"\n")
    try:
        async for chunk in chunks:
            pieces = cutter.flush() if chunk.stream == "end" else cutter.feed(chunk)
            for piece in pieces:
                event: dict[str, object] = {"stream": piece.stream, "offset": piece.offset}
                if piece.text is not None:
                    event["text"] = piece.text
                else:
                    event["base64"] = piece.base64
                yield before + json.dumps(event).encode() + after
            if chunk.stream == "end":
                end = {"stream": "end", "offset": cutter.offset, "result": json.loads(chunk.data)}
                yield before + json.dumps(end).encode() + after
    finally:
        await chunks.aclose()  # type: ignore[attr-defined]


async def streamed_body(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it comes. Refuses a request without a body; an empty body has the length 0. A caller that
    disconnects early gets `InvalidRequest`: it is not a failure of carrel.
    """
    if "content-length" not in request.headers and "transfer-encoding" not in request.headers:
        raise InvalidRequest("there is no body", field="body", hint="send `Content-Length: 0` for an empty file")
    try:
        async for data in request.stream():
            yield data
    except ClientDisconnect:
        raise InvalidRequest("the body broke off", field="body", hint="send it again, all of it") from None


class ClosingStream(StreamingResponse):
    """A stream that is closed with the answer, also when the caller disconnects."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Unlike the framework, which cancels a stream repeatedly until it has ended, also during its
        cleanup.
        """
        sending = asyncio.ensure_future(self.stream_response(send))
        leaving = asyncio.ensure_future(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await tasks.cancel([sending, leaving])
            await self.body_iterator.aclose()  # type: ignore[attr-defined]
        if not sending.cancelled():
            sending.result()


async def event_stream(
    request: Request, chunks: AsyncIterator[StreamChunk], *, offset: int = 0, headers: dict[str, str] | None = None
) -> Response:
    """Return output events as NDJSON, or as server-sent events if requested. Opens the stream first, so that errors get
    a status.
    """
    sse = wants_sse(request)
    await anext(chunks)
    kept = {"cache-control": "no-store", **(headers or {})}
    return ClosingStream(_lines(chunks, offset, sse), media_type=SSE if sse else NDJSON, headers=kept)
