"""The MCP servers of a sandbox and their routes: declare, connect, send, stop, list, log.

Messages are passed on without being parsed; the control plane does that. A server runs like a command, with the same
variables, user, limits and masks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace

from carrel.errors import InvalidRequest, LimitExceeded, NotFound
from carrel.supervisor.command import Order
from carrel.supervisor.commands import Commands
from carrel.supervisor.http import HttpRequest, HttpResponse, HttpRouter, Json, json_response, require_known
from carrel.supervisor.mcp_lines import MOST_LINE
from carrel.supervisor.mcp_log import KEPT
from carrel.supervisor.mcp_server import Server, ServerDeclaration
from carrel.supervisor.output import ByteBudget
from carrel.supervisor.python.calls import environment_path, python_in

MOST_SERVERS = 16
MOST_GENERATION = 256
LOG_LIMIT = 64 * 1024
DEADLINE_MS, LONGEST_DEADLINE_MS = 10_000, 60_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FIELDS = {"command", "cwd", "variables", "secrets", "environment", "generation"}


class McpServerRoutes:
    """`/mcp`."""

    def __init__(
        self,
        commands: Commands,
        order: Callable[[Json], Order],
        release: Callable[[Order], None],
        secret: Callable[[str], str],
    ):
        self._commands = commands
        self._order = order
        self._release = release
        self._secret = secret
        self._room = ByteBudget(0)
        self._count = itertools.count(1)
        self._servers: dict[str, Server] = {}

    def configure(self, room: int) -> None:
        """Set how many bytes the unfinished lines of all servers may use."""
        self._room = ByteBudget(room)

    def routes(self, router: HttpRouter) -> None:
        router.add("GET", "/mcp", self._list)
        router.add("GET", "/mcp/{}", self._info)
        router.add("PUT", "/mcp/{}", self._declare)
        router.add("DELETE", "/mcp/{}", self._delete)
        router.add("POST", "/mcp/{}/stop", self._stop)
        router.add("POST", "/mcp/{}/connect", self._connect)
        router.add("POST", "/mcp/{}/send", self._send)
        router.add("GET", "/mcp/{}/log", self._log)

    def _get(self, request: HttpRequest) -> Server:
        name = request.args[0]
        try:
            return self._servers[name]
        except KeyError:
            raise NotFound(f"no MCP server {name[:64]!r} in this sandbox", hint="declare it first") from None

    async def _list(self, _request: HttpRequest) -> HttpResponse:
        return json_response({"items": [server.info() for server in self._servers.values()]})

    async def _info(self, request: HttpRequest) -> HttpResponse:
        return json_response(self._get(request).info())

    async def _declare(self, request: HttpRequest) -> HttpResponse:
        name = request.args[0]
        declared = self._declaration(await request.json())
        if not _NAME.fullmatch(name):
            raise InvalidRequest("this is not a valid name for an MCP server", field="name")
        while (known := self._servers.get(name)) is not None:
            try:
                await known.declare(declared)
            except NotFound:  # removed while we waited
                continue
            return json_response(known.info())
        if len(self._servers) >= MOST_SERVERS:
            raise LimitExceeded(f"there are {MOST_SERVERS} MCP servers already", field="name", hint="remove one")
        server = Server(name, self._commands, self._room, lambda: next(self._count), declared)
        self._servers[name] = server
        return json_response(server.info(), 201)

    def _declaration(self, body: Json) -> ServerDeclaration:
        require_known(body, _FIELDS, "field")
        command, cwd, generation = body.get("command"), body.get("cwd"), body.get("generation")
        if not isinstance(command, list) or not command or not command[0]:
            raise InvalidRequest("'command' must be a list of texts that begins with a program", field="command")
        if not isinstance(generation, str) or not 0 < len(generation) <= MOST_GENERATION:
            why = f"'generation' must be a text of 1 to {MOST_GENERATION} characters"
            raise InvalidRequest(why, field="generation")
        environment = body.get("environment")
        place = None if environment is None else environment_path(environment, "environment")
        wanted: Json = {"command": command, "cwd": cwd, "env": body.get("variables")}
        secrets = body.get("secrets") or {}
        if not isinstance(secrets, dict) or not all(isinstance(each, str) for each in secrets.values()):
            raise InvalidRequest("'secrets' must map variables to names of secrets", field="secrets")
        # Check now everything except the directory and the values of secrets, which may come before the first start.
        for env in (wanted["env"], secrets):
            self._release(self._order({**wanted, "cwd": None, "env": env}))
        if cwd is not None and not isinstance(cwd, str):
            raise InvalidRequest("'cwd' must be text", field="cwd")

        def order() -> Order:
            if place is not None:
                python_in(place, "environment")
            given = {**(wanted["env"] or {}), **{name: self._secret(secret) for name, secret in secrets.items()}}
            return _within(place, self._order({**wanted, "env": given}), given)

        return ServerDeclaration(generation, order, self._release)

    async def _delete(self, request: HttpRequest) -> HttpResponse:
        server = self._get(request)
        await server.close()
        del self._servers[server.name]
        return HttpResponse(204)

    async def _stop(self, request: HttpRequest) -> HttpResponse:
        server = self._get(request)
        await server.stop()
        return json_response(server.info())

    async def _connect(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(stream=await self._get(request).connect(), content_type=b"application/x-carrel-frames")

    async def _send(self, request: HttpRequest) -> HttpResponse:
        server = self._get(request)
        incarnation = request.number("incarnation", 0)
        deadline = request.number("deadline_ms", DEADLINE_MS)
        if not 0 < deadline <= LONGEST_DEADLINE_MS:
            raise InvalidRequest(f"'deadline_ms' must be from 1 to {LONGEST_DEADLINE_MS}", field="deadline_ms")
        line = await request.read(MOST_LINE)
        if not line or b"\n" in line:
            raise InvalidRequest("the body must be one line, without its end", field="body")
        await server.send(incarnation, line, deadline / 1000)
        return HttpResponse(204)

    async def _log(self, request: HttpRequest) -> HttpResponse:
        server = self._get(request)
        limit = request.number("limit", LOG_LIMIT)
        if not 0 < limit <= KEPT:
            raise InvalidRequest(f"'limit' must be from 1 to {KEPT}", field="limit")
        return json_response(server.log.read(request.number("offset", 0), limit))


def _within(place: str | None, order: Order, given: dict[str, str]) -> Order:
    """Return an order that finds the programs of an environment first. Variables of the caller win."""
    if place is None:
        return order
    path = f"{place}/bin:{order.env.get('PATH', '')}"
    return replace(order, env={**order.env, "PATH": path, "VIRTUAL_ENV": place, **given})
