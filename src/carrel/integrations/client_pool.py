"""Clients of carrel for a server with many callers: one for each token, shared by all calls with that token."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from carrel.client import AsyncClient
from carrel.errors import ServerUnreachable


@dataclass
class _Pooled:
    client: AsyncClient
    users: int = 0


class ClientPool:
    """Keeps at most `max_clients` open, and more while they are in use. Closes the least recently used first."""

    def __init__(self, url: str | None, max_clients: int):
        self._url = url
        self._max_clients = max_clients
        self._pooled: OrderedDict[str | None, _Pooled] = OrderedDict()

    def __len__(self) -> int:
        """Count the clients that may be used again."""
        return len(self._pooled)

    def tokens(self) -> list[str | None]:
        """List the tokens that have a client, the least recently used first."""
        return list(self._pooled)

    @asynccontextmanager
    async def client(self, token: str | None) -> AsyncIterator[AsyncClient]:
        """Use the client of a token. Without a token the client finds its own, as every client does."""
        pooled = self._pooled.get(token)
        if pooled is None:
            pooled = self._pooled[token] = _Pooled(AsyncClient(self._url, token))
        self._pooled.move_to_end(token)
        pooled.users += 1
        try:
            yield pooled.client
        except ServerUnreachable:
            # The next call makes a new client: a local server that was restarted may have another address.
            if self._pooled.get(token) is pooled:
                del self._pooled[token]
            raise
        finally:
            pooled.users -= 1
            await self._close_unused(token, pooled)

    async def _close_unused(self, token: str | None, released: _Pooled) -> None:
        unused = [released] if not released.users and self._pooled.get(token) is not released else []
        idle = [key for key, pooled in self._pooled.items() if not pooled.users]
        # Remove all before the first is closed: while one is closed, another could be taken into use again.
        unused += [self._pooled.pop(key) for key in idle[: max(0, len(self._pooled) - self._max_clients)]]
        if unused:
            await asyncio.shield(_close([pooled.client for pooled in unused]))

    async def close(self) -> None:
        """Close every client."""
        clients = [pooled.client for pooled in self._pooled.values()]
        self._pooled.clear()
        await _close(clients)


async def _close(clients: list[AsyncClient]) -> None:
    for client in clients:
        await client.close()
