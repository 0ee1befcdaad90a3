"""The routes of code contexts and their cells. A context starts with its first cell."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from carrel.errors import Conflict, InvalidRequest, LimitExceeded, NotFound
from carrel.supervisor.answers import frames_of
from carrel.supervisor.command import Order
from carrel.supervisor.commands import Commands
from carrel.supervisor.http import HttpRequest, HttpResponse, HttpRouter, Json, json_response
from carrel.supervisor.python.calls import MOST_CODE, OUTPUT_LIMIT, Python
from carrel.supervisor.python.cell import Cell
from carrel.supervisor.python.contexts import CodeContext, ContextLaunch

MOST_CONTEXTS = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class CodeContexts:
    """`/contexts`."""

    def __init__(self, commands: Commands, python: Python, release: Callable[[Order], None]):
        self._commands = commands
        self._python = python
        self._release = release
        self._contexts: dict[str, CodeContext] = {}

    @property
    def busy(self) -> int:
        """The number of contexts with a running or waiting cell."""
        return sum(context.busy for context in self._contexts.values())

    def __len__(self) -> int:
        return len(self._contexts)

    async def close(self) -> None:
        while self._contexts:
            _, context = self._contexts.popitem()
            await context.close()

    def routes(self, router: HttpRouter) -> None:
        router.add("GET", "/contexts", self._list)
        router.add("GET", "/contexts/{}", self._info)
        router.add("DELETE", "/contexts/{}", self._delete)
        router.add("POST", "/contexts/{}/interrupt", self._interrupt)
        router.add("POST", "/contexts/{}/restart", self._restart)
        router.add("POST", "/contexts/{}/cells", self._run)
        router.add("GET", "/contexts/{}/cells/{}", self._result)
        router.add("GET", "/contexts/{}/cells/{}/output", self._output)

    def _get(self, request: HttpRequest) -> CodeContext:
        name = request.args[0]
        try:
            return self._contexts[name]
        except KeyError:
            raise NotFound(f"no code context {name[:64]!r} in this sandbox", hint="run a cell in it first") from None

    async def _list(self, _request: HttpRequest) -> HttpResponse:
        return json_response({"items": [context.info() for context in self._contexts.values()]})

    async def _info(self, request: HttpRequest) -> HttpResponse:
        return json_response(self._get(request).info())

    async def _delete(self, request: HttpRequest) -> HttpResponse:
        context = self._get(request)
        del self._contexts[context.name]
        await context.close()
        return HttpResponse(204)

    async def _interrupt(self, request: HttpRequest) -> HttpResponse:
        context = self._get(request)
        context.interrupt()
        return json_response(context.info())

    async def _restart(self, request: HttpRequest) -> HttpResponse:
        context = self._get(request)
        await context.restart()
        return json_response(context.info())

    async def _run(self, request: HttpRequest) -> HttpResponse:
        body = await request.json()
        code, figures, timeout = body.get("code"), body.get("figures", ["png"]), body.get("timeout")
        if not isinstance(code, str) or len(code) > MOST_CODE:
            raise InvalidRequest(f"'code' must be text of at most {MOST_CODE} characters", field="code")
        if not isinstance(figures, list) or not set(figures) <= {"png", "svg"}:
            raise InvalidRequest("'figures' must be a list of png and svg", field="figures")
        if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
            raise InvalidRequest("'timeout' must be a number above 0", field="timeout")
        context = self._of(request.args[0], body)
        cell = context.ask(code, figures, timeout, OUTPUT_LIMIT)
        if not request.flag("wait"):
            return json_response(cell.info(), 201)
        return await self._ended(context, cell)

    def _of(self, name: str, body: Json) -> CodeContext:
        known = self._contexts.get(name)
        if known is not None:
            if body.get("env") not in {None, known.env}:
                raise Conflict(
                    f"code context '{name}' has another environment",
                    field="env",
                    hint="delete it first, or use another name",
                )
            return known
        if not _NAME.fullmatch(name):
            raise InvalidRequest("this is not a valid name for a code context", field="name")
        if len(self._contexts) >= MOST_CONTEXTS:
            raise LimitExceeded(f"there are {MOST_CONTEXTS} code contexts already", hint="delete one")
        context = CodeContext(name, self._commands, ContextLaunch(self._python, self._release, body))
        self._contexts[name] = context
        return context

    async def _result(self, request: HttpRequest) -> HttpResponse:
        context = self._get(request)
        return await self._ended(context, context.cell(request.args[1]))

    @staticmethod
    async def _ended(context: CodeContext, cell: Cell) -> HttpResponse:
        await asyncio.shield(cell.finished)
        if cell.refusal is not None:
            raise cell.refusal
        return json_response(cell.result(context.name))

    async def _output(self, request: HttpRequest) -> HttpResponse:
        cell = self._get(request).cell(request.args[1])
        stream = frames_of(cell, request.number("offset", 0), follow=request.flag("follow"))
        return HttpResponse(stream=stream, content_type=b"application/x-carrel-frames")
