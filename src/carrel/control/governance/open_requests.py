"""The open requests by their token: a stream or terminal ends when its token is revoked or expires.

One place for all of them: revoking a token calls this module, and expiry has a timer. Knows no protocol: each request
brings the function that cancels it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from carrel.errors import Unauthorized
from carrel.identity import Identity

_LONGEST_TIMER_S = 3600.0
"""Clocks may be changed, so a far expiry is checked again before."""


class OpenRequest:
    """One request with a token. `close` it at its end."""

    __slots__ = ("_cancel", "_identity", "_owner", "_revoked", "_timer", "cancelled")

    def __init__(self, owner: OpenRequests, identity: Identity):
        self._owner = owner
        self._identity = identity
        self._revoked = False
        self._cancel: Callable[[], object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.cancelled = False
        """Whether it was cancelled because of its token."""

    @property
    def token_id(self) -> str:
        return self._identity.token_id or ""

    @property
    def token_ended(self) -> bool:
        """Whether the token was revoked or has expired."""
        expires = self._identity.expires_at
        return self._revoked or (expires is not None and expires <= self._owner.clock())

    def refusal(self) -> Unauthorized:
        """Return the error for a request whose token is no longer valid."""
        why = "was revoked" if self._revoked else "has expired"
        return Unauthorized(
            f"the token {why} while this was under way; what was asked for may have been done",
            field="Authorization",
            hint="ask for a new one",
        )

    def stays_open(self, cancel: Callable[[], object]) -> None:
        """Mark it as a stream: `cancel` is called once, when its token is no longer valid."""
        self._cancel = cancel
        self._look()

    def revoke(self) -> None:
        self._revoked = True
        self._look()

    def close(self) -> None:
        self._cancel = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._owner.forget(self)

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._cancel is None:
            return
        if self.token_ended:
            cancel, self._cancel, self.cancelled = self._cancel, None, True
            cancel()
        elif self._identity.expires_at is not None:
            wait = min(self._identity.expires_at - self._owner.clock(), _LONGEST_TIMER_S)
            self._timer = asyncio.get_running_loop().call_later(max(wait, 0.0), self._look)


class OpenRequests:
    """Every open request of this server whose token can be revoked."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self.clock = clock
        self._by_token: dict[str, set[OpenRequest]] = {}

    def open(self, identity: Identity) -> OpenRequest | None:
        """Register a request; None for a caller without such a token."""
        if identity.token_id is None:
            return None
        request = OpenRequest(self, identity)
        self._by_token.setdefault(identity.token_id, set()).add(request)
        return request

    def forget(self, request: OpenRequest) -> None:
        """Remove a request. May be repeated."""
        others = self._by_token.get(request.token_id)
        if others is not None:
            others.discard(request)
            if not others:
                del self._by_token[request.token_id]

    def tokens(self) -> list[str]:
        """Return the ids of the tokens that are in use."""
        return list(self._by_token)

    def revoked(self, token_id: str) -> None:
        """Cancel the open streams of a token that was revoked."""
        for request in list(self._by_token.get(token_id, ())):
            request.revoke()
