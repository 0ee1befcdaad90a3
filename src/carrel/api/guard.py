"""The routes of the API, built from the table of operations, and the check before each: the token must have the scope
of the operation and reach its context.

Most routes name their sandbox or context in the path. One that finds its context elsewhere (`context_from` is
`handler`) checks it with `require`; one that lists filters by `Identity.reaches`.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from carrel.api.parameters import Depends, translated
from carrel.api.parts import CALLER, described, known_query
from carrel.api.problems import body_model, invalid, problems
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.errors import NotFound
from carrel.identity import ROOT
from carrel.models.operations import Operation

if TYPE_CHECKING:
    from fastapi.routing import APIRoute

Function = TypeVar("Function", bound=Callable[..., Any])


def require(caller: Caller, operation: Operation, context_id: str | None) -> None:
    """Check that the caller's token may perform an operation in a context; None for no context."""
    identity = caller.identity
    if identity is not ROOT and (refused := identity.may(operation.id, context_id)) is not None:
        raise refused


async def permit(caller: Caller, operation: Operation, scope: Scope) -> None:
    """Check that the caller's token may perform an operation on the sandbox or context in the path."""
    identity = caller.identity
    if identity is ROOT:
        return
    if (refused := identity.lacks(operation.id)) is not None:
        raise refused
    names = scope["path_params"]
    if "context_id" in names:
        require(caller, operation, names["context_id"])
    elif "id" in names:
        plane: ControlPlane = scope["app"].state.plane
        name = names["id"]
        try:
            context_id = (await plane.sessions.record(name)).context_id
        except NotFound:
            # The events of a job are asked for by its id. Anything else can only be a context; the route answers 404.
            context_id = await plane.jobs.context_of(name) or name
        if not identity.reaches(context_id):
            # The answer is the same whether it exists or not, so that it reveals nothing.
            raise identity.refusal(operation.id, "reach", f"'{name[:128]}' is out of the token's reach")
    elif operation.context_from != "handler":
        require(caller, operation, None)


_importing, _imported = threading.Lock(), threading.Event()


def import_framework() -> None:
    """Import FastAPI, which takes long, so call it in a thread. Until it returns nothing of FastAPI may be imported
    elsewhere: two threads that import parts of one package can wait for each other for ever.
    """
    with _importing:
        for name in ("fastapi.routing", "fastapi.exceptions", "fastapi.middleware.asyncexitstack"):
            import_module(name)
        _imported.set()


class OperationRoute(Route):
    """The route of one operation. It checks the caller's token before it does anything.

    A function that takes only the request parses it itself. The parameters of all others are parsed by FastAPI, whose
    part is built when it is first requested: to import FastAPI and to build all routes takes longer than the rest of
    a server's start. So whatever a new sandbox and its first command need is of the first kind.
    """

    def __init__(
        self,
        row: Operation,
        function: Callable[..., Any],
        parses: type[BaseModel] | None,
        queries: type[BaseModel] | None,
        settings: dict[str, Any],
    ):
        super().__init__(row.path, function, methods=[row.method], name=row.id)
        self.methods = {row.method}  # without HEAD, which is added to GET
        self.row = row
        self.parses = parses
        self._queries = queries
        self._needs_token = "security" not in settings["openapi_extra"]
        self._settings = settings
        self._plain = [*inspect.signature(function).parameters] == ["request"]
        if not self._plain:
            self.app = self._framed

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Also tell `known_query` the route."""
        match, found = super().matches(scope)
        if match is not Match.NONE:
            found["route"] = self
        return match, found

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `permit`."""
        caller: Caller = scope[CALLER]
        if caller.identity is not ROOT:
            await permit(caller, self.row, scope)
        if self._plain and self._needs_token and scope["query_string"] and scope["method"] in (self.methods or ()):
            known_query(Request(scope))
        await super().handle(scope, receive, send)

    @cached_property
    def built(self) -> APIRoute:
        """FastAPI's route. It also describes the operation in the OpenAPI document."""
        from fastapi.routing import APIRoute

        extra: dict[str, Any] = {}
        if self._plain:
            extra = described(self.parses, self._queries, *re.findall(r"{(\w+)}", self.path))
        extra |= self._settings["openapi_extra"]
        return APIRoute(
            self.path,
            translated(self.endpoint),
            methods=[self.row.method],
            operation_id=self.row.id,
            response_model=None,
            dependencies=[] if self._plain else [Depends(known_query).made()],
            **{**self._settings, "openapi_extra": extra or None},
        )

    @cached_property
    def query_names(self) -> frozenset[str]:
        """The names of the query parameters."""
        if self._plain:
            return frozenset(() if self._queries is None else self._queries.model_fields)
        found: set[str] = set()
        pending = [self.built.dependant]
        while pending:
            dependant = pending.pop()
            for field in dependant.query_params:
                model = field.field_info.annotation
                is_model = isinstance(model, type) and issubclass(model, BaseModel)
                found.update(model.model_fields if is_model else (field.alias,))  # type: ignore[union-attr]
            pending.extend(dependant.dependencies)
        return frozenset(found)

    async def _framed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request with FastAPI."""
        if not _imported.is_set():
            await asyncio.to_thread(import_framework)
        from fastapi.exceptions import RequestValidationError
        from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware

        route = self.built
        try:
            await AsyncExitStackMiddleware(route.app)(scope, receive, send)
        except RequestValidationError as error:
            body = None if route.body_field is None else body_model(route.body_field.field_info.annotation)
            raise invalid(error.errors(), body) from None


class GuardedRouter:
    """The routes of one resource, each of them guarded."""

    def __init__(self, *, tags: Sequence[str]):
        self.routes: list[OperationRoute | WebSocketRoute] = []
        self._tags = list(tags)

    def socket(self, row: Operation) -> Callable[[Function], Function]:
        """Add a route for WebSockets. Its function calls `permit`."""

        def declared(function: Function) -> Function:
            self.routes.append(WebSocketRoute(row.path, function, name=row.id))
            return function

        return declared

    def operation(
        self,
        row: Operation,
        summary: str,
        result: type[BaseModel] | dict[str, Any] | None,
        *fails: int,
        status: int = 200,
        responses: Mapping[int | str, dict[str, Any]] | None = None,
        parses: type[BaseModel] | None = None,
        queries: type[BaseModel] | None = None,
        needs_token: bool = True,
        openapi_extra: Mapping[str, Any] | None = None,
    ) -> Callable[[Function], Function]:
        """Add the route of an operation: its method, path and id come from its row.

        `result` is the model of the answer, or an OpenAPI response; None for an answer without a body. `fails` are the
        statuses of its problem answers, `responses` other answers. `parses` and `queries` are the models of the body
        and the query that a function reads itself, with `body_of` and `query_of`: the framework's parsing costs too
        much on frequent routes.
        """
        status = 204 if result is None else status
        answers: dict[int | str, dict[str, Any]] = {}
        if result is not None:
            answers[status] = result if isinstance(result, dict) else {"model": result}
        declared = problems(*fails)
        answers.update(responses or {})
        answers |= declared if needs_token else {each: declared[each] for each in fails}
        extra = dict(openapi_extra or {}) | ({} if needs_token else {"security": []})
        settings = {
            "summary": summary,
            "status_code": status,
            "responses": answers,
            "openapi_extra": extra,
            "tags": self._tags,
        }

        def added(function: Function) -> Function:
            self.routes.append(OperationRoute(row, function, parses, queries, settings))
            return function

        return added
