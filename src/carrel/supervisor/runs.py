"""Remembers which runs were begun here, so that a server that takes over can ask: a run is the dispatch of an operation
that may happen once, by the name its server gave it.

Whoever asks also forbids: a run that was not begun when that was asked never begins, even if its request still lies in
a socket. Knows nothing of what is run.
"""

from __future__ import annotations

from carrel.errors import Conflict
from carrel.supervisor.http import Request, Response, Router, json_response

MOST = 4096
"""How many are remembered. They come from people's approvals, so that these are many."""


class Runs:
    """The runs of one sandbox."""

    def __init__(self) -> None:
        self._begun: dict[str, None] = {}
        self._void: dict[str, None] = {}
        self._forgot = False

    def routes(self, router: Router) -> None:
        """Add the route, and see every request that is part of a run before it is handled."""
        router.add("POST", "/runs/{}/void", self._ask)
        router.on_run = self.begin

    def begin(self, run: str) -> None:
        """A request of a run is about to be handled; `Conflict` when it was forbidden."""
        if run in self._void:
            raise Conflict("a server that took over has called this off", field="run", hint="ask again")
        if run not in self._begun:
            self._begun[run] = None
            if len(self._begun) > MOST:
                del self._begun[next(iter(self._begun))]
                self._forgot = True

    def void(self, run: str) -> bool | None:
        """Whether a run was begun; if not, it never will. None when that is not known any more."""
        if run in self._begun:
            return True
        if run not in self._void:
            if self._forgot or len(self._void) >= MOST:
                return None
            self._void[run] = None
        return False

    async def _ask(self, request: Request) -> Response:
        return json_response({"begun": self.void(request.args[0])})
