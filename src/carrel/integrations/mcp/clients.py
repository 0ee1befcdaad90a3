"""How callers reach carrel: a client for each token, a place for each context. Starts sandboxes when they are needed.

Holds no token of its own: each request is sent with that of who calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio

from carrel.client import AsyncClient, AsyncSandbox
from carrel.errors import FileMissing, NotFound, NotRunning, ServerUnreachable

T = TypeVar("T")
Work = Callable[[AsyncSandbox], Awaitable[T]]

MOST_CLIENTS = 256
MOST_PLACES = 1024


class ContextAccess:
    """A context as one caller reaches it. Its sandbox is made or resumed when something is done in it."""

    def __init__(self, client: AsyncClient, context_id: str, template: str | None = None):
        self.client = client
        self.context_id = context_id
        self._template = template
        self._box: AsyncSandbox | None = None

    async def sandbox(self) -> AsyncSandbox:
        """The sandbox that was last known to run; made or resumed when none was."""
        if self._box is None:
            self._box = await self.client.sandbox(self.context_id, template=self._template)
        return self._box

    async def do(self, work: Work[T], approval: str | None = None) -> T:
        """Do one operation. A sandbox that has been stopped meanwhile is resumed: nothing was done in it then."""
        box = await self.sandbox()
        try:
            return await work(_approved(box, approval))
        except FileMissing:
            raise
        except (NotRunning, NotFound):
            self._box = None
            return await work(_approved(await self.sandbox(), approval))


class Clients:
    """The carrel server as the callers of one MCP server reach it."""

    def __init__(self, url: str | None = None, template: str | None = None):
        self._url = url
        self._template = template
        self._clients: OrderedDict[str, _PooledClient] = OrderedDict()

    @asynccontextmanager
    async def place(self, token: str | None, context_id: str) -> AsyncIterator[ContextAccess]:
        """A context for as long as something is done there. Without a token the client finds its own, as any does."""
        held = self._held(token)
        held.users += 1
        try:
            yield held.place(context_id, self._template)
        except ServerUnreachable:
            # The next call looks anew: a local server that was started again may be elsewhere.
            if self._clients.get(token or "") is held:
                del self._clients[token or ""]
                held.dropped = True
            raise
        finally:
            held.users -= 1
            await self._let_go(held)

    def _held(self, token: str | None) -> _PooledClient:
        key = token or ""
        held = self._clients.get(key)
        if held is None:
            held = self._clients[key] = _PooledClient(AsyncClient(self._url, token))
        self._clients.move_to_end(key)
        return held

    async def _let_go(self, held: _PooledClient) -> None:
        gone = [held] if held.dropped and not held.users else []
        idle = [key for key, each in self._clients.items() if not each.users]
        # All at once: one that is still known may be in use again by the time that another is closed.
        gone += [self._clients.pop(key) for key in idle[: max(0, len(self._clients) - MOST_CLIENTS)]]
        with anyio.CancelScope(shield=True):
            for each in gone:
                await each.client.close()

    async def close(self) -> None:
        """Close every connection."""
        while self._clients:
            await self._clients.popitem()[1].client.close()


class _PooledClient:
    """A client, the places that were reached with it, and how many calls use it now."""

    def __init__(self, client: AsyncClient):
        self.client = client
        self.users = 0
        self.dropped = False
        self._places: OrderedDict[str, ContextAccess] = OrderedDict()

    def place(self, context_id: str, template: str | None) -> ContextAccess:
        place = self._places.get(context_id)
        if place is None:
            place = self._places[context_id] = ContextAccess(self.client, context_id, template)
            if len(self._places) > MOST_PLACES:
                self._places.popitem(last=False)
        self._places.move_to_end(context_id)
        return place


def _approved(box: AsyncSandbox, approval: str | None) -> AsyncSandbox:
    return box if approval is None else box.with_approval(approval)
