"""HTTP for the servers of MCP and A2A: the listening socket, the settings of uvicorn, bearer tokens, error answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp

from carrel.client.locate import sendable
from carrel.connections import Connections, connections_allowed, http_protocol
from carrel.errors import CarrelError, InvalidRequest, PlatformError, Unauthorized

TOKEN_HINT = "send the header `Authorization: Bearer TOKEN`"  # noqa: S105 - not a token


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket of a server."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError):
        raise InvalidRequest(f"'{host}' is not an address to listen on", field="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        raise PlatformError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', error)}",
            field="port",
            hint="choose another with --port, or 0 for any",
        ) from None
    return listener


def is_wildcard(host: str) -> bool:
    """Return whether listening on this address means all addresses."""
    try:
        return not host or ip_address(host).is_unspecified
    except ValueError:
        return False


def url_of(host: str, port: int) -> str:
    """Return the URL that a client on this machine can use."""
    name = "127.0.0.1" if is_wildcard(host) else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


def uvicorn_config(app: ASGIApp, *, grace_s: int, **settings: Any) -> uvicorn.Config:
    """Return uvicorn's settings for an application, with carrel's limits on connections and requests."""
    connections = Connections(connections_allowed())
    return uvicorn.Config(
        app,
        http=http_protocol(connections),
        ws="none",
        backlog=connections.backlog,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=grace_s,
        **settings,
    )


def bearer_token(headers: Mapping[str, str]) -> str:
    """Return the token of a request. Raises `Unauthorized`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not sendable(token):
        raise Unauthorized("a carrel token is needed", hint=TOKEN_HINT)
    return token


def problem_response(error: CarrelError) -> Response:
    """Return the HTTP answer for an error. It is ASCII, so that any text can be sent."""
    headers = {"www-authenticate": 'Bearer realm="carrel"'} if error.status == Unauthorized.status else None
    return Response(json.dumps(error.problem()), error.status, headers, media_type="application/problem+json")


def read_token_file(path: Path) -> str:
    """Read a token from a file."""
    try:
        token = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise InvalidRequest(
            f"cannot read the token in {path}: {error.strerror}", field="approver_token_file"
        ) from None
    if not sendable(token):
        raise InvalidRequest(
            f"{path} holds no token", field="approver_token_file", hint="write the token alone, on one line"
        )
    return token
