"""Before every route: whether who asks may do this, and there. Knows operations by their ids and nothing of them.

A route is about the sandbox or context its path names. What has it elsewhere, in the body or in what it finds, is in
`THEMSELVES` and asks with `require`; what shows a list shows no more than `Identity.reaches` says.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from carrel.control.operations.caller import caller
from carrel.control.plane import ControlPlane
from carrel.errors import NotFound
from carrel.identity import ROOT, Identity

THEMSELVES = frozenset(
    {
        "deploy_or_resume", "get_approval", "decide_approval", "search_audit", "export_audit",
        "create_token", "list_tokens", "get_token", "revoke_token",
    }
)  # fmt: skip
_NAMED = re.compile(r"\(\?P<\w+>")


def who() -> Identity:
    """Who asks."""
    return caller.get().identity


def require(operation: str, context_id: str | None) -> None:
    """Refuse who may not do this in that context; None is what belongs to no context."""
    identity = who()
    if identity is not ROOT and (refused := identity.may(operation, context_id)) is not None:
        raise refused


async def permit(operation: str, scope: Scope) -> None:
    """Refuse who may not do this to what the path names."""
    identity = who()
    if identity is ROOT:
        return
    if (refused := identity.lacks(operation)) is not None:
        raise refused
    names = scope["path_params"]
    if "context_id" in names:
        require(operation, names["context_id"])
    elif "id" in names:
        plane: ControlPlane = scope["app"].state.plane
        name = names["id"]
        try:
            context_id = (await plane.sessions.record(name)).context_id
        except NotFound:
            context_id = name  # then it can only be a context: the route says that there is none
        if not identity.reaches(context_id):
            # What is out of reach is told like what is not there: nothing is said of it.
            raise identity.refusal(operation, "reach", f"'{name[:128]}' is out of the token's reach")
    elif operation not in THEMSELVES:
        require(operation, None)


class GuardedRoute(APIRoute):
    """A route that asks before it does anything."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `permit`."""
        if who() is not ROOT:
            await permit(self.operation_id or "", scope)
        await super().handle(scope, receive, send)


class Router(APIRouter):
    """The routes of one resource, each of them guarded."""

    def __init__(self, **settings: Any):
        super().__init__(route_class=GuardedRoute, **settings)
        self._any: tuple[int, re.Pattern[str]] = 0, re.compile(r"(?!)")

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Routes are tried one after the other: those of a resource that has none for this path are passed over
        together.
        """
        if not scope.get("root_path") and self._paths().match(scope["path"]) is None:
            return Match.NONE, {}
        return super().matches(scope)

    def _paths(self) -> re.Pattern[str]:
        """What the path of any of the routes is like; made anew when there are more."""
        if self._any[0] != len(self.routes):
            known = [route.path_regex.pattern for route in self.routes if isinstance(route, Route | WebSocketRoute)]
            paths = [_NAMED.sub("(?:", each) for each in known] if len(known) == len(self.routes) else [""]
            self._any = len(self.routes), re.compile("|".join(paths))
        return self._any[1]
