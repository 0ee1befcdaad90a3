"""Tokens of a server: make, list, revoke. Knows their routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

from carrel.client._async.connection import AsyncConnection, encoded
from carrel.models import IdentityInfo, NewToken, TokenInfo, TokenPage


class AsyncTokens:
    """`client.tokens`."""

    def __init__(self, connection: AsyncConnection):
        self._connection = connection

    async def create(
        self,
        name: str,
        *,
        kind: str,
        scopes: Sequence[str],
        namespace: str | None = None,
        contexts: Sequence[str] | None = None,
        expires: datetime | timedelta | None = None,
    ) -> NewToken:
        """Make a token; `.token` is shown this once. Scopes are `read`, `operate`, `approve` and `administer`."""
        moment = datetime.now(UTC) + expires if isinstance(expires, timedelta) else expires
        body = {
            "name": name,
            "kind": kind,
            "scopes": [*scopes],
            "namespace": namespace,
            "contexts": None if contexts is None else [*contexts],
            "expires_at": None if moment is None else moment.astimezone(UTC).isoformat(),
        }
        return await self._connection.post(NewToken, "/v1/tokens", encoded(body))

    def list(self) -> AsyncIterator[TokenInfo]:
        """Tokens, newest first, page by page; revoked ones too."""
        return self._connection.pages(TokenPage, "/v1/tokens", {})

    async def get(self, id: str) -> TokenInfo:
        """What is known of a token."""
        return await self._connection.get(TokenInfo, f"/v1/tokens/{quote(id, safe='')}")

    async def mine(self) -> IdentityInfo:
        """Who this client's own token stands for."""
        return await self._connection.get(IdentityInfo, "/v1/tokens/me")

    async def revoke(self, id: str) -> None:
        """Make a token worthless."""
        await self._connection.call("DELETE", f"/v1/tokens/{quote(id, safe='')}")
