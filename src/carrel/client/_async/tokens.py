"""API tokens of a server: create, list, revoke."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

from carrel.client._async.connection import AsyncConnection
from carrel.models import IdentityInfo, NewToken, TokenInfo, TokenPage


class AsyncTokens:
    """`client.tokens`: who may do what, and in which contexts."""

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
        """Create a token. Scopes are `read`, `operate`, `approve`, `administer` and `log`.

        new = await client.tokens.create("coder", kind="agent", scopes=["operate"], expires=timedelta(days=30))
        print(new.token)  # the server never returns it again
        """
        moment = datetime.now(UTC) + expires if isinstance(expires, timedelta) else expires
        body = {
            "name": name,
            "kind": kind,
            "scopes": scopes,
            "namespace": namespace,
            "contexts": contexts,
            "expires_at": None if moment is None else moment.astimezone(UTC).isoformat(),
        }
        return await self._connection.post(NewToken, "/v1/tokens", body)

    def list(self) -> AsyncIterator[TokenInfo]:
        """List tokens, newest first, also revoked ones. Pages are fetched as you iterate."""
        return self._connection.pages(TokenPage, "/v1/tokens")

    async def get(self, id: str) -> TokenInfo:
        """Get the description of a token, without the token itself."""
        return await self._connection.get(TokenInfo, f"/v1/tokens/{quote(id, safe='')}")

    async def mine(self) -> IdentityInfo:
        """Get the identity of this client's own token."""
        return await self._connection.get(IdentityInfo, "/v1/tokens/me")

    async def revoke(self, id: str) -> None:
        """Revoke a token."""
        await self._connection.send("DELETE", f"/v1/tokens/{quote(id, safe='')}")
