"""The audit log of a server: search, export, prune, signing key."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from datetime import datetime

from carrel.client._async.connection import AsyncConnection
from carrel.models import AuditKey, AuditPage, AuditPruned, AuditRecord


class AsyncAudit:
    """`client.audit`: who did what, and proof of it."""

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
        """List records of operations, newest first. `text` is searched for in the arguments of each operation.

        for record in client.audit.search(context_id="conversation-42", decision="deny"):
            print(record.at, record.name, record.reason)
        """
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
        """Yield the bytes of a file that `carrel audit verify` can check: the whole log, or that of one context."""
        query = {"context_id": context_id, "compress": "true" if compress else None}
        return self._connection.pieces("/v1/audit/export", query, deadline=None)

    async def prune(self) -> AuditPruned:
        """Remove records older than the retention of the server now. The server does so by itself every day."""
        return await self._connection.post(AuditPruned, "/v1/audit/prune", deadline=None)

    async def key(self) -> AuditKey:
        """Get the public key that the log is signed with."""
        return await self._connection.get(AuditKey, "/v1/audit/key")
