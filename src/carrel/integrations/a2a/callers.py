"""Who calls: each caller is a carrel token, which carrel itself checks, and which makes every API call of their tasks.

The token is held in memory alone; tasks are kept under a digest of it.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from a2a.auth.user import User
from a2a.server.context import ServerCallContext

from carrel.client import AsyncClient
from carrel.errors import Denied, NotFound, Unauthorized

TRUSTED_S = 5.0
"""How long a token that carrel took is taken again without asking; whatever is done with it is checked there anyway."""
MOST_IDLE = 64
_NOBODY = "a2a-caller-check"


class Caller(User):
    """One caller. Its printed form shows no token."""

    def __init__(self, token: str):
        self.token = token
        self.name = hashlib.sha256(token.encode()).hexdigest()[:40]

    def __repr__(self) -> str:
        return f"<Caller {self.name[:8]}>"

    @property
    def is_authenticated(self) -> bool:
        """Always: a caller is made of a token that carrel took."""
        return True

    @property
    def user_name(self) -> str:
        """What their tasks are kept under."""
        return self.name


@dataclass
class _Held:
    client: AsyncClient
    users: int = 0
    trusted_until: float = 0.0


class Callers:
    """The clients of those who call, one each."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic):
        self._url = url
        self._clock = clock
        self._held: OrderedDict[str, _Held] = OrderedDict()

    async def admit(self, token: str) -> Caller:
        """The caller of a token. Raises `Unauthorized` when carrel does not take it."""
        if not token or len(token) > 512 or not token.isascii() or not token.isprintable():
            raise Unauthorized("this is no token of carrel", hint="send `Authorization: Bearer TOKEN`")
        caller = Caller(token)
        known = self._held.get(caller.name)
        if known is not None and self._clock() < known.trusted_until:
            return caller
        async with self.client(caller) as client:
            try:
                await client.find(_NOBODY)
            except (NotFound, Denied):
                pass  # whoever is told that there is nothing, or nothing for them, was known
            self._held[caller.name].trusted_until = self._clock() + TRUSTED_S
        return caller

    @asynccontextmanager
    async def client(self, caller: Caller) -> AsyncIterator[AsyncClient]:
        """A client with the caller's own token, shared by all they do at once."""
        held = self._held.get(caller.name)
        if held is None:
            held = self._held[caller.name] = _Held(AsyncClient(self._url, caller.token))
        self._held.move_to_end(caller.name)
        held.users += 1
        try:
            yield held.client
        finally:
            held.users -= 1
            await self._tidy()

    async def _tidy(self) -> None:
        idle = [name for name, held in self._held.items() if not held.users]
        for name in idle[: max(0, len(idle) - MOST_IDLE)]:
            await self._held.pop(name).client.close()

    async def close(self) -> None:
        """Close every client."""
        while self._held:
            _, held = self._held.popitem()
            await held.client.close()


def caller_of(context: ServerCallContext) -> Caller:
    """The caller of a request that came through the gate."""
    if not isinstance(context.user, Caller):
        raise Unauthorized("nobody is known to have sent this", hint="send `Authorization: Bearer TOKEN`")
    return context.user
