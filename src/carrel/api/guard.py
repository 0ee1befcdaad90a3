"""The routes of the API, built from the table of operations, and the check before each: the token must have the scope
of the operation and reach its context.

Most routes name their sandbox or context in the path. One that finds its context elsewhere (`context_from` is
`handler`) checks it with `require`; one that lists filters by `Identity.reaches`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from carrel.api.parts import CALLER, described, known_query
from carrel.api.problems import problems
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.errors import NotFound
from carrel.identity import ROOT
from carrel.models.operations import OPERATIONS, Operation

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
            context_id = name  # it can only be a context; the route answers 404
        if not identity.reaches(context_id):
            # The answer is the same whether it exists or not, so that it reveals nothing.
            raise identity.refusal(operation.id, "reach", f"'{name[:128]}' is out of the token's reach")
    elif operation.context_from != "handler":
        require(caller, operation, None)


class GuardedRoute(APIRoute):
    """A route that checks the caller's token before it does anything."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `permit`."""
        caller: Caller = scope[CALLER]
        if caller.identity is not ROOT:
            await permit(caller, OPERATIONS[self.operation_id or ""], scope)
        await super().handle(scope, receive, send)


class GuardedRouter(APIRouter):
    """The routes of one resource, each of them guarded."""

    def __init__(self, **settings: Any):
        super().__init__(route_class=GuardedRoute, **settings)

    def operation(
        self,
        row: Operation,
        summary: str,
        result: type[BaseModel] | dict[str, Any] | None,
        *fails: int,
        status: int = 200,
        responses: Mapping[int | str, dict[str, Any]] | None = None,
        parses: type[BaseModel] | None = None,
        needs_token: bool = True,
        openapi_extra: Mapping[str, Any] | None = None,
    ) -> Callable[[Function], Function]:
        """Add the route of an operation: its method, path and id come from its row.

        `result` is the model of the answer, or an OpenAPI response; None for an answer without a body. `fails` are the
        statuses of its problem answers, `responses` other answers. `parses` is the model of a body that the function
        reads itself with `body_of`: the framework's parsing costs too much on frequent routes.
        """
        status = 204 if result is None else status
        answers: dict[int | str, dict[str, Any]] = {}
        if result is not None:
            answers[status] = result if isinstance(result, dict) else {"model": result}
        declared = problems(*fails)
        answers.update(responses or {})
        answers |= declared if needs_token else {each: declared[each] for each in fails}
        extra: dict[str, Any] = {} if parses is None else described(parses, *re.findall(r"{(\w+)}", row.path))
        extra |= openapi_extra or {}
        if not needs_token:
            extra["security"] = []
        return self.api_route(
            row.path.removeprefix(self.prefix),
            methods=[row.method],
            operation_id=row.id,
            response_model=None,
            summary=summary,
            status_code=status,
            responses=answers,
            openapi_extra=extra or None,
            dependencies=[Depends(known_query)] if parses is None and needs_token else None,
        )
