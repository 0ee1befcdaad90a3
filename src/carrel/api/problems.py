"""Every failure as a problem answer (RFC 9457), also failures that the framework finds. No answer
contains a traceback.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from carrel.errors import CarrelError, InvalidRequest, NotFound, PlatformError

log = logging.getLogger("carrel.api")

MEDIA_TYPE = "application/problem+json"
_PLACES = {"body", "query", "path", "header"}


class Problem(BaseModel):
    """A failure (RFC 9457): `code` is stable, `field` names the wrong field, `hint` the remedy."""

    model_config = ConfigDict(defer_build=True)

    type: str = Field(examples=["urn:carrel:problem:invalid_request"])
    title: str
    status: int
    code: str = Field(examples=["invalid_request"])
    detail: str
    field: str | None = None
    hint: str | None = None
    approval: str | None = Field(
        default=None, description="the approval that waits; send the request again with it once it is approved"
    )
    retry: bool | None = Field(default=None, description="whether the same request may succeed later")


_MEANING = {
    400: "The request is not valid",
    401: "No token, or an invalid one",
    403: "Denied by policy, or not permitted for this token; or a person has to decide first (`approval`)",
    404: "Not found",
    409: "Not possible in this state",
    413: "Too large",
    422: "Not supported by the provider or this host",
    429: "A limit is reached",
    502: "The sandbox is gone",
    503: "No suitable provider, or not ready",
}


_ALWAYS = (400, 401, 403, 429)


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that can fail with these statuses, and with those that every route has."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    declared: dict[int | str, dict[str, Any]] = {
        status: {"description": _MEANING[status], "content": content} for status in sorted({*_ALWAYS, *statuses})
    }
    declared["default"] = {"description": "carrel or its host failed", "content": content}
    return declared


def encode(problem: Mapping[str, object]) -> bytes:
    return json.dumps(problem, default=str).encode()


def answer(error: CarrelError, status: int | None = None, headers: Mapping[str, str] | None = None) -> Response:
    body = error.problem()
    if status is not None:
        body["status"] = status
    return Response(encode(body), status or error.status, headers=headers, media_type=MEDIA_TYPE)


def _known_fields(model: type[BaseModel] | None, location: Sequence[object]) -> set[str]:
    """Return the fields of the model of a request, or of the model inside it at this location."""
    models = set() if model is None else {model}
    for part in location:
        inner = [each.model_fields[str(part)].annotation for each in models if str(part) in each.model_fields]
        if inner:
            models = set().union(*map(_models_in, inner))
    return {name for each in models for name in each.model_fields}


def _models_in(annotation: object) -> set[type[BaseModel]]:
    """Return the models in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return set().union(*map(_models_in, get_args(annotation)))


def _name(location: Sequence[object]) -> str:
    """Return the name of the field that a validator reports, without the alternatives that it tried."""
    parts = [str(part) for part in location]
    if parts and parts[0] in _PLACES:
        parts = parts[1:]
    return ".".join(part for part in parts if not part.startswith(("constrained-", "list[", "[key]")))[:200]


def invalid(errors: Sequence[Mapping[str, Any]], model: type[BaseModel] | None) -> InvalidRequest:
    """Return the error for the findings of a validator; it describes the first and counts the others. `model` is the
    expected model; None without a body.
    """
    # An unknown field is often a misspelling of a missing one.
    first = next((each for each in errors if each.get("type") == "extra_forbidden"), errors[0])
    kind, location = str(first.get("type", "")), tuple(first.get("loc", ()))
    message = str(first.get("msg", "not valid"))
    field = _name(location) or "body"
    if (kind in {"json_invalid", "model_attributes_type", "model_type", "dict_type"} and field in {"body", "0"}) or (
        kind == "json_invalid"
    ):
        why = str((first.get("ctx") or {}).get("error", message))[:200]
        return InvalidRequest(
            f"the body is not a JSON object: {why}", field="body", hint="send a JSON object as application/json"
        )
    if kind == "extra_forbidden":
        name = field.rpartition(".")[2]
        near = difflib.get_close_matches(name, sorted(_known_fields(model, location[:-1])), n=1, cutoff=0.6)
        hint = f"did you mean '{near[0]}'?" if near else "leave it out; /docs lists the fields"
        return InvalidRequest(f"there is no field '{field}'", field=field, hint=hint)
    if kind == "missing":
        return InvalidRequest(f"'{field or 'body'}' is missing", field=field or "body", hint="add it; see /docs")
    if kind == "string_pattern_mismatch" and field.endswith("context_id"):
        message = "a context has letters, digits, '.', '_', ':' and '-', a letter or digit first, at most 128"
    return InvalidRequest(f"'{field}' is not valid: {message}", field=field, hint="see /docs", findings=len(errors))


async def _carrel(request: Request, error: Exception) -> Response:
    assert isinstance(error, CarrelError)
    if not isinstance(request, Request):
        raise error  # a WebSocket that is not open yet: the gate answers
    await _clean(request, error)
    if error.status >= 500:
        log.warning("%s %s: %s", request.method, request.url.path, error)
    return answer(error)


async def _clean(request: Request, error: CarrelError) -> None:
    """Remove secrets: an error before admission may quote the request."""
    named = request.path_params
    await request.app.state.plane.secret_values.clean_error(named.get("id") or named.get("context_id"), error)


def body_model(annotation: object) -> type[BaseModel] | None:
    """Return the model of a body of this type."""
    found = _models_in(annotation)
    return found.pop() if len(found) == 1 else None


def _methods(routes: Sequence[BaseRoute], scope: Scope) -> set[str]:
    """Return the methods of a path: the framework names only those of its first route."""
    found = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
    return {method for route in found for method in getattr(route, "methods", None) or ()}


async def _http(routes: Sequence[BaseRoute], request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = ", ".join(sorted(_methods(routes, request.scope)))
        problem = InvalidRequest(f"{request.method} is not possible here", field="method", hint=f"use {allowed}")
        return answer(problem, 405, {"allow": allowed})
    if error.status_code == 404:
        missing = NotFound(
            f"no such resource: {request.method} {request.url.path[:200]}", field="path", hint="see /docs"
        )
        await _clean(request, missing)
        return answer(missing)
    status = error.status_code if 400 <= error.status_code < 500 else 400
    # Besides the two above, the framework raises only for a body that it cannot read.
    return answer(InvalidRequest(str(error.detail)[:500], field="body", hint="see /docs"), status)


async def _unexpected(request: Request, error: Exception) -> Response:
    return answer(UNEXPECTED)


UNEXPECTED = PlatformError("carrel failed in a way it did not expect", hint="the server's log says more")


def handlers(routes: Sequence[BaseRoute]) -> dict[Any, Any]:
    """Return the handlers that answer every failure with a problem."""
    return {CarrelError: _carrel, HTTPException: partial(_http, routes), Exception: _unexpected}
