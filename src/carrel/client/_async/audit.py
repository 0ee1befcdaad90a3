"""The audit log of a server: search it, copy it out, see who signs it. Knows its routes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from datetime import datetime

from carrel.client._async.connection import AsyncConnection
from carrel.models import AuditKey, AuditPage, AuditPruned, AuditRecord


class AsyncAudit:
    """`client.audit`."""

    def __init__(self, connection: AsyncConnection):
        self._connection = connection

    def search(
        self,
        *,
        context_id: str | None = None,
        actor: str | None = None,
        kind: str | None = None,
        name: str | None = None,
        decision: str | None = None,
        result: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        text: str | None = None,
    ) -> AsyncIterator[AuditRecord]:
        """Operations, newest first, page by page. `text` is looked for in the arguments."""
        query = {
            "context_id": context_id,
            "actor": actor,
            "kind": kind,
            "name": name,
            "decision": decision,
            "result": result,
            "since": None if since is None else since.isoformat(),
            "until": None if until is None else until.isoformat(),
            "text": text,
        }
        return self._connection.pages(AuditPage, "/v1/audit", query)

    def export(self, *, context_id: str | None = None, compress: bool = False) -> AsyncGenerator[bytes, None]:
        """The log, or the part of one context, as a file that `carrel audit verify` checks, in pieces."""
        query = {"context_id": context_id, "compress": "true" if compress else None}
        return self._connection.pieces("/v1/audit/export", query, self._connection.patience(None))

    async def prune(self) -> AuditPruned:
        """Remove the records that are older than the server keeps them; it does so by itself every day."""
        return await self._connection.post(AuditPruned, "/v1/audit/prune", b"", timeout=self._connection.patience(None))

    async def key(self) -> AuditKey:
        """Who signs the log."""
        return await self._connection.get(AuditKey, "/v1/audit/key")
