"""The tables of E2B's calls, and who answers them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.e2b import code, files, filesystem, process, watching
from carrel.api.e2b import control as control_api
from carrel.api.e2b.access import SandboxAccess, Signed
from carrel.api.e2b.answers import Failure, SandboxGone, as_json, connect_error, failed_stream, plain
from carrel.api.e2b.inner import Inner, Json
from carrel.api.e2b.sandboxes import Box, Kept, sandbox_of
from carrel.identity import Identity

ENVD, CODE = 49983, 49999
Handler = Callable[[Request, Box], Awaitable[Response]]


def _compiled(routes: Iterable[tuple[str, str, Any]]) -> list[tuple[str, re.Pattern[str], Any]]:
    return [
        (method, re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path) + "/?"), handler)
        for method, path, handler in routes
    ]


async def _health(request: Request, box: Box) -> Response:
    if (await box.info())["state"] not in {"creating", "running"}:
        raise SandboxGone(box.id)
    return Response(status_code=204)


async def _envs(request: Request, box: Box) -> Response:
    return as_json({})


ENVD_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/health", _health),
    ("GET", "/files", files.read),
    ("POST", "/files", files.write),
    ("GET", "/envs", _envs),
    *(("POST", f"/process.Process/{name}", handler) for name, handler in process.CALLS.items()),
    *(("POST", f"/filesystem.Filesystem/{name}", handler) for name, handler in filesystem.CALLS.items()),
    *(("POST", f"/filesystem.Filesystem/{name}", handler) for name, handler in watching.CALLS.items()),
)
STREAMS = process.STREAMS | watching.STREAMS
_CONTROL, _ENVD, _CODE = _compiled(control_api.ROUTES), _compiled(ENVD_ROUTES), _compiled(code.ROUTES)


def _found(table: list[tuple[str, re.Pattern[str], Any]], request: Request) -> Any:
    """Return the handler of a request, and give the request the names in its path; None if there is none."""
    for method, pattern, handler in table:
        if method == request.method and (match := pattern.fullmatch(request.scope["path"])) is not None:
            request.scope["path_params"] = match.groupdict()
            return handler
    return None


async def control(inner: Inner, access: SandboxAccess, domain: str | None, request: Request) -> Response:
    """Answer a request of the control API."""
    handler = _found(_CONTROL, request)
    if handler is not None:
        answer: Response = await handler(control_api.Control(inner, access, domain), request)
        return answer
    path = request.scope["path"]
    for prefix, why in control_api.UNSERVED:
        if path == prefix or path.startswith(prefix + "/"):
            raise Failure(501, f"{request.method} {path[:200]} is not served by carrel: {why}")
    raise Failure(404, f"{request.method} {path[:200]} is no call of E2B's API that carrel knows")


async def inside(port: int, inner: Inner, sandbox: str, request: Request) -> Response:
    """Answer a request for a port of a sandbox."""
    table = {ENVD: _ENVD, CODE: _CODE}.get(port)
    if table is None:
        raise Failure(400, f"port {port} is not served by these headers: use the URL of the port")
    handler = _found(table, request)
    if handler is None:
        raise Failure(501, f"{request.method} {request.scope['path'][:200]} is not served by carrel")
    answer: Response = await handler(request, Box(inner, sandbox))
    return answer


def refusal(port: int, request: Request, error: Exception) -> Response:
    """Return an error in the form of the call that was made."""
    if port == CODE:
        return code.refusal(error)
    service, _, call = request.scope["path"].rpartition("/")
    if "." not in service:
        return plain(error)
    if call not in STREAMS:
        return connect_error(error)

    return failed_stream(error)


def unexpected() -> Response:
    body: Json = {"code": 500, "message": "carrel failed in a way it did not expect; the server's log says more"}
    return as_json(body, 500)


def signature_of(request: Request) -> Signed:
    query = request.query_params
    operation = "read" if request.method == "GET" else "write"
    signed = Signed(
        query.get("path", ""),
        operation,
        query.get("username", ""),
        query["signature"],
        query.get("signature_expiration", ""),
    )
    if signed.expired:
        raise Failure(401, "signature is already expired")
    return signed


async def signer(
    access: SandboxAccess, signed: Signed, sandbox: str, running: list[tuple[str, dict[str, str]]]
) -> tuple[str, Identity]:
    """Return the sandbox of a signed URL, and the identity whose access token signed it. A URL names no sandbox where
    sandboxes have no hosts: then it is found by the signature.
    """
    for context, labels in running:
        by = Kept.of({"labels": labels}).by
        for name in {context, context.partition(":")[2]} - {""}:
            if by and (not sandbox or sandbox == name):
                identity = await access.signer(by, name, signed)
                if identity is not None and sandbox_of(identity, context) == name:
                    return name, identity
    raise Failure(401, "invalid signature")
