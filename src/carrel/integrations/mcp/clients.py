"""Access to contexts for the callers of an MCP server. Starts sandboxes when they are needed.

It has no token of its own: each request is sent with the caller's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from carrel.client import AsyncClient, AsyncSandbox
from carrel.errors import FileMissing, NotFound, NotRunning
from carrel.integrations.client_pool import ClientPool
from carrel.primitives.cache import Cache

T = TypeVar("T")
Work = Callable[[AsyncSandbox], Awaitable[T]]

MAX_CLIENTS = 256
MAX_ACCESSES = 4096


class ContextAccess:
    """A context with one caller's token. The first operation creates or resumes its sandbox."""

    def __init__(self, client: AsyncClient, context_id: str, template: str | None = None):
        self.client = client
        self.context_id = context_id
        self._template = template
        self._box: AsyncSandbox | None = None

    async def sandbox(self) -> AsyncSandbox:
        """Return the sandbox that was last known to run, or create or resume it."""
        if self._box is None:
            self._box = await self.client.sandbox(self.context_id, template=self._template)
        return self._box

    async def do(self, work: Work[T], approval: str | None = None) -> T:
        """Do one operation. If the sandbox was stopped meanwhile, nothing was done: resume it and try again."""
        box = await self.sandbox()
        try:
            return await work(_approved(box, approval))
        except FileMissing:
            raise
        except (NotRunning, NotFound):
            self._box = None
            return await work(_approved(await self.sandbox(), approval))


class Clients:
    """The contexts of one carrel server, as the callers of one MCP server reach them."""

    def __init__(self, url: str | None = None, template: str | None = None):
        self._template = template
        self.pool = ClientPool(url, MAX_CLIENTS)
        self._accesses: Cache[tuple[str | None, str], ContextAccess] = Cache(MAX_ACCESSES)

    @asynccontextmanager
    async def access(self, token: str | None, context_id: str) -> AsyncIterator[ContextAccess]:
        """Use a context with a token. Without a token the client finds its own, as every client does."""
        async with self.pool.client(token) as client:
            access = self._accesses.get((token, context_id))
            if access is None or access.client is not client:
                access = ContextAccess(client, context_id, self._template)
                self._accesses.put((token, context_id), access)
            yield access

    async def close(self) -> None:
        """Close every connection."""
        await self.pool.close()


def _approved(box: AsyncSandbox, approval: str | None) -> AsyncSandbox:
    return box if approval is None else box.with_approval(approval)
