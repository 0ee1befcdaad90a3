"""The MCP servers that contexts have declared, with a short memory of what was read."""

from __future__ import annotations

import time
from collections import OrderedDict

from carrel.control.mcp.links import McpLinks
from carrel.control.sessions.attachments import Attachment, Fork
from carrel.control.sessions.live import LiveSandbox
from carrel.store.mcp_servers import McpServerRecord, McpServerStore

FRESH_S = 2.0
"""How long a change made by another server may stay unseen."""
MOST_SEEN = 4096


class McpDeclarations(Attachment):
    """Forked and deleted with their contexts; the conversations with their processes end with the sandbox."""

    def __init__(self, store: McpServerStore, links: McpLinks):
        self._store = store
        self._links = links
        self._seen: OrderedDict[tuple[str, str], tuple[McpServerRecord, float]] = OrderedDict()

    async def find(self, context: str, server: str) -> McpServerRecord | None:
        """A declaration, as it was a moment ago at most."""
        key, now = (context, server), time.monotonic()
        record, seen_at = self._seen.get(key, (None, 0.0))
        if record is not None and now - seen_at < FRESH_S:
            return record
        record = await self._store.declared(context, server)
        if record is not None:
            self._seen[key] = (record, now)
            while len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
        return record

    def changed(self, context: str, server: str) -> None:
        """The next `find` reads the declaration anew."""
        self._seen.pop((context, server), None)

    def detach(self, box: LiveSandbox) -> None:
        """End the conversations with servers in a sandbox that is about to end."""
        self._links.ended(box)

    async def fork(self, fork: Fork) -> None:
        """A fork has the servers of its origin."""
        fork.undo.push_async_callback(self.forget, fork.context_id)
        await self._store.copy(fork.origin, fork.context_id)

    async def forget(self, context_id: str) -> None:
        """The servers of a context are deleted with it."""
        await self._store.forget(context_id)
        for key in [key for key in self._seen if key[0] == context_id]:
            del self._seen[key]
