"""Remembers which runs have begun here. A run is one dispatch of an operation that must not happen twice; the server
chooses its name.

A server that takes over from another asks whether a run has begun. Asking also forbids it: a run that had not begun by
then never begins, even if its request is still waiting in a socket.
"""

from __future__ import annotations

from carrel.errors import Conflict
from carrel.supervisor.http import HttpRequest, HttpResponse, HttpRouter, json_response

MOST = 4096
"""How many are remembered. Runs come from approvals by people, so this is plenty."""


class Runs:
    """The runs of one sandbox."""

    def __init__(self) -> None:
        self._begun: dict[str, None] = {}
        self._void: dict[str, None] = {}
        self._forgot = False

    def routes(self, router: HttpRouter) -> None:
        """Add the route. The router must call `begin` for every request that is part of a run."""
        router.add("POST", "/runs/{}/void", self._ask)

    def begin(self, run: str) -> None:
        """Record that a run begins. Raises `Conflict` when it was forbidden."""
        if run in self._void:
            raise Conflict("another server has taken over and cancelled this", field="run", hint="ask again")
        if run not in self._begun:
            self._begun[run] = None
            if len(self._begun) > MOST:
                del self._begun[next(iter(self._begun))]
                self._forgot = True

    def void(self, run: str) -> bool | None:
        """Return whether a run has begun, and forbid it if not. None when that is no longer known."""
        if run in self._begun:
            return True
        if run not in self._void:
            if self._forgot or len(self._void) >= MOST:
                return None
            self._void[run] = None
        return False

    async def _ask(self, request: HttpRequest) -> HttpResponse:
        return json_response({"begun": self.void(request.args[0])})
