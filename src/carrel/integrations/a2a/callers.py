"""Callers of the agent. Each sends a carrel token, which carrel checks, and with which their tasks call the API.

Tokens are held only in memory. Tasks belong to the identity of a token, so a new token of that identity finds them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from a2a.auth.user import User
from a2a.server.context import ServerCallContext

from carrel.client import AsyncClient
from carrel.client.locate import sendable
from carrel.errors import Unauthorized
from carrel.integrations.client_pool import ClientPool
from carrel.integrations.http import TOKEN_HINT
from carrel.models import IdentityInfo
from carrel.primitives.cache import Cache

TRUSTED_S = 5.0
"""How long a token is accepted without asking carrel again; carrel checks each operation anyway."""
MAX_CLIENTS = 64
MAX_NAMES = 4096


class A2aCaller(User):
    """One caller. The token is left out of the printed form."""

    def __init__(self, token: str, name: str):
        self.token = token
        self.name = name

    def __repr__(self) -> str:
        return f"<A2aCaller {self.name[:8]}>"

    @property
    def is_authenticated(self) -> bool:
        """Always true: carrel has accepted the token."""
        return True

    @property
    def user_name(self) -> str:
        """The owner of the caller's tasks."""
        return self.name


def owner(identity: IdentityInfo) -> str:
    """Return the name that owns the tasks of an identity; it is the same for each of its tokens.

    It includes the namespace and contexts of the token. Otherwise someone who may make tokens for one namespace could
    choose a name whose tasks belong to another.
    """
    known = [identity.subject, identity.namespace, identity.contexts and sorted(identity.contexts)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:40]


class Callers:
    """Checks the tokens of callers, and has a client for each of them."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic):
        self._clients = ClientPool(url, MAX_CLIENTS)
        self._names: Cache[str, str] = Cache(MAX_NAMES, TRUSTED_S, clock=clock)

    async def admit(self, token: str) -> A2aCaller:
        """Return the caller of a token. Raises `Unauthorized` when carrel does not accept the token."""
        if not sendable(token):
            raise Unauthorized("this is not a carrel token", hint=TOKEN_HINT)
        name = self._names.get(token)
        if name is None:
            async with self._clients.client(token) as client:
                name = owner(await client.tokens.mine())
            self._names.put(token, name)
        return A2aCaller(token, name)

    def client(self, caller: A2aCaller) -> AbstractAsyncContextManager[AsyncClient]:
        """Use a client with the caller's own token."""
        return self._clients.client(caller.token)

    async def close(self) -> None:
        """Close every client."""
        await self._clients.close()


def caller_of(context: ServerCallContext) -> A2aCaller:
    """Return the caller of a request."""
    if not isinstance(context.user, A2aCaller):
        raise Unauthorized("the request has no caller", hint=TOKEN_HINT)
    return context.user
