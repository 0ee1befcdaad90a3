"""Who calls: each shows a carrel token, which carrel itself checks, and which makes every API call of their tasks.

The token is held in memory alone. Tasks are kept under whom it stands for, so that a new token of the same finds them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from a2a.auth.user import User
from a2a.server.context import ServerCallContext

from carrel.client import AsyncClient
from carrel.client.locate import sendable
from carrel.errors import Unauthorized
from carrel.models import IdentityInfo

TRUSTED_S = 5.0
"""How long a token that carrel took is taken again without asking; whatever is done with it is checked there anyway."""
MOST_IDLE = 64


class A2aCaller(User):
    """One caller. Its printed form shows no token."""

    def __init__(self, token: str, name: str):
        self.token = token
        self.name = name

    def __repr__(self) -> str:
        return f"<A2aCaller {self.name[:8]}>"

    @property
    def is_authenticated(self) -> bool:
        """Always: a caller is made of a token that carrel took."""
        return True

    @property
    def user_name(self) -> str:
        """What their tasks are kept under."""
        return self.name


def owner(identity: IdentityInfo) -> str:
    """What tasks of an identity are kept under: the same for each of its tokens.

    The reach is part of it: whoever gives out tokens for a part of carrel must not find tasks of elsewhere by a name.
    """
    known = [identity.subject, identity.namespace, identity.contexts and sorted(identity.contexts)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:40]


@dataclass
class _CallerClient:
    client: AsyncClient
    users: int = 0
    trusted_until: float = 0.0
    name: str = ""


class Callers:
    """The clients of those who call, one each."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic):
        self._url = url
        self._clock = clock
        self._held: OrderedDict[str, _CallerClient] = OrderedDict()

    async def admit(self, token: str) -> A2aCaller:
        """The caller of a token. Raises `Unauthorized` when carrel does not take it."""
        if not sendable(token):
            raise Unauthorized("this is no token of carrel", hint="send `Authorization: Bearer TOKEN`")
        async with self._using(token) as held:
            if not self._clock() < held.trusted_until:
                held.name = owner(await held.client.tokens.mine())
                held.trusted_until = self._clock() + TRUSTED_S
            return A2aCaller(token, held.name)

    @asynccontextmanager
    async def client(self, caller: A2aCaller) -> AsyncIterator[AsyncClient]:
        """A client with the caller's own token, shared by all they do at once."""
        async with self._using(caller.token) as held:
            yield held.client

    @asynccontextmanager
    async def _using(self, token: str) -> AsyncIterator[_CallerClient]:
        held = self._held.get(token)
        if held is None:
            held = self._held[token] = _CallerClient(AsyncClient(self._url, token))
        self._held.move_to_end(token)
        held.users += 1
        try:
            yield held
        finally:
            held.users -= 1
            await self._tidy()

    async def _tidy(self) -> None:
        idle = [token for token, held in self._held.items() if not held.users]
        for token in idle[: max(0, len(idle) - MOST_IDLE)]:
            await self._held.pop(token).client.close()

    async def close(self) -> None:
        """Close every client."""
        while self._held:
            _, held = self._held.popitem()
            await held.client.close()


def caller_of(context: ServerCallContext) -> A2aCaller:
    """The caller of a request that came through the gate."""
    if not isinstance(context.user, A2aCaller):
        raise Unauthorized("nobody is known to have sent this", hint="send `Authorization: Bearer TOKEN`")
    return context.user
