"""The requests that are under way, by the token they were made with: what is open ends with its token.

One place for every stream and terminal, and no stream looks by itself: whoever revokes a token tells, and expiry has a
timer. Knows no protocol; how a request is broken off is told to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from carrel.errors import Unauthorized
from carrel.identity import Identity

_LONGEST_TIMER_S = 3600.0
"""Clocks are set now and then, so an end that is far away is looked at again before."""


class OpenRequest:
    """One request with a token. `close` it when it is over."""

    __slots__ = ("_break_off", "_identity", "_owner", "_revoked", "_timer", "broken_off")

    def __init__(self, owner: OpenRequests, identity: Identity):
        self._owner = owner
        self._identity = identity
        self._revoked = False
        self._break_off: Callable[[], object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.broken_off = False
        """Whether it was broken off because of its token."""

    @property
    def token_id(self) -> str:
        """The token it was made with."""
        return self._identity.token_id or ""

    @property
    def worthless(self) -> bool:
        """Whether the token was revoked or has expired meanwhile."""
        expires = self._identity.expires_at
        return self._revoked or (expires is not None and expires <= self._owner.clock())

    def refusal(self) -> Unauthorized:
        """What to tell who goes on with a worthless token."""
        why = "was revoked" if self._revoked else "has expired"
        return Unauthorized(
            f"the token {why} while this was under way; what was asked for may have been done",
            field="Authorization",
            hint="ask for a new one",
        )

    def stays_open(self, break_off: Callable[[], object]) -> None:
        """It is a stream: `break_off` is called once, when its token becomes worthless."""
        self._break_off = break_off
        self._look()

    def revoke(self) -> None:
        """The token is worthless from now on."""
        self._revoked = True
        self._look()

    def close(self) -> None:
        """It is over."""
        self._break_off = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._owner.forget(self)

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._break_off is None:
            return
        if self.worthless:
            break_off, self._break_off, self.broken_off = self._break_off, None, True
            break_off()
        elif self._identity.expires_at is not None:
            wait = min(self._identity.expires_at - self._owner.clock(), _LONGEST_TIMER_S)
            self._timer = asyncio.get_running_loop().call_later(max(wait, 0.0), self._look)


class OpenRequests:
    """Every request under way on this server that was made with a token somebody may revoke."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self.clock = clock
        self._by_token: dict[str, set[OpenRequest]] = {}

    def open(self, identity: Identity) -> OpenRequest | None:
        """A request begins; None for who has no such token."""
        if identity.token_id is None:
            return None
        request = OpenRequest(self, identity)
        self._by_token.setdefault(identity.token_id, set()).add(request)
        return request

    def forget(self, request: OpenRequest) -> None:
        """A request is over. May be repeated."""
        others = self._by_token.get(request.token_id)
        if others is not None:
            others.discard(request)
            if not others:
                del self._by_token[request.token_id]

    def tokens(self) -> list[str]:
        """The ids of the tokens that are in use right now."""
        return list(self._by_token)

    def revoked(self, token_id: str) -> None:
        """A token was revoked: what stays open with it is broken off."""
        for request in list(self._by_token.get(token_id, ())):
            request.revoke()
