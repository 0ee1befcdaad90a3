"""Approvals: list, watch, decide."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from urllib.parse import quote

from pydantic import ValidationError

from carrel.client._async.connection import AsyncConnection
from carrel.errors import PlatformError
from carrel.models import ApprovalBatchResult, ApprovalInfo, ApprovalPage, ApprovalScope, ApprovalState


class AsyncApprovals:
    """`client.approvals`: operations that wait for a person."""

    def __init__(self, connection: AsyncConnection):
        self._connection = connection

    def list(
        self, *, state: ApprovalState | str | None = None, context_id: str | None = None
    ) -> AsyncIterator[ApprovalInfo]:
        """List approvals, newest first. Pages are fetched as you iterate."""
        query = {"state": state, "context_id": context_id}
        return self._connection.pages(ApprovalPage, "/v1/approvals", query)

    async def get(self, id: str) -> ApprovalInfo:
        """Get one approval, with its decision once there is one."""
        return await self._connection.get(ApprovalInfo, _path(id))

    async def approve(
        self,
        id: str,
        *,
        scope: ApprovalScope | str = "once",
        rule: str | None = None,
        message: str | None = None,
    ) -> ApprovalInfo:
        """Approve an operation.

        `scope` is `once`, or `context` to allow the same operation in this context from now on. `rule` adds a rule to
        the policy of the context, for example `shell(git push:*)`.
        """
        body = {"approve": True, "scope": "rule" if rule is not None else scope, "rule": rule, "message": message}
        return await self._connection.post(ApprovalInfo, f"{_path(id)}/decide", body)

    async def deny(self, id: str, *, message: str | None = None) -> ApprovalInfo:
        """Deny an operation. The agent receives the message."""
        return await self._connection.post(ApprovalInfo, f"{_path(id)}/decide", {"approve": False, "message": message})

    async def decide_many(
        self,
        ids: Iterable[str],
        *,
        approve: bool,
        scope: ApprovalScope | str = "once",
        rule: str | None = None,
        message: str | None = None,
    ) -> ApprovalBatchResult:
        """Make the same decision on several approvals. The result says for each whether it was decided."""
        given = {"scope": "rule" if rule is not None else scope, "rule": rule, "message": message}
        decision = {"approve": approve, **{name: value for name, value in given.items() if value is not None}}
        body = {"ids": [*ids], "decision": decision}
        return await self._connection.post(ApprovalBatchResult, "/v1/approvals/decide", body)

    async def watch(self) -> AsyncIterator[ApprovalInfo]:
        """Yield the pending approvals, then each approval that is requested, decided or expires. Ends with the
        server.
        """
        async with aclosing(self._connection.lines("GET", "/v1/approvals/watch")) as lines:
            async for line in lines:
                try:
                    yield ApprovalInfo.model_validate_json(line)
                except ValidationError:
                    raise PlatformError("the server sent an approval that cannot be read") from None


def _path(id: str) -> str:
    return f"/v1/approvals/{quote(id, safe='')}"
